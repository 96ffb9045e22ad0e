"""The leaderboard's block in README.md: the best of each track, between two markers."""

from collections.abc import Sequence
from pathlib import Path

from jspeed.base.files import read_text
from jspeed.base.standard_streams import printable
from jspeed.board import formatting
from jspeed.board.board import BoardTrack, Histories, best
from jspeed.board.history import NAMES
from jspeed.errors import BadInput

BEGIN = "<!-- leaderboard: made by scripts/leaderboard.py page -->"
END = "<!-- /leaderboard -->"


def block(tracks: Sequence[BoardTrack], histories: Histories) -> str:
    """Return the block as Markdown: a row for each track that has rules and a run or a history, and
    the names of the others; what is text in it stays text."""
    empty = []
    lines = [
        "| track | best | recipe | mean loss | n | checked | date |",
        "|---|---|---|---|---|---|---|",
    ]
    for track in tracks:
        if not track["ruled"]:
            continue
        name = f"[`{track['track']}`](records/{track['track']}/track.toml)"
        entry, history = best(track), histories.get(track.get("history") or "")
        if entry and entry["seconds"] and entry["loss"]:
            seconds = formatting.seconds(entry["seconds"]["mean"])
            devices = plain(f"{entry['devices']['count']} x {entry['devices']['kind']}")
            loss = [formatting.loss(entry["loss"]["mean"]), str(entry["loss"]["n"])]
            value = (
                f"{entry['steps']:,} steps"
                if track["rank"] == "steps"
                else f"{seconds} on {devices}"
            )
            cells = [value, plain(entry["recipe"]), *loss, entry["level"], entry["date"]]
        elif history:
            cells = ["none yet", "", "", "", "", ""]
        else:
            empty.append(f"`{track['track']}`")
            continue
        lines.append(f"| {' | '.join([name, *cells])} |")
        if history:
            last = history[-1]
            cells = [
                formatting.seconds(last["seconds"]),
                f"record {last['record']}",
                formatting.loss(last["loss"]),
            ]
            cells += [str(last["n"] or formatting.NONE), "", last["date"]]
            lines.append(
                f"| {' | '.join([NAMES.get(track['history'], track['history']), *cells])} |"
            )
    if empty:
        lines += ["", f"No runs yet: {', '.join(empty)}."]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Return ``text`` as Markdown code in a table's cell, whatever is in it."""
    clean = printable(text).replace("`", "'").replace("|", "/").replace("<", "(").replace(">", ")")
    return f"`{clean}`"


def refreshed(path: Path, tracks: Sequence[BoardTrack], histories: Histories) -> tuple[str, str]:
    """Return the text of the README.md at ``path``, as it is and with the block of ``tracks``
    between its markers.

    Raises BadInput when the markers are missing, or it is not text.
    """
    text = read_text(path, "restore it, or give --out DIR")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BadInput(
            f"{path} lacks the markers {BEGIN} and {END}; put them where the leaderboard's block"
            " belongs"
        )
    return text, f"{before}{BEGIN}\n{block(tracks, histories)}\n{END}{after}"
