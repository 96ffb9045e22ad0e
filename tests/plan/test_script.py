"""``jspeed plan`` without a compiler: what it prints, and which flags it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jspeed.cli import main
from jspeed.errors import BadInput
from jspeed.plan import command as planned
from jspeed.plan.target import missing
from jspeed.plan.views import tables
from jspeed.plan.views.terminal import Progress, print_table

from ..refusals import refused
from .test_report import PLAN

SCRIPT = Path(__file__).parents[2] / "scripts" / "plan.py"


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "160"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"recipe": "r29", "target": "h100x8", "compile": False}, ["275,743,638"]),
        # once taken for the published size alone, which has no fields
        ({"recipe": "gpt2", "compile": False, "set": ("STEPS=20",)}, ["124,439,808"]),
        (
            {"recipe": "gpt3", "target": "h100x64", "layout": "fsdp", "set": ("LANES=64",)},
            ["174,604,259,328", "64 lanes", "of the layers one at a time"],
        ),
    ],
    ids=["r29", "gpt2", "gpt3"],
)
def test_without_a_compiler_there_are_counts_and_flops(given, words, capsys):
    assert planned.plan(**given) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["track4", "--target", "h100x8"], "did you mean 'track3'"),
        (["r29", "--target", "h101x8"], "h100"),
        (["r29", "--target", "h100x0"], "h100x0"),
        ([], "required: RECIPE"),
    ],
)
def test_refuses(arguments, words):
    assert words in refused("", main.call, arguments, "plan")


WHOLE = {"against": "r29", "search_": True, "strict": True, "svg": Path("f"), "html": Path("f")}


@pytest.mark.parametrize("given", [{"recipe": "llmc", "compile": False}, {"recipe": "gpt2-xl"}])
def test_flags_of_a_compiled_plan_are_refused_without_one(given, tmp_path, monkeypatch):
    """Once ignored: nothing was compared and no file written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        BadInput, match="--against, --search, --strict, --svg, --html, --bytes, --json"
    ):
        planned.plan(**given, **WHOLE, bytes_=True, json_=Path("f"))
    assert not list(tmp_path.iterdir())


def test_bytes_refuse_what_they_do_not_use():
    with pytest.raises(BadInput, match="so --against, --search, --strict, --svg, --html would"):
        planned.plan("llmc", bytes_=True, **WHOLE)


def test_a_mesh_of_two_axes_needs_no_compiler(capsys, monkeypatch):
    """Without one, the advice to give --mesh was refused as without effect."""
    given = {"recipe": "track3", "layout": "tp", "compile": False}
    refused("--mesh data=-1,model=2", planned.plan, **given)
    assert planned.plan(**given, mesh="data=-1,model=2") == 0
    assert "memory of one device of 8, layout tp" in capsys.readouterr().out
    monkeypatch.setattr("jspeed.plan.target.missing", lambda target: "no CUDA plugin")
    refused("no CUDA plugin", planned.plan, "track3", layout="tp", mesh="data=4,model=2")


def test_both_sides_of_a_comparison_take_the_same_micro_batch(monkeypatch):
    seen = []

    def place_on_target(recipe, cluster, layout, axes, micro_batch, tell):
        seen.append((recipe.name, micro_batch))

    monkeypatch.setattr("jspeed.plan.target.missing", lambda target: None)
    monkeypatch.setattr("jspeed.plan.compile.place_on_target", place_on_target)
    monkeypatch.setattr("jspeed.plan.make.make_plan", lambda *_: PLAN | {})
    assert planned.plan("r21", against="r29", micro_batch=49_152) == 0
    assert seen == [("r21", 49_152), ("r29", 49_152)]


@pytest.mark.parametrize("name", [None, "a report.html"])
def test_the_end_leads_to_the_report_and_repeats_the_verdict(name, tmp_path, monkeypatch, capsys):
    """Where compiling is left out: the plan is that of another test."""
    monkeypatch.setattr("jspeed.plan.target.missing", lambda target: None)
    monkeypatch.setattr("jspeed.plan.compile.place_on_target", lambda *_: None)
    monkeypatch.setattr("jspeed.plan.make.make_plan", lambda *_: PLAN | {})
    monkeypatch.chdir(tmp_path)
    assert planned.plan(recipe="stdlib", html=Path(name) if name else None) == 0
    report, verdict = capsys.readouterr().out.splitlines()[-2:]
    wanted = "--html FILE" if name is None else f"{tmp_path.as_uri()}/a%20report.html"
    assert report.endswith(wanted)
    assert verdict.startswith("r29 on h100x8 fits (21.5 of 78.2 GB): predicted ")
    assert name is None or (tmp_path / name).read_text().startswith("<!DOCTYPE html>")


@pytest.mark.skipif(
    missing() is None or Path(sys.prefix, "aot").is_dir(), reason="a CUDA plugin is installed here"
)
def test_says_what_to_install():
    done = plan("track3")
    assert done.returncode == 2
    assert "pip install 'jspeed[aot]'" in done.stderr and "223 MB" in done.stderr
    assert "124" in done.stdout or "parameters" in done.stdout


def test_a_narrow_terminal_breaks_no_number_and_no_word(capsys):
    """Once all columns shrank together, and numbers were broken."""
    table = tables.stages(PLAN)
    for columns in (60, 80, 200):
        print_table(Console(width=columns, highlight=False), table)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= columns
        words = set(" ".join(lines).split())
        assert words >= {word for row in table.rows for cell in row for word in cell.split()}
        heads = sum(line.startswith("stage ") and "stage 1" not in line for line in lines)
        assert (heads > 3) == (columns < 200)


@pytest.mark.parametrize(
    ("span", "text"),
    [([131, 179], "131 to 179 s"), ([5000, 9000], "1.39 to 2.5 hours"), ([2e5], "2.31 days")],
)
def test_hours_are_said_where_it_is_hours(span, text):
    assert tables.duration(span) == text


def test_each_program_is_named_as_its_compilation_starts(capsys):
    tell = Progress(Console(width=60, highlight=False), "h100x8")
    tell("[1/4] compiling stage 3, micro-batch of 49,152 tokens")
    assert capsys.readouterr().out == (
        "   0 s  h100x8: [1/4] compiling stage 3, micro-batch of 49,152 tokens\n"
    )
