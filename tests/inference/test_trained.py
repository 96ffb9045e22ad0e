"""Train one model, then load, evaluate, export and sample it, and start a run from it."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

from jspeed.cli.satellites import hooks
from jspeed.corpus import named_data_sets
from jspeed.errors import BadInput
from jspeed.fields import recipe_hash
from jspeed.inference import score, trained
from jspeed.inference.commands import sample as sample_
from jspeed.inference.commands.evaluate import evaluate
from jspeed.inference.commands.export import export
from jspeed.inference.generate import Sampling, sample
from jspeed.inference.hooks import write_samples
from jspeed.inference.model_config import read_config
from jspeed.inference.trained import load_model
from jspeed.recipe import init_parameters
from jspeed.run.export import gathered, load, own_config, own_metadata, save
from jspeed.run.find_recipe import find
from jspeed.run.options import Options
from jspeed.run.train import train

from ..refusals import refused
from ..toys import TOYS

SETS = (*"WIDTH=32 LAYERS=2 HEADS=2 MLP_WIDTH=64 LANES=8 EVAL_EVERY=5 STEPS=10".split(),)
SETS += ("EVAL_TOKENS=640",)
NAMES = [
    a + b + c
    for a in ("an", "bri", "car", "do")
    for b in ("n", "l", "r", "st")
    for c in ("a", "e", "o", "y", "ie")
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run on eight devices, with checkpoints, a trace and TensorBoard."""
    folder = tmp_path_factory.mktemp("names")
    (folder / "names.txt").write_text("\n".join(NAMES))
    data = named_data_sets.prepare_names(folder / "data", folder / "names.txt")
    facts = json.loads((data / "manifest.json").read_text())
    ids = [f"VOCAB={facts['vocab_size']}", f"BOS={facts['bos_id']}", f"PAD={facts['pad_id']}"]
    options = Options(
        "microgpt-names", data=data, run_dir=folder / "run", set_=(*SETS, *ids), target_loss=9.0
    )
    told = []
    more = {
        "checkpoint_every": 4,
        "keep_best": True,
        "profile": 2,
        "log": "tensorboard",
        "progress": False,
        "accuracy": True,
    }
    told_where = replace(hooks(), afterwards=lambda _, folder: told.append(folder))
    assert train(Options(**vars(options) | more), told_where) == 0 and told == [folder / "run"]
    return options


def record(options):
    return json.loads((options.run_dir / "run.json").read_text())


def test_what_a_run_leaves(run):
    left = {path.name for path in run.run_dir.iterdir()}
    wanted = {
        "config.json",
        "recipe.py",
        "run.json",
        "metrics.jsonl",
        "loss.svg",
        "checkpoints",
        "model.safetensors",
    }
    assert wanted | {"profile", "tensorboard"} <= left
    (trace,) = (run.run_dir / "profile").rglob("*.xplane.pb")
    names = {
        e.name
        for plane in ProfileData.from_file(str(trace)).planes
        for line in plane.lines
        for e in line.events
    }
    assert [name for name in names if "step" in name]
    # "$file:line function" would be Python's calls, whose hook crashes beside the threads of a
    # checkpoint.
    assert not [name for name in names if name.startswith("$")]
    assert [s["name"] for s in record(run)["ledger"]].count("profile") == 2
    facts = json.loads((run.run_dir / "config.json").read_text())["tokenizer"]
    assert facts["symbols"] == sorted(set("".join(NAMES)))
    assert facts["bos_id"] == len(facts["symbols"])


def test_accuracy_in_metrics_is_that_of_evaluate(run):
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line.get("val_accuracy") for line in lines if "val_loss" in line]
    assert len(found) == len(record(run)["curve"])
    assert not any("val_accuracy" in line for line in lines if "train_loss" in line)
    wanted = score.validate(load_model(run.run_dir), run.data, accurate=True).accuracy
    assert found[-1] == pytest.approx(wanted, abs=1e-4)


def test_a_model_loads_from_run_checkpoint_and_export(run, tmp_path, monkeypatch):
    whole = load_model(run.run_dir)
    kept, metadata = load(run.run_dir)
    assert metadata["recipe_hash"] == record(run)["recipe_hash"] == whole.found.hash
    jax.tree.map(np.testing.assert_array_equal, whole.tensors(), kept)
    newest = load_model(run.run_dir / "checkpoints" / "10")
    jax.tree.map(np.testing.assert_array_equal, newest.tensors(), kept)
    best = {point["step"]: point["val_loss"] for point in record(run)["curve"]}
    assert load(run.run_dir / "best")[1]["step"] == str(min(best, key=best.__getitem__))
    load_model(run.run_dir / "best").tokenizer()
    earlier = load_model(run.run_dir / "checkpoints" / "8")
    assert not np.array_equal(earlier.tensors()["head"], kept["head"])
    export(run.run_dir, tmp_path / "out")
    exported = load_model(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "recipe.py",
        "model.safetensors",
    }
    jax.tree.map(np.testing.assert_array_equal, exported.tensors(), kept)
    for sampling in (Sampling(0.0), Sampling(1.0, seed=5)):
        assert sample(whole, ["an", ""], 10, sampling) == sample(exported, ["an", ""], 10, sampling)
    refused("not empty", export, run.run_dir, tmp_path / "out")
    with monkeypatch.context() as within:
        within.chdir(run.run_dir / "checkpoints")
        jax.tree.map(np.testing.assert_array_equal, load_model(Path("10")).tensors(), kept)


