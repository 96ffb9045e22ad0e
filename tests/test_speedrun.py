"""scripts/speedrun.py as a user runs it: whole runs at toy size, their files, and every bad
input."""

import hashlib
import json
import os
import signal
import time
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

from jspeed.cli import main
from jspeed.errors import BadInput

from . import multi_process
from .call_script import Done, call
from .data.on_disk import shard_bytes
from .multi_process import SAME_BITS, ended, environment, metrics, start, toy, words
from .toys import TOYS


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return multi_process.shards(tmp_path / "shards")


@pytest.fixture
def speedrun(shards: Path, tmp_path: Path):
    """``speedrun(name, *words)``: a process that runs in a folder of this name, and how it
    ended."""

    def call(name: str, *words: object, data: Path = shards, **variables: str) -> Done:
        words = ("--data", data, "--run-dir", name, *words)
        return Done(*ended([start(tmp_path, environment(**variables), *words)], 900)[0])

    return call


def read(run_dir: Path) -> dict:
    return json.loads((run_dir / "run.json").read_text())


def test_a_run_leaves_its_record_its_curve_and_its_picture(speedrun, shards, tmp_path):
    run_dir = tmp_path / "run"
    done = speedrun("run", "--target-loss", "2.9", *toy("STEPS=30", "EVAL_EVERY=10"))
    assert done.code == 0, done.err
    run = read(run_dir)
    assert run["reached"] and run["status"] == "finished" and run["val_loss"] <= 2.9
    assert run["steps"] == run["planned_steps"] == 30 and run["tokens"] == 30 * 8 * 32
    assert [point["step"] for point in run["curve"]] == [0, 10, 20, 30]
    # Zero-initialised head over 272 classes.
    assert run["curve"][0]["val_loss"] == pytest.approx(np.log(272), abs=1e-4)
    assert run["curve"][-1]["val_loss"] == run["val_loss"]
    assert all(probe["passed"] for probe in run["probes"].values()) and "causality" in run["probes"]
    warm_up = run["probes"]["warm_up_leaves_state"]
    assert (warm_up["state"], warm_up["untimed_steps"], warm_up["on"]) == (
        run["initial_state"],
        1,
        "zeros",
    )
    timed = sum(section["seconds"] for section in run["ledger"] if section["timed"])
    assert timed == pytest.approx(run["timed_seconds"], rel=1e-3)
    assert sum(s["name"] == "evaluation" for s in run["ledger"]) == 3
    assert run["data"]["val_tokens"] == 256 and run["seed"] == 1
    validation = next(shards.glob("*_val_*")).read_bytes()[1024:][: 2 * 257]
    assert run["data"]["val_sha256"] == hashlib.sha256(validation).hexdigest()
    (trained,) = run["data"]["train_shards"]
    assert trained["sha256"] == hashlib.sha256((shards / trained["name"]).read_bytes()).hexdigest()
    recipe = (run_dir / "recipe.py").read_bytes()
    assert run["recipe_sha256"] == hashlib.sha256(recipe).hexdigest() and b"RECIPE = " in recipe
    assert run["plan"] is None and run["resumed"] == [] and len(run["initial_state"]) == 16

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all({"step", "tokens", "timed_seconds"} <= line.keys() for line in lines)
    assert [line["step"] for line in lines if "train_loss" in line] == list(range(1, 31))
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 10, 20, 30]
    assert xml.etree.ElementTree.parse(run_dir / "loss.svg").getroot().tag.endswith("svg")
    assert json.loads((run_dir / "config.json").read_text())["fields"]["WIDTH"] == 32
    assert done.out.splitlines()[-1].startswith(f"{run['val_loss']:.4f} nats/")
    assert "8 lanes x 32 tokens" in done.out

    added = call(tmp_path, "leaderboard.py", "add", run_dir, "--records", "records")
    assert added.code == 0, added.err
    shown = call(tmp_path, "leaderboard.py", "show", "--records", "records")
    assert run["recipe_hash"][:6] in shown.out


