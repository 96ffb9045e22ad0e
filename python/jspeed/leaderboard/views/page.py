"""The board as one page that opens from disk, and as leaderboard.json for whoever wants to draw their own.

Both are pure functions of the board, the sources in the records and two texts; nothing is fetched, and the one script
sorts tables. A page holds the best entries of each track; leaderboard.json holds all.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jspeed.errors import BadInput, writable_folder
from jspeed.files import read_regular, write_whole
from jspeed.leaderboard import as_text
from jspeed.leaderboard.history import NAMES, read_history
from jspeed.leaderboard.judge import board
from jspeed.leaderboard.views import charts
from jspeed.leaderboard.views.entry_table import table
from jspeed.leaderboard.views.readme import block, with_block
from jspeed.markup import page as whole_page
from jspeed.markup import text
from jspeed.record.runfile import finite_or_null
from jspeed.record.store import Records

DIFFS = 600_000  # bytes of diffs on the page; what comes later is only named
TITLE = "jspeed leaderboard"
JSON = "leaderboard.json"
INTRO = (
    "Time to train a small GPT to a target loss, in JAX. Every number here follows from a run.json that a trainer "
    "wrote; scripts/leaderboard.py verify recomputes them all."
)
MARKS = {
    "valid": "The rules of its track hold: planned runs, all of them there, on the track's data and hardware, from a "
    "clean commit, with a mean loss that is surely below the target. A recipe that misses is a result too, and stays.",
    "better": "What the track ranks is less than its parent's, and the 95 % interval leaves no doubt. Valid and not "
    "shown to be better is a state of its own.",
    "sigma": "The standard deviation of the final loss of one run over seeds, pooled over the complete plans that the "
    "track's rules count. It says by how much two means may differ by chance.",
    "in turn": "The two ran on one machine as A B B A, so that what drifts evenly falls out of the ratio. The "
    "parent's official time x the ratio is then a time on the track's hardware, wherever they ran.",
}


def contents(records: Records, rule: str, out: Path, readme: Path | None = None) -> dict[Path, str]:
    """Return the text of every file that the records make, by path: the page's in the folder ``out``, and ``readme``.

    ``rule`` is the timing rule, clock.py's docstring; ``readme`` is a README.md with a block for the board. Raises
    BadInput when that has none.
    """
    tracks = board(records)
    names = sorted({track["history"] for track in tracks if track.get("history")})
    histories = {name: read_history(records.folder, name) for name in names}
    sources = {sha: source for sha, (_, source) in records.sources.items()}
    made = {
        out / "index.html": html(tracks, histories, sources, rule),
        out / JSON: as_json(rule, tracks, histories),
    }
    if readme:
        try:
            before = read_regular(readme).decode()
        except (OSError, ValueError) as error:
            raise BadInput(f"{readme} cannot be read ({error}); restore it, or give --out DIR") from None
        made[readme] = with_block(before, block(tracks, histories), readme)
    return made


def write(made: Mapping[Path, str]) -> None:
    """Write every file of :func:`contents` whole.

    Raises BadInput when a folder cannot be written, and where a board without runs would replace one that has some.
    """
    for path, content in made.items():
        if path.name == JSON and path.is_file() and not runs(content) and (before := runs(path.read_bytes())):
            raise BadInput(
                f"the records hold no run, and the page in {path.parent} shows {before}; restore the records, or "
                "remove that page first"
            )
    for path, content in made.items():
        writable_folder(path.parent, "the page's folder")
        write_whole(path, content)


def runs(content: str | bytes) -> int:
    """Return how many runs the text of a leaderboard.json lists; 0 where it is none."""
    try:
        return sum(len(entry["runs"]) for track in json.loads(content)["tracks"] for entry in track["entries"])
    except (ValueError, KeyError, TypeError):
        return 0


def stale(made: Mapping[Path, str]) -> list[str]:
    """Return a sentence for each file of :func:`contents` that is not there, or is not what the records make."""
    return [
        f"{path}: expected what the records make, found {'another text' if path.is_file() else 'no file'}; run: "
        "python scripts/leaderboard.py page"
        for path, content in made.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != content
    ]


def as_json(rule: str, tracks: Sequence[Mapping[str, Any]], histories: Mapping[str, Any]) -> str:
    """Return leaderboard.json: an entry a line, null for what is not finite."""

    def line(value: Any) -> str:
        try:
            return json.dumps(value, allow_nan=False)
        except ValueError:
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
    tracks: Sequence[Mapping[str, Any]],
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
    sources: Mapping[str, str],
    rule: str,
) -> str:
    """Return the page."""
    links = "".join(f'<li><a href="#{anchor(track)}">{text(track["track"])}</a></li>' for track in tracks)
    diff_budget = [DIFFS]
    sections = [section(track, histories.get(track.get("history") or "", []), sources, diff_budget) for track in tracks]
    meaning = "".join(f"<dt>{text(name)}</dt><dd>{text(said)}</dd>" for name, said in MARKS.items())
    paragraphs = "".join(f"<p>{text(part)}</p>" for part in rule.split("\n\n"))
    return whole_page(
        TITLE,
        [
            f'<p class="dim">{text(INTRO)} <a href="leaderboard.json">leaderboard.json</a></p>',
            f'<nav aria-label="Tracks"><ul>{links}</ul></nav>',
            *sections,
            f'<section id="meaning"><h2>What the marks mean</h2><dl class="words">{meaning}</dl></section>',
            f'<section id="clock"><h2>What is timed</h2>{paragraphs}</section>',
        ],
        text_of("page.css"),
        text_of("page.js"),
    )


def text_of(name: str) -> str:
    """Return the text of a file that lies beside this one: the page's style, the script that sorts its tables."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def anchor(track: Mapping[str, Any]) -> str:
    """Return the id of a track's section."""
    return "track-" + "".join(c if c.isalnum() else "-" for c in track["track"])


