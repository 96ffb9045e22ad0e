"""What a run prints, on a terminal and elsewhere."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from jspeed.data.tokens import unit_of
from jspeed.record.consistent import PROBES
from jspeed.run.console import Display, closing, opening, waiting

RUN = {
    "recipe": "a recipe of nobody",
    "recipe_sha256": "0" * 64,
    "track": "a/track",
    "val_loss": 2.1034,
    "target_loss": 2.11,
    "timed_seconds": 71.26,
    "wall_seconds": 98.64,
    "compile_seconds": 9.1,
    "status": "finished",
    "steps": 100,
    "planned_steps": 100,
    "host": {"data_wait_seconds": 0.1, "dispatch_seconds": 0.2},
    "loader": {
        "batches": 1002,
        "bytes_read": 5_250_000,
        "wait_p50": 0.00002,
        "wait_p99": 0.0004,
        "wait_max": 0.003,
        "queue_empty": 2,
        "shard_switches": 1,
        "dropped_tokens": 1234,
    },
    "probes": {"causality": {"passed": True}},
    "data": {},
}


def printed(lines: list[str]) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    for line in lines:
        console.print(line)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_last_line():
    last = printed(closing(RUN, Path("runs/x"), "byte"))[-1]
    assert last == (
        "2.1034 nats/byte (3.035 bits) <= 2.11 in 71.3 s timed, 98.6 s in all; compile 9.1 s; n=1"
    )


def test_the_loader_accounts_for_itself():
    lines = printed(closing(RUN, Path("r")))
    first = next(n for n, line in enumerate(lines) if line.startswith("loader: "))
    assert lines[first : first + 2] == [
        "loader: 1,002 batches, 5.2 MB read, 1,234 tokens dropped, 1 shard switches",
        "  waits p50 0.020, p99 0.400, longest 3.00 ms; prefetch queue found empty 2 times",
    ]


def test_last_line_of_other_endings():
    missed = RUN | {"val_loss": 5.6, "target_loss": 5.5}
    for facts, unit in (
        ({"tokenizer": "gpt2"}, "nats/token"),
        ({"tokenizer": "symbols", "symbols": ["a"]}, "nats/character"),
        ({"tokenizer": "bytes"}, "nats/byte (8.079 bits)"),
    ):
        assert printed(closing(missed, Path("r"), unit_of(facts)))[-1].startswith(
            f"5.6000 {unit} > 5.5 in"
        )
    stopped = RUN | {"status": "stopped", "steps": 20}
    assert printed(closing(stopped, Path("r")))[-1].endswith("n=1; stopped after 20 of 100 steps")
    interrupted = RUN | {"status": "interrupted", "val_loss": None, "steps": 3}
    assert "interrupted after 3 of 100 steps" in printed(closing(interrupted, Path("r")))[-1]


def test_a_failed_probe_is_said_and_markup_in_names_is_text():
    lines = printed(
        closing(
            RUN | {"probes": {"causality": {"passed": False, "leak": 0.5}}}, Path("runs/[bold]x")
        )
    )
    said = f"validity check causality ({PROBES['causality']}) failed: "
    assert any(said in line and "0.5" in line and line.endswith("does not count") for line in lines)
    assert any("runs/[bold]x" in line for line in lines)


def test_plain_lines_when_not_a_terminal_and_a_bar_when_it_is(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for terminal, bar in [(False, True), (True, False), (True, True)]:
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with Display(console, steps=100, bar=bar) as display:
            for step in range(1, 101):
                display.step(step, 3.0, step * 10)
            display.validation([{"step": 100, "timed_seconds": 7.0, "val_loss": 2.5}])
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "validation 2.5000" in text.replace("\x1b[1m", "").replace("\x1b[0m", "")
        plain = [
            line for line in text.splitlines() if line.startswith("step") and "tokens/s" in line
        ]
        if not (terminal and bar):
            assert len(plain) == 20
    assert "100/100" in text


def test_opening_shows_value_and_formula():
    console = Console(file=io.StringIO(), width=100)
    opening(console, [("tokens", "steps x tokens/step", "409,600"), ("name", "[red]x", "v")])
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "409,600" in written and "[red]x" in written


def test_a_narrow_terminal_cuts_nothing():
    rows = [
        ("data", "/a/folder/with/quite/a/long/path/to/the/shards", "1,003,854 tokens"),
        ("name", "[red]x", "v"),
    ]
    for width in (20, 40, 71, 72, 200):
        console = Console(file=io.StringIO(), width=width)
        opening(console, rows)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert rows[0][2] in text and "[red]x" in text and "\N{HORIZONTAL ELLIPSIS}" not in text
        if width < 72:
            assert f"  {rows[0][1]}\n" in text  # in one piece, to be copied


def test_waiting_says_what_for_and_how_long():
    console = Console(file=io.StringIO(), width=100)
    with waiting(console, "compiling"):
        assert console.file.getvalue() == "compiling ..."  # type: ignore[attr-defined]
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.fullmatch(r"compiling \.\.\. \d+\.\d s\n", written)
    console = Console(file=io.StringIO(), width=100)
    with pytest.raises(KeyError), waiting(console, "compiling"):
        raise KeyError
    assert console.file.getvalue() == "compiling ...\n"  # type: ignore[attr-defined]