def gpt2_like_shards(folder: Path) -> Path:
    """Documents of 20 to 70 tokens, each a piece of its own words, after a document start of 5."""
    rng, text = np.random.default_rng(0), np.frombuffer(words(13_000, 0), np.uint8)
    ends = np.cumsum(rng.integers(20, 70, 1200))
    documents = [np.append(5, piece) for piece in np.split(text, ends)[:-1]]
    folder.mkdir()
    for name, part in (("train_000001", documents[50:]), ("val_000000", documents[:50])):
        (folder / f"toy_{name}.bin").write_bytes(shard_bytes(np.concatenate(part)))
    return folder


@pytest.mark.slow
def test_a_packed_recipe_runs_all_its_stages(speedrun, tmp_path):
    """jspeed3 has all of r21's to r92's: its embedding is its head, and does not start at zero; its
    rates are made for more steps; its tables are updated row by row, and averages take its weights'
    place; from the start it copies; and it is told what followed a context before.
    """
    folder = gpt2_like_shards(tmp_path / "gpt2")
    sets = [
        *TOYS["jspeed3"],
        *"RETRIEVAL=(2,4) FP8=on STEPS=(8,16) COMPUTE=bfloat16 EVAL_EVERY=12".split(),
    ]
    flags = ["--no-sample", "--mesh", "data=2", "--target-loss", "5"]
    done = speedrun("run", "jspeed3", *flags, "--set", *sets, data=folder)
    assert done.code == 0, done.err
    run = read(tmp_path / "run")
    assert run["status"] == "finished" and run["steps"] == 24 and run["layout"] == "zero1"
    assert run["curve"][0]["val_loss"] == pytest.approx(np.log(272), abs=6e-2)
    assert run["curve"][-1]["val_loss"] < run["curve"][0]["val_loss"] - 0.5
    assert all(probe["passed"] for probe in run["probes"].values()), run["probes"]
    said = " ".join(done.out.split())
    for part in ("attention xla", "FP8 emulated", "stage 2", "gradients accumulated"):
        assert part in said, done.out
    assert "lanes (rows of a batch)" in said, done.out


def test_more_documents_than_attention_has_room_for(refused, tmp_path):
    folder = gpt2_like_shards(tmp_path / "shards")
    sets = [*TOYS["r21"], "MAX_DOCS=1", "LANE_LEN=64", "EVAL_LEN=320"]
    words = ["a validation lane of 320 tokens holds", "room for 5"]
    refused(words, "r21", "--data", folder, "--set", *sets)


@pytest.mark.slow
def test_same_seed_is_bit_equal_and_eight_devices_agree(speedrun, tmp_path):
    def losses(name: str, *arguments: str) -> list[float]:
        words = ["--steps", 10, *arguments, *toy("EVAL_EVERY=50")]
        done = speedrun(name, *words, **SAME_BITS)
        assert done.code == 0, done.err
        return [*metrics(tmp_path / name).values()]

    one = losses("one")
    assert losses("again") == one
    np.testing.assert_allclose(losses("eight", "--mesh", "data=8"), one, atol=1e-5)
    assert losses("other", "--seed", "2") != one


@pytest.mark.slow
def test_a_missed_target_exits_1_and_a_run_cut_short_0(speedrun, tmp_path):
    missed = speedrun("a", "--target-loss", "0.01", *toy("STEPS=2"))
    assert missed.code == 1 and not read(tmp_path / "a")["reached"]
    short = speedrun("b", "--steps", "2", *toy("STEPS=9"))
    assert short.code == 0 and read(tmp_path / "b")["status"] == "stopped"
    added = call(tmp_path, "leaderboard.py", "add", "b", "--records", "records")
    assert added.code == 2 and not (tmp_path / "records").exists()
    late = speedrun("c", "--max-minutes", "0.0001", *toy("STEPS=900"))
    assert late.code == 1 and read(tmp_path / "c")["status"] == "stopped"