def test_a_damaged_checkpoint_is_named(run, tmp_path):
    shutil.copytree(run.run_dir, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "8" / "sha256.json").unlink()
    refused(r"checkpoints/8 .*sha256.json", load_model, tmp_path / "run" / "checkpoints" / "8")


def test_a_model_keeps_the_hash_of_its_first_parameters(run, tmp_path, capsys):
    shutil.copytree(run.run_dir, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["overrides"]["init_from"] = config["fields"]["init_from"] = "0" * 64
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    found = load_model(tmp_path / "run").found
    assert found.hash == recipe_hash(
        found.source, load_model(run.run_dir).found.fields | {"init_from": "0" * 64}
    )
    export(tmp_path / "run", tmp_path / "out")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["recipe_hash"] == found.hash and exported["overrides"]["init_from"] == "0" * 64
    assert load_model(tmp_path / "out").found.hash == found.hash
    listed, warned = capsys.readouterr().out.splitlines()
    assert listed.endswith("config.json, recipe.py") and "transformers cannot read it" in warned


@pytest.mark.slow
def test_going_on_from_a_model(run, tmp_path, capsys):
    """The first loss is where the model was; the run is marked as another recipe; from scratch is
    worse."""
    again = vars(run) | {"run_dir": tmp_path / "again", "init_from": run.run_dir, "progress": False}
    assert train(Options(**again), hooks()) == 0
    found, first = json.loads((tmp_path / "again" / "run.json").read_text()), record(run)
    assert found["curve"][0]["val_loss"] == pytest.approx(first["val_loss"], abs=1e-5)
    assert found["val_loss"] < first["val_loss"] < first["curve"][0]["val_loss"]
    assert found["recipe_hash"] != first["recipe_hash"]
    assert len(found["overrides"]["init_from"]) == 64
    assert load_model(tmp_path / "again").recipe.name == "microgpt-names"
    with pytest.raises(BadInput, match="does not exist"):
        train(
            Options(**again | {"run_dir": tmp_path / "other", "init_from": tmp_path / "none"}),
            hooks(),
        )
    with pytest.raises(BadInput, match="shape .* --set its fields"):
        sets = (*run.set_, "WIDTH=64")
        train(Options(**again | {"run_dir": tmp_path / "other", "set_": sets}), hooks())
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_sample_script(run, capsys, tmp_path):
    sample_.sample(run.run_dir)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20 and set("".join(lines)) <= set("".join(NAMES))
    sample_.sample(run.run_dir, prompt="bri", number=3, temperature=0.0)
    assert len(set(lines := capsys.readouterr().out.splitlines())) == 1 and len(lines) == 3
    assert lines[0].startswith("bri")
    (tmp_path / "prompt.txt").write_text("do")
    sample_.sample(run.run_dir, prompt_file=tmp_path / "prompt.txt", tokens=3, mesh="data=8")
    assert capsys.readouterr().out.startswith("do")
    for arguments, words in (
        ({"prompt": "Q"}, "character 'Q' is not among"),
        ({"prompt": "a", "prompt_file": tmp_path}, "both --prompt and --prompt-file"),
        ({"prompt_file": tmp_path / "none"}, "cannot be read"),
    ):
        refused(words, sample_.sample, run.run_dir, **arguments)
    refused("neither model.safetensors nor a|has no config.json", sample_.sample, tmp_path)


def test_evaluate_script(run, capsys, tmp_path):
    evaluate(run.run_dir, data=run.data, json_=tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert f"{figures['loss']:.4f} nats" in capsys.readouterr().out
    assert figures["loss"] == pytest.approx(record(run)["val_loss"], abs=1e-6)
    assert figures["accuracy"] is None


def test_control_characters_are_printed_as_text(run, capsys, monkeypatch):
    raw = "\x1b]0;title\x07\tb\n"
    monkeypatch.setattr("jspeed.inference.generate.write", lambda *_: iter([[raw] * 20]))
    write_samples(Options(), run.run_dir)
    assert raw.strip("\n") in (run.run_dir / "samples.txt").read_text()
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown
    assert shown.count(r"\x1b]0;title\x07" + "\tb\n") == 20
    monkeypatch.setattr("jspeed.inference.generate.write", lambda *_: iter([[raw] * 2, [raw] * 2]))
    sample_.sample(run.run_dir, number=2)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and shown.count(r"\x1b]0;title\x07" + "\tb\n") == 4


def test_sampling_ends_when_nobody_reads_on(run, capsys, monkeypatch):
    taken = []
    monkeypatch.setattr(
        "jspeed.inference.generate.write", lambda *_: (taken.append(n) or ["x"] for n in range(100))
    )
    monkeypatch.setattr(sample_, "stdout_open", lambda: len(taken) < 3)
    sample_.sample(run.run_dir, prompt="a")
    assert len(taken) == 3


def test_a_run_ends_by_writing_samples(run, capsys):
    write_samples(Options(), run.run_dir)
    names = (run.run_dir / "samples.txt").read_text().splitlines()
    assert len(names) == 20 and "samples.txt:" in capsys.readouterr().out
    (run.run_dir / "recipe.py").rename(run.run_dir / "gone.py")
    write_samples(Options(), run.run_dir)
    assert "no sample: " in capsys.readouterr().out
    (run.run_dir / "gone.py").rename(run.run_dir / "recipe.py")


def test_only_what_computes_a_gpt2_is_exported_as_one(tmp_path):
    """With GPT-2's parameters alone another activation became GPT-2's in transformers."""
    source = (
        find("gpt2")
        .source.replace("jax.nn.gelu(", "jax.nn.silu(")
        .replace(", approximate=True)", ")")
    )
    (tmp_path / "mine.py").write_text(source.replace('name="gpt2"', 'name="mine"'))
    for name, recipe, more in (
        ("gpt2", "gpt2", {}),
        ("mine", str(tmp_path / "mine.py"), {"own": True}),
    ):
        found = find(recipe, TOYS["gpt2"])
        run = tmp_path / name
        run.mkdir()
        write_export(run, found)
        export(run, tmp_path / f"{name}-out", trust=True, **more)
        assert (tmp_path / f"{name}-out" / "recipe.py").exists() == bool(more)
    # as Hugging Face's, and back the same
    assert "h.1.attn.c_attn.weight" in load(tmp_path / "gpt2-out")[0]
    kept, back = load(tmp_path / "gpt2")[0], load_model(tmp_path / "gpt2-out").tensors()
    jax.tree.map(np.testing.assert_array_equal, back, kept)
    refused("recipe mine .* --own", export, tmp_path / "mine", tmp_path / "out", trust=True)
    assert not (tmp_path / "out").exists()


def write_export(folder, found):
    """What ``export --own`` writes of first parameters."""
    tensors = gathered(init_parameters(found.recipe.parameters, jax.random.key(0)))
    save(folder / "model.safetensors", tensors, own_metadata(found))
    (folder / "config.json").write_text(json.dumps(own_config(found, OWN["tokenizer"])))
    (folder / "recipe.py").write_text(found.source)


def test_a_model_without_room_for_the_ids_of_its_text_is_refused(tmp_path):
    """It was evaluated as nan, or wrote the text of other ids."""
    write_export(tmp_path, find("gpt2", [*TOYS["gpt2"], "VOCAB=200"]))
    refused("makes 257 ids .* the model has room for 200", load_model, tmp_path)


GPT2 = dict(model_type="gpt2", n_layer=2, n_head=2, n_embd=8, vocab_size=9, n_positions=4)
OWN = {
    "recipe": "stdlib",
    "overrides": {},
    "tokenizer": {"tokenizer": "bytes", "vocab_size": 257, "bos_id": 256},
}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (OWN | {"overrides": []}, "field 'overrides': expected an object, found \\[\\]"),
        (OWN | {"tokenizer": 3}, "field 'tokenizer': expected an object or null, found 3"),
        (OWN | {"tokenizer": {"tokenizer": 3}}, "field 'tokenizer.tokenizer': expected a name"),
        (OWN | {"tokenizer": {"tokenizer": "bytes"}}, "field 'tokenizer.vocab_size'"),
        (OWN | {"tokenizer": OWN["tokenizer"] | {"symbols": ["ab"]}}, "'tokenizer.symbols'"),
        (GPT2 | {"n_layer": float("inf")}, "field 'n_layer': expected a whole number from 1 to"),
        (GPT2 | {"n_layer": 10**9}, "field 'n_layer': .* from 1 to 1000"),
        (GPT2 | {"vocab_size": "9"}, "field 'vocab_size': .* found '9'"),
        ([], "describes neither"),
    ],
)
def test_a_config_is_checked_when_it_is_read(tmp_path, config, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(f"^{tmp_path}/config.json.*{words}", load_model, tmp_path)


def test_a_config_that_cannot_be_read_is_bad_input(tmp_path):
    for config in (OWN, GPT2):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_config(tmp_path) == config
    (tmp_path / "config.json").write_text("[" * 100_000)
    refused("config.json is not JSON text", read_config, tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    refused("not a regular file", read_config, tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_numbers_are_refused(run, monkeypatch, value):
    """They spoke '!!!!!!', and evaluation printed nan, with exit code 0."""
    read = trained.read_parameters

    def damaged(*where):
        arrays = read(*where)
        arrays["up"] = arrays["up"].copy()
        arrays["up"].flat[3] = value
        return arrays

    monkeypatch.setattr(trained, "read_parameters", damaged)
    refused(r"1 of its parameters .* not finite, the first is up", load_model, run.run_dir)


def test_a_loss_that_is_no_number_is_refused(run, monkeypatch):
    monkeypatch.setattr(score.evaluate, "validation_loss", lambda *_: float("nan"))
    refused("loss of microgpt-names on .*nan", score.validate, load_model(run.run_dir), run.data)
