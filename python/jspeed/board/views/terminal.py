"""Render the board for a terminal of 80 columns."""

import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from jspeed.board import formatting
from jspeed.board.board import BoardTrack, Entry
from jspeed.errors import BadInput, escaped, nearest

WIDTH = 80
MARKS = {
    True: ("yes", "green"),
    False: ("no", "red"),
    "yes": ("yes", "green"),
    "no": ("no", "red"),
    None: ("-", "dim"),
}


def of_track(tracks: Sequence[BoardTrack], wanted: str) -> list[BoardTrack]:
    """Return the track ``wanted`` and those under it (fineweb holds fineweb/steps); BadInput when
    there is none."""
    chosen = [track for track in tracks if f"{track['track']}/".startswith(f"{wanted}/")]
    if not chosen:
        known = [track["track"] for track in tracks]
        hint = nearest(wanted, known)
        raise BadInput(
            f"there is no track '{wanted}'{hint}; known are {', '.join(known) or 'none'}"
        )
    return chosen


def board(tracks: Iterable[BoardTrack]) -> RenderableType:
    """Return the tracks as tables. Everything that is text is a Text: square brackets in it are no
    markup."""
    parts: list[RenderableType] = []
    for track in tracks:
        parts += [
            Text(track["track"], "bold") + Text(escaped(f"  {track['title']}"), "bold cyan"),
            Text(rules(track), "dim"),
        ]
        parts += [entries(track) if track["entries"] else Text("no runs yet", "italic"), Text("")]
    empty = Text("No records yet; add a finished run with: jspeed leaderboard add RUN_DIR")
    return Group(*parts[:-1]) if parts else empty


def rules(track: BoardTrack) -> str:
    """Return a track's rules in a few lines."""
    on = f" on {track['data.val_tokens']:,} tokens" if track.get("data.val_tokens") else ""
    test = {"t": "t-test", "z": "z-test"}.get(track.get("significance.test", ""), "")
    level = f"; {test}, p < {track['significance.p']:g}" if test else "; no rules"
    sigma = f"; sigma {track['sigma']:.4f} (of a run's loss, over seeds)" if track["sigma"] else ""
    most = track.get("model.most_parameters")
    limit = f"; at most {formatting.with_prefix(most)} parameters" if most else ""
    index = "; with retrieval from trained tokens" if track.get("model.retrieval") else ""
    text = (
        f"mean loss <= {track['target_loss']:g} nats{on}{level}{sigma};"
        f" {track['hardware']}{limit}{index}"
    )
    return "\n".join(wrapped(text, WIDTH))


def wrapped(text: str, width: int) -> list[str]:
    """Return ``text``, escaped, as lines of at most ``width`` characters; a word is cut only where
    it is longer than that."""
    return textwrap.wrap(escaped(text), width, break_on_hyphens=False)


# name, width, whether to the right; with one space between they fill 80 columns.
COLUMNS = (
    ("#", 2, True), ("recipe", 26, False), ("time", 9, True), ("sd", 5, True), ("loss", 6, True),
    ("n", 3, True),
    ("valid", 5, False), ("better", 6, False), ("date", 10, False),
)  # fmt: skip


def entries(track: BoardTrack) -> Text:
    """Return the entries of ``track``: a line of numbers each, and under it what they mean."""
    steps = track["rank"] == "steps"
    heads = ["steps" if steps and name == "time" else name for name, _, _ in COLUMNS]
    lines = [row([(head, "underline") for head in heads])]
    for entry in track["entries"]:
        lines += entry_lines(entry, steps)
    return Text("\n").join(lines)


def entry_lines(entry: Entry, steps: bool) -> list[Text]:
    """Return the lines of one entry."""
    seconds, lines = entry["seconds"], []
    name = f"{entry['recipe']} {entry['recipe_hash'][:6]}"
    if len(name) > COLUMNS[1][1]:
        lines = [Text(f"   {part}", "bold") for part in wrapped(entry["recipe"], WIDTH - 3)]
        name = entry["recipe_hash"][:6]
    better = entry["better"] and entry["better"]["verdict"]
    cells = [
        (str(entry["rank"] or "-"), ""),
        (name, "bold"),
        (
            (
                f"{entry['steps']:,}"
                if steps
                else formatting.seconds(seconds["mean"] if seconds else None)
            ),
            "bold",
        ),
        (
            f"{seconds['sd']:.2g}" if seconds and seconds["sd"] is not None and not steps else "",
            "dim",
        ),
        (formatting.loss(entry["loss"]["mean"] if entry["loss"] else None), ""),
        (str(entry["loss"]["n"] if entry["loss"] else 0), ""),
        MARKS[entry["valid"]],
        MARKS.get(better, ("?", "yellow")),
        (entry["date"], "dim"),
    ]
    lines.append(row(cells))
    for note in notes(entry):
        lines += [Text(f"   {part}", "dim") for part in wrapped(note, WIDTH - 3)]
    return lines


def row(cells: Sequence[tuple[str, str]]) -> Text:
    """Return (text, style) of every column as one line."""
    line = Text()
    for (text, style), (_, width, right) in zip(cells, COLUMNS, strict=True):
        padding = " " * (width - len(text))
        line.append(padding * right).append(text, style).append(padding * (not right)).append(" ")
    line.rstrip()
    return line


def notes(entry: Entry) -> list[str]:
    """Return the notes under an entry's numbers: devices, changed fields, comparison, reasons."""
    facts = (
        f"{entry['steps']:,} steps, {formatting.parameters(entry)},"
        f" {formatting.commit(entry['git'])}"
    )
    lines = [f"{formatting.devices(entry['devices'])}, {facts}"]
    lines.append(formatting.trust(entry))
    if second := formatting.holdout(entry):
        lines.append(second)
    if kept := [
        f"seed {run['seed']} {run['weights']['kept']}" for run in entry["runs"] if run["weights"]
    ]:
        lines.append(f"weights: {', '.join(kept)}")
    if entry["overrides"]:
        lines.append(
            "with "
            + ", ".join(f"{name}={value}" for name, value in sorted(entry["overrides"].items()))
        )
    if entry["better"]:
        lines.append(formatting.against(entry["better"]))
    if entry["anchored"]:
        seconds = formatting.seconds(entry["anchored"]["seconds"])
        lines.append(f"estimated on the track's hardware (parent's time x ratio): {seconds}")
    return lines + list(entry["why_not"])
