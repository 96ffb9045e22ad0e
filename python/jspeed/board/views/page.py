"""Render the board as one HTML page that opens from disk, and as leaderboard.json for other tools.

Both are pure functions of the board, the sources in the records and two texts; nothing is fetched,
and the one script sorts tables. A page holds the best entries of each track; leaderboard.json holds
all.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jspeed.base.files import write_whole
from jspeed.base.standard_streams import printable
from jspeed.board import formatting
from jspeed.board.board import BoardTrack, Histories, best
from jspeed.board.compare import change_lines, changes
from jspeed.board.history import NAMES, read_histories
from jspeed.board.judge import board
from jspeed.board.records.store import Records
from jspeed.board.records.trust import LONGEST
from jspeed.board.views import charts
from jspeed.board.views.readme import refreshed
from jspeed.errors import BadInput, writable_folder
from jspeed.record.run_json import finite_or_null

if TYPE_CHECKING:
    import jinja2

FOLDER = Path(__file__).parent
SHOWN = 60  # entries of a track on the page
DIFFS = 500_000  # characters of diffs on the page; what comes later is only named
TITLE = "jspeed leaderboard"
JSON = "leaderboard.json"


def contents(records: Records, rule: str, out: Path, readme: Path | None = None) -> dict[Path, str]:
    """Return the text of every file that the records make, by path: the page's in the folder
    ``out``, and ``readme``.

    ``rule`` is the timing rule, clock.py's docstring; ``readme`` is a README.md with a block for
    the board. Raises BadInput when that has none.
    """
    tracks = board(records)
    histories = read_histories(records.folder, tracks)
    made = {
        out / "index.html": html(tracks, histories, records.sources, rule),
        out / JSON: as_json(rule, tracks, histories),
    }
    if readme:
        made[readme] = refreshed(readme, tracks)[1]
    return made


def write(made: Mapping[Path, str]) -> None:
    """Write every file of :func:`contents` whole.

    Raises BadInput when a folder cannot be written, and where a board without runs would replace
    one that has some.
    """
    for path, content in made.items():
        if (
            path.name == JSON
            and path.is_file()
            and not runs(content)
            and (before := runs(path.read_bytes()))
        ):
            raise BadInput(
                f"the records hold no run, and the page in {path.parent} shows {before}; restore"
                " the records, or remove that page first"
            )
    for path, content in made.items():
        writable_folder(path.parent, "the page's folder")
        write_whole(path, content)


def runs(content: str | bytes) -> int:
    """Return how many runs the text of a leaderboard.json lists; 0 where it is none."""
    try:
        return sum(
            len(entry["runs"])
            for track in json.loads(content)["tracks"]
            for entry in track["entries"]
        )
    except (ValueError, KeyError, TypeError):
        return 0


def as_json(rule: str, tracks: Sequence[BoardTrack], histories: Histories) -> str:
    """Return leaderboard.json: an entry a line, null for what is not finite."""

    def line(value: Any) -> str:
        return json.dumps(finite_or_null(value), allow_nan=False)

    parts = [f'"timing_rule": {line(rule)}', f'"histories": {line(histories)}']
    listed = []
    for track in tracks:
        head = line({name: value for name, value in track.items() if name != "entries"})
        entries = ",\n".join(map(line, track["entries"]))
        listed.append(f'{head[:-1]}, "entries": [\n{entries}\n]}}')
    parts.append('"tracks": [\n' + ",\n".join(listed) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def html(
    tracks: Sequence[BoardTrack],
    histories: Histories,
    sources: Mapping[str, str],
    rule: str,
) -> str:
    """Return the page."""
    return (
        environment()
        .get_template("page.html")
        .render(
            title=TITLE,
            rule=rule,
            tracks=tracks,
            histories=histories,
            names=NAMES,
            differences=differences(tracks, sources),
            best=best,
            formatting=formatting,
            charts=charts,
            count="{:,}".format,
            shown=SHOWN,
            longest=LONGEST,
        )
    )


def environment() -> "jinja2.Environment":
    """Return what renders the templates beside this file: values are printed without control
    characters and escaped.

    A name that is missing raises ``jinja2.UndefinedError``. Templates may call ``file(NAME)``, the
    text of a file there, and filter by ``digest``, the SHA-256 in base64 that a content policy asks
    for.
    """
    import jinja2
    from markupsafe import Markup

    def only_text(value: Any) -> Any:
        return value if hasattr(value, "__html__") else printable(value)

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=only_text,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["file"] = lambda name: Markup((FOLDER / name).read_text(encoding="utf-8"))
    made.filters["digest"] = lambda text: base64.b64encode(
        hashlib.sha256(text.encode()).digest()
    ).decode()
    return made


def differences(
    tracks: Sequence[BoardTrack], sources: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return by entry what its source changes of its parent's: ``lines`` in words, and the ``diff``
    as lines, None for those that come after :data:`DIFFS` characters."""
    by_entry, left = {}, DIFFS
    for track in tracks:
        for entry in track["entries"][:SHOWN]:
            mine = sources.get(entry["recipe_sha256"])
            theirs = sources.get(entry["better"]["parent_sha256"] if entry["better"] else "")
            if mine is not None and theirs is not None:
                made = changes(mine, theirs)
                left -= sum(map(len, made.diff))
                by_entry[entry["id"]] = {
                    "lines": change_lines(made),
                    "diff": made.diff if left >= 0 else None,
                }
    return by_entry
