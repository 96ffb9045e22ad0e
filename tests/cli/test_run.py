"""What ``jspeed run`` says after a run: samples, and on GPUs how to train the record's recipe."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from jspeed.board.series.preregistered import race, run_series
from jspeed.cli import run
from jspeed.cli.flags import parse
from jspeed.corpus import command as prepare
from jspeed.errors import BadInput
from jspeed.inference.hooks import STDLIB_PROMPT, write_samples
from jspeed.recipe import Sample
from jspeed.run.options import Options

from ..record.synthetic_runs import as_run, make_run
from ..refusals import refused
from ..toys import TINY


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """A machine with a GPU that JAX uses, and an empty cache."""
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path))
    return tmp_path


def test_a_first_run_on_gpus_says_how_to_train_the_record(gpus, capsys):
    run.say_what_next(Options(sample=False))
    _, fetch, train = capsys.readouterr().out.splitlines()
    program, *words = shlex.split(fetch)
    assert program.endswith("jspeed") and words[:2] == ["prepare", "fineweb"]
    parse(prepare.COMMAND.load("fineweb"), words[2:], "jspeed prepare fineweb")
    assert shlex.split(train)[1:] == ["run", "r29"]
    (gpus / "data" / "fineweb").mkdir(parents=True)  # as the first of them leaves it
    assert Options().recipe_or_default == "r29"


@pytest.mark.parametrize("options", [{"recipe": "stdlib"}, {"data": Path("shards")}])
def test_a_run_of_something_else_ends_without(gpus, capsys, options):
    run.say_what_next(Options(sample=False, **options))
    assert capsys.readouterr().out == ""


def test_a_run_on_a_cpu_ends_without(gpus, capsys, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    run.say_what_next(Options(sample=False))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("asked", "data", "prompt"),
    [
        ("", {"python": "CPython 3.14.0"}, STDLIB_PROMPT),
        ("", {}, ""),
        ("ROMEO:", {"python": "CPython 3.14.0"}, "ROMEO:"),
    ],
)
def test_a_sample_of_python_s_library_begins_with_code(tmp_path, monkeypatch, asked, data, prompt):
    """Files of it begin with comments, as a sample without a prompt would."""
    folder, prompts = make_run(tmp_path / "run", data=as_run()["data"] | data), []
    model = SimpleNamespace(recipe=SimpleNamespace(sample=Sample(prompt=asked)))
    monkeypatch.setattr("jspeed.inference.hooks.load_model", lambda _: model)
    monkeypatch.setattr(
        "jspeed.inference.hooks.sample", lambda _, given, *__: prompts.extend(given) or given
    )
    write_samples(Options(), folder)
    assert prompts == [prompt]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batch": 7}, "--micro-batch 7: the global batch"),
        ({"set_": (*TINY, "LANES=12")}, "12 lanes of 16. cannot be divided over 8 devices"),
        ({"attention": "cudnn"}, "--attention cudnn: on cpu devices"),
        ({"layout": "tp", "mesh": "data=2,model=4"}, "--mesh model=4, recipe stdlib: .*heads"),
        ({"steps": 13}, "--steps 13: .*--set STEPS=13"),
        ({"resume": True}, "--resume needs --run-dir"),
    ],
)
def test_a_layout_is_shown_of_what_would_run(options, words, capsys):
    asked = Options(**{"recipe": "stdlib", "set_": tuple(TINY)} | options)
    refused(words, run.run, asked, show_layout=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        ({"set_": ("LANES=8",)}, {"show_recipe": True}, "--show-recipe prints .* --set would have"),
        ({}, {"show_layout": True, "plan": "n=4"}, "--show-layout prints .* --plan would have no"),
        ({"processes": 2, "process_id": 0}, {"show_tiles": "embed"}, "--processes, --process-id"),
    ],
)
def test_what_is_only_shown_refuses_what_it_does_not_use(options, given, words):
    refused(words, run.run, Options(recipe="stdlib", **options), **given)


def test_a_plan_and_a_race_take_no_more_steps_than_there_are(tmp_path):
    options = Options(
        recipe="stdlib", set_=tuple(TINY), steps=13, run_dir=tmp_path / "p", data=tmp_path
    )
    refused("has 12 steps", run_series, options, "n=4")
    with pytest.raises(BadInput, match="recipe stdlib has 250 steps"):
        race("stdlib", "shakespeare-char", 1, tmp_path / "p", 300, ["--data", str(tmp_path)])
    assert not (tmp_path / "p").exists()
