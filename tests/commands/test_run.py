"""What ``jspeed run`` says after a run: samples, and on GPUs how to train the record's recipe."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from jspeed.commands import prepare, run
from jspeed.commands.flags import parse
from jspeed.recipe import Sample
from jspeed.run.options import Options

from ..record.synthetic_runs import as_run, make_run


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """A machine with a GPU that JAX uses, and an empty cache."""
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path))
    return tmp_path


def test_a_first_run_on_gpus_ends_with_the_lines_that_train_the_record_s_recipe(gpus, capsys):
    run.after_run(Options(sample=False), Path("runs/x"))
    _, fetch, train = capsys.readouterr().out.splitlines()
    program, *words = shlex.split(fetch)
    assert program.endswith("jspeed") and words[:2] == ["prepare", "fineweb"]
    parse(prepare.COMMAND.load("fineweb"), words[2:], "jspeed prepare fineweb")
    assert shlex.split(train)[1:] == ["run", "r29"]
    (gpus / "data" / "fineweb").mkdir(parents=True)  # as the first of them leaves it
    assert Options().recipe_or_default == "r29"


@pytest.mark.parametrize("options", [{"recipe": "stdlib"}, {"data": Path("shards")}])
def test_a_run_of_something_else_ends_without(gpus, capsys, options):
    run.after_run(Options(sample=False, **options), Path("runs/x"))
    assert capsys.readouterr().out == ""


def test_a_run_on_a_cpu_ends_without(gpus, capsys, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    run.after_run(Options(sample=False), Path("runs/x"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("asked", "data", "prompt"),
    [
        ("", {"python": "CPython 3.14.0"}, run.STDLIB_PROMPT),
        ("", {}, ""),
        ("ROMEO:", {"python": "CPython 3.14.0"}, "ROMEO:"),
    ],
)
def test_a_sample_of_python_s_library_begins_with_code(tmp_path, monkeypatch, asked, data, prompt):
    """Files of it begin with comments, as a sample without a prompt would."""
    folder, prompts = make_run(tmp_path / "run", data=as_run()["data"] | data), []
    model = SimpleNamespace(recipe=SimpleNamespace(sample=Sample(prompt=asked)))
    monkeypatch.setattr("jspeed.inference.trained.load_model", lambda _: model)
    monkeypatch.setattr("jspeed.inference.generate.sample", lambda _, given, *__: prompts.extend(given) or given)
    run.write_samples(folder)
    assert prompts == [prompt]