def test_ctrl_c_leaves_a_record(shards, tmp_path):
    run_dir = tmp_path / "run"
    words = ["--data", shards, "--run-dir", run_dir, *toy("STEPS=100000")]
    process = start(tmp_path, environment(), *words)
    written = run_dir / "metrics.jsonl"
    for _ in range(600):
        if written.exists() and written.read_text().count("\n") > 5:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    ((code, out, err),) = ended([process], 60)
    assert code == 130, err
    run = read(run_dir)
    assert run["status"] == "interrupted" and not run["reached"] and run["steps"] > 3
    assert "Traceback" not in err and "interrupted after" in out


@pytest.mark.slow
def test_a_shard_that_goes_bad_in_mid_run_leaves_a_record(speedrun, shards, tmp_path):
    # The first shard is read before the run starts.
    text = b"the quick brown fox jumps over the lazy dog. " * 800
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
    tokens[-1000:] = 300
    (shards / "toy_train_000002.bin").write_bytes(shard_bytes(tokens))
    done = speedrun("run", *toy("STEPS=500"))
    assert done.code == 2 and "300" in done.err and done.err.startswith("error: ")
    run = read(tmp_path / "run")
    assert run["status"] == "interrupted" and 0 < run["steps"] < 500 and run["val_loss"] is None


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_ends_the_run(speedrun, tmp_path):
    done = speedrun("r", *toy("STEPS=50", "EMBED_LR=1e38", "MUON_LR=1e38"))
    run = read(tmp_path / "r")
    assert done.code == 1 and run["status"] == "diverged" and run["val_loss"] is None
    assert run["steps"] < 50


@pytest.fixture
def refused(tmp_path: Path, monkeypatch, capfd):
    """A call in this process that must end with one error message with all ``words``, and leave no
    run directory."""

    def call(words: list[str], *arguments) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(BadInput) as caught:
            main.call([*map(str, arguments)], "run")
        sentence = str(caught.value)
        assert "\n" not in sentence and all(word in sentence for word in words), sentence
        assert not capfd.readouterr().err
        runs = tmp_path / "runs"
        assert not runs.exists() or not any(runs.iterdir())

    return call


# Each way in which a header can be wrong is in tests/data/test_shards.py.
BAD_SHARDS = {
    "wrong magic": ("train", shard_bytes(np.full(5000, 1), magic=7), "magic"),
    "short body": ("val", shard_bytes(np.full(5000, 1), count=6000), "6000"),
    "token id": ("val", shard_bytes(np.full(5000, 300)), "300"),
    "token id in training": ("train", shard_bytes(np.full(5000, 300)), "300"),
    "too short for a row": ("val", shard_bytes(np.full(9, 1)), "there are 9"),
    "too short for a batch": ("train", shard_bytes(np.full(9, 1)), "8 lane windows"),
}


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_bad_shards(refused, shards, name):
    split, content, word = BAD_SHARDS[name]
    next(shards.glob(f"*_{split}_*")).write_bytes(content)
    refused([f"_{split}_", word], "--data", shards, *toy("STEPS=2"))


def test_bad_input_is_a_sentence_and_exit_code_2(speedrun):
    done = speedrun("run", "--mesh", "data=3")
    assert done.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1, done
    assert "3 devices" in done.err and "2048 tokens" in done.err


def test_bad_folders(refused, shards, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(["empty", "jspeed prepare"], "--data", empty)
    next(shards.glob("*_val_*")).unlink()
    refused(["shards", "val"], "--data", shards)
    (tmp_path / "no_recipe.py").write_text("x = 1\n")
    refused(["no_recipe.py", "RECIPE"], tmp_path / "no_recipe.py")


def test_bad_run_directories(refused, shards, tmp_path):
    held = tmp_path / "held"
    held.mkdir()
    (held / "run.json").write_text("{}")
    refused(["held", "already holds a run"], "--data", shards, "--run-dir", held)
    assert [path.name for path in held.iterdir()] == ["run.json"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused(["file", "choose a folder"], "--data", shards, "--run-dir", blocked / "run")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    if not os.access(locked, os.W_OK):  # root may write anywhere
        refused(["locked", "read-only"], "--data", shards, "--run-dir", locked)
