"""The leaderboard's block in README.md: the best of each track, between two markers."""

from collections.abc import Sequence
from pathlib import Path

from jspeed.base.files import read_text
from jspeed.base.standard_streams import printable
from jspeed.board import formatting
from jspeed.board.board import BoardTrack, best
from jspeed.errors import BadInput

BEGIN = "<!-- leaderboard: made by scripts/leaderboard.py page -->"
END = "<!-- /leaderboard -->"


def block(tracks: Sequence[BoardTrack]) -> str:
    """Return the block as Markdown: a line for each track that has rules and a run, and the names
    of those without a run; what is text in it stays text."""
    lines, empty = [], []
    for track in tracks:
        if not track["ruled"]:
            continue
        entry = best(track)
        if not (entry and entry["seconds"] and entry["loss"]):
            empty.append(f"`{track['track']}`")
            continue
        seconds = formatting.seconds(entry["seconds"]["mean"])
        value = f"{entry['steps']:,} steps" if track["rank"] == "steps" else seconds
        loss = entry["loss"]
        devices = plain(f"{entry['devices']['count']} x {entry['devices']['kind']}")
        lines.append(
            f"- [`{track['track']}`](records/{track['track']}/track.toml): {value} by"
            f" {plain(entry['recipe'])}, loss {formatting.loss(loss['mean'])}, n={loss['n']},"
            f" {entry['level']} {entry['date']}, on {devices}"
        )
    if empty:
        lines += ["", f"No runs yet: {', '.join(empty)}."]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Return ``text`` as Markdown code, whatever is in it."""
    clean = printable(text).replace("`", "'").replace("|", "/").replace("<", "(").replace(">", ")")
    return f"`{clean}`"


def refreshed(path: Path, tracks: Sequence[BoardTrack]) -> tuple[str, str]:
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
    return text, f"{before}{BEGIN}\n{block(tracks)}\n{END}{after}"
