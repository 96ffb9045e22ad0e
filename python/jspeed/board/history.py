"""Read tables of results by others (records/history), shown beside ours and not verified by
jspeed."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jspeed.board.board import BoardTrack, Histories, HistoryRow
from jspeed.board.records.prices import lines_of
from jspeed.errors import BadInput

NAMES = {"modded-nanogpt": "PyTorch, the NanoGPT speedrun"}
COLUMNS = ("record", "time_minutes", "date", "steps", "tokens_per_step", "total_tokens",
"step_avg_ms", "val_loss",
           "n_runs", "description")  # fmt: skip


def read_histories(records: Path, tracks: Sequence[BoardTrack]) -> Histories:
    """Return the tables that ``tracks`` name, by name; raises BadInput as :func:`read_history`
    does."""
    return {
        name: read_history(records, name)
        for name in sorted({t["history"] for t in tracks if t.get("history")})
    }


def read_history(records: Path, name: str) -> list[HistoryRow]:
    """Return the records of ``history/NAME.csv`` in order: number, ``date`` (ISO 8601),
    ``seconds``, steps, tokens, mean loss, number of runs, what changed; None for what was not
    published. Raises BadInput for a wrong table."""
    path = records / "history" / f"{name}.csv"
    return [_row(row, path, number) for number, row in enumerate(lines_of(path, COLUMNS), 2)]


def _row(row: dict[str, str], path: Path, number: int) -> HistoryRow:
    def maybe(kind: type, name: str) -> Any:
        return kind(row[name]) if row[name] else None

    try:
        return {
            "record": int(row["record"]),
            "date": datetime.strptime(row["date"], "%m/%d/%y").date().isoformat(),
            "seconds": round(60 * float(row["time_minutes"]), 2),
            "steps": maybe(int, "steps"),
            "tokens_per_step": [
                int(part) for part in (row["tokens_per_step"] or "").split("/") if part
            ],
            "tokens": maybe(int, "total_tokens"),
            "step_ms": maybe(float, "step_avg_ms"),
            "loss": maybe(float, "val_loss"),
            "n": maybe(int, "n_runs"),
            "what": row["description"],
        }
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path}: line {number} is not a record ({error}); restore it") from None
