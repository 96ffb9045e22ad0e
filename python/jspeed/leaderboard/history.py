"""Read tables of results by others (records/history), shown beside ours and not verified by jspeed."""

import csv
import io
from datetime import datetime
from pathlib import Path
from typing import Any

from jspeed.errors import BadInput
from jspeed.files import read_input
from jspeed.leaderboard.board import HistoryRow

NAMES = {"modded-nanogpt": "PyTorch, the NanoGPT speedrun"}
COLUMNS = ("record", "time_minutes", "date", "steps", "tokens_per_step", "total_tokens", "step_avg_ms", "val_loss",
           "n_runs", "description")  # fmt: skip


def read_history(records: Path, name: str) -> list[HistoryRow]:
    """Return the records of ``history/NAME.csv`` in order: number, ``date`` (ISO 8601), ``seconds``, steps, tokens,
    mean loss, number of runs, what changed; None for what was not published. Raises BadInput for a wrong table."""
    path = records / "history" / f"{name}.csv"
    try:
        text = read_input(path, "restore it").decode()
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text; restore it") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise BadInput(f"{path}: expected the columns {', '.join(COLUMNS)}, found {reader.fieldnames}")
    return [_row(row, path, number) for number, row in enumerate(reader, 2)]


def _row(row: dict[str, str], path: Path, number: int) -> HistoryRow:
    def maybe(kind: type, name: str) -> Any:
        return kind(row[name]) if row[name] else None

    try:
        return {
            "record": int(row["record"]),
            "date": datetime.strptime(row["date"], "%m/%d/%y").date().isoformat(),
            "seconds": round(60 * float(row["time_minutes"]), 2),
            "steps": maybe(int, "steps"),
            "tokens_per_step": [int(part) for part in (row["tokens_per_step"] or "").split("/") if part],
            "tokens": maybe(int, "total_tokens"),
            "step_ms": maybe(float, "step_avg_ms"),
            "loss": maybe(float, "val_loss"),
            "n": maybe(int, "n_runs"),
            "what": row["description"],
        }
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path}: line {number} is not a record ({error}); restore it") from None