def section(
    track: Mapping[str, Any], history: Sequence[Mapping[str, Any]], sources: Mapping[str, str], diff_budget: list[int]
) -> str:
    """Return one track: what leads, figures, table, rules."""
    name = anchor(track)
    drawn = [
        charts.staircase(track, history, NAMES.get(track.get("history") or "", "")),
        charts.curves(track),
        charts.dots(track),
        charts.waterfall(track),
    ]
    figures = f'<div class="figures">{"".join(drawn)}</div>' if any(drawn) else ""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{text(track["title"])} '
        f"<small>{text(track['track'])}</small></h2>\n{summary_cards(track, history)}{figures}"
        f"{table(track, sources, diff_budget)}{rules(track)}</section>\n"
    )


def summary_cards(track: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> str:
    """Return what a visitor wants to know first, as cards."""
    best = next((entry for entry in track["entries"] if entry["valid"]), None)
    cards = {}
    if best and track["rank"] == "steps":
        cards["fewest steps"] = f"{best['steps']:,}"
    elif best and best["seconds"]:
        cards["best time"] = as_text.seconds(best["seconds"]["mean"])
    if best:
        cards["by"] = best["recipe"]
        cards["mean loss"] = f"{as_text.loss(best['loss']['mean'])} (n = {best['loss']['n']})"
    else:
        cards["fewest steps" if track["rank"] == "steps" else "best time"] = "none yet"
    if history:
        cards[NAMES.get(track["history"], track["history"])] = as_text.seconds(history[-1]["seconds"])
    cards["recipes, runs"] = f"{len(track['entries'])}, {sum(len(entry['runs']) for entry in track['entries'])}"
    boxes = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in cards.items())
    return f"<dl>{boxes}</dl>\n"


def rules(track: Mapping[str, Any]) -> str:
    """Return the rules of a track."""
    if not track["ruled"]:
        return "<p>This track has no track.toml, so that nothing on it is valid.</p>"
    on = f" on the first {track['data.val_tokens']:,} validation tokens" if track.get("data.val_tokens") else ""
    said = {
        "Target": f"mean loss of at most {track['target_loss']:g} nats per token{on} of {track['data.name']}",
        "Hardware": track["hardware"],
        "Time": track["timing.text"],
        "Significance": f"{track['significance.text']} Source: {track['significance.source']}.",
    }
    if track["val_sha256"]:
        said["Validation tokens"] = f"SHA-256 {track['val_sha256'][:16]}..."
    if track["sigma"]:
        said["sigma"] = f"{track['sigma']:.5f} nats, the standard deviation of one run's loss over seeds"
    rows = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in said.items())
    return f'<details class="rules"><summary>Rules of this track</summary><dl class="words">{rows}</dl></details>'
