"""The live curve: the plot, and a run's whole output on pseudo-terminals of all kinds."""

import pytest
from rich.console import Console

from jspeed.run import console
from jspeed.run.console import Display

from .screen import Screen, Terminal

# Straight from 3.0 to 1.0 over 40 steps: limits and cells can be worked out by hand. At 40 steps
# all is drawn.
STRAIGHT = [(0, 3.0), (40, 1.0)]


def test_every_cell_is_filled_up_to_the_curve():
    shown = console.curve_plot(STRAIGHT, 40, 1.4, columns=11 + 40)
    assert shown is not None
    lines = shown.plain.split("\n")
    assert len(lines) == console.LINES and {line[:11].strip() for line in lines} == {
        "",
        "3.12",
        "target 1.4",
    }
    low, high = 1.0 - 0.06 * 2, 3.0 + 0.06 * 2
    for column in range(40):
        loss = 3.0 - 2.0 * (column + 0.5) / 40
        filled = sum(
            console.BLOCKS.index(line[11:].ljust(40).replace("╌", " ")[column]) for line in lines
        )
        assert abs(filled / 64 - (loss - low) / (high - low)) <= 0.5 / 64 + 1e-9
    (row,) = (line for line in lines if "target" in line)
    assert lines.index(row) == int((high - 1.4) / ((high - low) / console.LINES))
    assert row.endswith("╌")


def test_it_grows_with_the_run_and_its_target_stays_in_sight():
    assert console.curve_plot([], 40, 1.4) is None
    begun = console.curve_plot([(0, 5.0)], 40, 1.4)
    half = console.curve_plot([(0, 3.0), (20, 2.0)], 40, 1.4, columns=11 + 40)
    assert begun is not None and half is not None
    assert begun.plain.count("█") > 0
    assert max(line.rfind("█") for line in begun.plain.split("\n")) == 11
    (row,) = (line for line in half.plain.split("\n") if "target" in line)
    assert row[11:].count("╌") == 40 - 21  # the cell that step 20 begins is drawn
    met = console.curve_plot([(0, 1.2), (40, 1.1)], 40, 1.4, columns=11 + 40)
    # all of the area lies below
    assert met is not None and met.plain.split("\n")[0] == "target 1.4 " + "╌" * 40
    none = console.curve_plot(STRAIGHT, 40, None)
    assert none is not None and "target" not in none.plain and "╌" not in none.plain


def test_ascii_and_terminals_that_are_too_narrow():
    shown = console.curve_plot(STRAIGHT, 40, 1.4, 40, ascii=True)
    assert shown is not None and shown.plain.isascii()
    assert max(map(len, shown.plain.split("\n"))) <= 40
    for columns in range(1, 60):
        found = console.curve_plot(STRAIGHT, 40, 1.4, columns)
        assert (found is None) == (columns < 19)
        assert found is None or max(map(len, found.plain.split("\n"))) <= columns
    wide = console.curve_plot(STRAIGHT, 40, 1.4, 400)
    assert wide is not None and max(map(len, wide.plain.split("\n"))) == console.COLUMNS


def said(width: int, height: int, encoding: str, bar: bool = True) -> str:
    """What a run of 60 steps with ten evaluations and a final one writes to a terminal."""
    terminal, losses = Terminal(encoding), []
    console = Console(file=terminal.file, width=width, height=height, highlight=False)
    with Display(console, 60, bar, target=1.4) as display:
        for step in range(1, 61):
            display.step(step, 3.0 - step / 40, step * 1000)
            if step % 6 == 0:
                losses.append(
                    {"step": step, "timed_seconds": step / 10, "val_loss": 3.0 - step / 40}
                )
                if step < 60:
                    display.validation(losses)
            if step == 30:
                print("from elsewhere")  # a library that prints
    display.validation(losses)
    console.print("the end")
    return terminal.read()


@pytest.mark.parametrize(
    ("width", "height", "encoding", "full"),
    [(100, 30, "utf-8", "█"), (40, 24, "utf-8", "█"), (40, 24, "ascii", "|"), (40, 12, "utf-8",
    None),
     (18, 24, "utf-8", None)],
)  # fmt: skip
def test_a_run_leaves_no_garbage_on_a_terminal(monkeypatch, width, height, encoding, full):
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Screen(width, height)
    screen.feed(said(width, height, encoding))
    live = [
        frame
        for frame in screen.frames
        if any(line.startswith("step") and "ETA" in line for line in frame)
    ]
    assert len(live) > 10 or width < 40
    for frame in [*screen.frames, screen.rows]:
        assert sum("target" in line for line in frame) <= 1
        assert sum("ETA" in line for line in frame) <= 1
    drawn = [frame for frame in live if any("target" in line for line in frame)]
    lines = [line.rstrip() for line in screen.rows]
    text = "\n".join(lines)
    assert text.count("validation") == 10 and text.count("from elsewhere") == 1
    assert lines[-2:] == ["the end", ""]
    if full is None:
        assert not drawn and "target" not in text
        return
    # The plot stands right above the bar; at the end it stays, under the words of the final
    # evaluation.
    for frame in drawn:
        kept = [line.rstrip() for line in frame if line.strip()]
        assert kept[-2].startswith("target 1.4") and "ETA" in kept[-1]
    where = [place for place, line in enumerate(lines) if "validation" in line][-1]
    assert "3.0" not in lines[where] and "target 1.4" in "\n".join(lines[where:])
    assert full in lines[-4]
    bar = next(line for line in lines if "ETA" in line)
    assert "60/60" in bar and "loss 1.5000" in bar and "…" not in bar
    assert (width < 72) == ("tokens/s" not in bar)


@pytest.mark.parametrize(("term", "bar"), [("dumb", True), ("xterm-256color", False)])
def test_plain_lines_without_a_cursor_or_progress(monkeypatch, term, bar):
    monkeypatch.setenv("TERM", term)
    screen = Screen(100, 30)
    screen.feed(said(100, 30, "utf-8", bar))
    text = "\n".join(screen.rows)
    assert not screen.frames and "target" not in text and "█" not in text
    assert text.count("tokens/s") == 20 and text.count("validation") == 10
