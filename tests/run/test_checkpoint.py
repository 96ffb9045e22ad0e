"""Checkpoints of whole runs: resuming is bit-exact, damage is detected, a diverged state is not
saved."""

import gc
import json
import logging
import math
import os
import signal
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jspeed.base.signals import ENDINGS, WARNINGS
from jspeed.parallel import layout as layouts
from jspeed.run import checkpoint
from jspeed.run.compute import program
from jspeed.run.compute.step import init_state
from jspeed.run.find_recipe import find
from jspeed.run.metrics_log import History
from jspeed.run.options import Options
from jspeed.run.train import train

from ..multi_process import SAME_BITS, TOY, ended, environment, metrics, said, shards, start, toy
from ..toys import TOYS
from .compute.steps import batches, mesh_of, run

FEW = ["STEPS=50", "EVAL_EVERY=25"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of a run of 50 steps, ``whole``, and of one that ended after 25, ``half``."""
    folder = tmp_path_factory.mktemp("runs")
    shards(folder / "shards")
    for name, more in [("whole", []), ("half", ["--steps", 25, "--checkpoint-every", 10])]:
        code, _, err = speedrun(folder, name, *more)
        assert code in (0, 1), err
    return folder


def speedrun(folder, name, *arguments, fields=FEW):
    words = ["--run-dir", name, "--data", "shards", *arguments, *toy(*fields)]
    return ended([start(folder, environment(**SAME_BITS), *words)])[0]


def copy(runs, tmp_path, name="half"):
    import shutil

    shutil.copytree(runs / name, tmp_path / name)
    shutil.copytree(runs / "shards", tmp_path / "shards")
    return tmp_path / name


def damage(folder, step):
    largest = max(
        (folder / "checkpoints" / str(step)).rglob("*"),
        key=lambda path: path.stat().st_size * path.is_file(),
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def checkpoints(folder, *steps, identity=None):
    """Folders as Orbax leaves them: a record, an array, and their hashes."""
    for step in steps:
        place = folder / str(step)
        (place / "record").mkdir(parents=True)
        (place / "record" / "metadata").write_text(json.dumps({"identity": identity or {}}))
        (place / "array").write_bytes(b"%d" % step)
        files = [path for path in place.rglob("*") if path.is_file()]
        hashes = {str(path.relative_to(place)): checkpoint.sha256_of(path) for path in files}
        (place / checkpoint.HASHES).write_text(json.dumps(hashes))
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_hashes_that_say_nothing_are_damage(tmp_path):
    path = tmp_path / "5" / checkpoint.HASHES
    path.parent.mkdir()
    for text in ("", "{}", "[]", "3", "[" * 100_000, '{"record/metadata": 3}'):
        path.write_text(text)
        assert checkpoint.damage(tmp_path, 5), text
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in str(checkpoint.damage(tmp_path, 5))
    for name in ("²", "٣", "05", "5.set-aside"):
        (tmp_path / name).mkdir()
    assert checkpoint.steps_in(tmp_path) == [5]


@pytest.mark.parametrize("how", ["no hashes", "empty hashes", "a flipped bit", "a lost link"])
def test_what_is_not_whole_is_set_aside_never_removed(tmp_path, how):
    folder = checkpoints(tmp_path / "checkpoints", 10, 20, 30)
    newest = folder / "30"
    match how:
        case "no hashes":
            (newest / checkpoint.HASHES).unlink()
        case "empty hashes":
            (newest / checkpoint.HASHES).write_text("")
        case "a flipped bit":
            (newest / "array").write_bytes(b"31")
        case "a lost link":
            newest.rename(tmp_path / "elsewhere")
            newest.symlink_to(tmp_path / "not mounted")
    before = contents(tmp_path)
    step, wrong = checkpoint.newest(folder)
    assert step == 20 and list(wrong) == [30] and contents(tmp_path) == before
    assert checkpoint.set_aside(folder, 30).name == "30.set-aside"
    assert list(contents(tmp_path).values()) == list(before.values())
    checkpoints(folder, 30)
    assert checkpoint.set_aside(folder, 30).name == "30.set-aside-1"


def test_none_that_is_known_to_be_whole_is_refused(tmp_path):
    folder = checkpoints(tmp_path, 10, 20)
    for path in folder.rglob("*.json"):
        path.unlink()
    before = contents(folder)
    message = said(lambda: checkpoint.newest(folder))
    assert "step 20: sha256.json: it is missing; step 10:" in message
    assert "start at step 0" in message
    assert contents(folder) == before
    assert checkpoint.newest(folder / "none") == (None, {})


def test_what_cannot_be_read_is_not_damaged(tmp_path, monkeypatch):
    """Root reads everything, so the error is that of the call which opens the file."""
    folder = checkpoints(tmp_path / "checkpoints", 10, 20)
    real = os.open
    for name in ("array", "metadata", checkpoint.HASHES):
        for error in (PermissionError(13, "Permission denied"), OSError(116, "Stale file handle")):

            def fail(path, *flags, name=name, error=error):
                if str(path).endswith(f"20/{name}") or str(path).endswith(f"20/record/{name}"):
                    raise error
                return real(path, *flags)

            monkeypatch.setattr(os, "open", fail)
            assert f"cannot be read ({error.strerror})" in said(lambda: checkpoint.newest(folder))
            monkeypatch.undo()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "not mounted")
    for strange in (link, folder / "20" / "array"):
        assert "cannot be read" in said(lambda strange=strange: checkpoint.newest(strange))
    assert checkpoint.newest(folder) == (20, {})


def test_whose_it_is_comes_before_whether_it_is_whole(tmp_path):
    folder = checkpoints(tmp_path, 20, identity={"seed": 1})
    (folder / "20" / "array").write_bytes(b"damaged")

    def fits(record):
        checkpoint.check_same(record, {"seed": 2}, tmp_path)

    assert "was made with seed 1" in said(lambda: checkpoint.newest(folder, fits))


def in_thread(function, *given):
    """As Streamlit, Gradio and asyncio.to_thread call a function."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *given).result()


def process_wide():
    """What a run in somebody's process must leave as it was."""
    hook = sys.unraisablehook  # stays, once, for what Orbax's threads say later
    hooks = 0
    while getattr(hook, "__module__", None) == checkpoint.__name__:
        hook, hooks = hook.__closure__[0].cell_contents, hooks + 1
    assert hooks <= 1
    handlers = [signal.getsignal(number) for number in (*ENDINGS, *WARNINGS, signal.SIGINT)]
    level = logging.getLogger("absl").level
    return handlers, warnings.showwarning, list(warnings.filters), level, gc.isenabled()


def test_what_is_resumed_goes_on_where_it_ended(tmp_path):
    """The quick form of the next test: in this process, whose programs need not give the same bits
    twice."""
    small = ("LAYERS=1", "HEADS=1", "WIDTH=16", "MLP_WIDTH=16", "STEPS=6", "EVAL_EVERY=3")
    options = dict(
        data=shards(tmp_path / "shards"), set_=(*TOY, *small), target_loss=9.0, progress=False
    )

    def losses(name, **more):
        before = process_wide()
        assert in_thread(train, Options("stdlib", run_dir=tmp_path / name, **options | more)) == 0
        assert process_wide() == before
        return [
            list(metrics(tmp_path / name, kind).values()) for kind in ("train_loss", "val_loss")
        ]

    whole = losses("whole")
    assert whole[0][0] - whole[0][4] > 0.01  # a start anew would show
    losses("half", steps=4, checkpoint_every=2)
    for found, expected in zip(losses("half", resume=True), whole, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    run = json.loads((tmp_path / "half" / "run.json").read_text())
    assert run["resumed"] == [4] and run["status"] == "finished" and run["steps"] == 6
    assert not (tmp_path / "half" / "interrupted").exists()


def test_a_diverged_state_is_not_saved(tmp_path, monkeypatch):
    real = History.trained
    monkeypatch.setattr(
        History, "trained", lambda self, loss: real(self, loss if self.steps < 3 else math.nan)
    )
    small = ("LAYERS=1", "HEADS=1", "WIDTH=16", "MLP_WIDTH=16", "STEPS=6", "EVAL_EVERY=6")
    options = {"data": shards(tmp_path / "shards"), "set_": (*TOY, *small), "progress": False}
    assert train(Options("stdlib", run_dir=tmp_path / "run", checkpoint_every=1, **options)) == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "diverged"
    assert checkpoint.steps_in(tmp_path / "run" / "checkpoints") == [1, 2]


@pytest.mark.slow
def test_25_steps_and_25_resumed_are_50_bit_for_bit(runs, tmp_path):
    folder = copy(runs, tmp_path)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["20", "25"]
    code, out, err = speedrun(tmp_path, "half", "--resume")
    assert code in (0, 1) and "after step 25" in out, err
    for kind in ("train_loss", "val_loss"):
        assert metrics(folder, kind) == metrics(runs / "whole", kind)
    run = json.loads((folder / "run.json").read_text())
    assert run["resumed"] == [25] and run["status"] == "finished" and run["steps"] == 50
    saves = [section for section in run["ledger"] if section["name"] == "checkpoint"]
    assert len(saves) == 3 and not any(section["timed"] for section in saves)
    assert all(probe["passed"] for probe in run["probes"].values())
    code, _, err = speedrun(tmp_path, "half", "--resume")
    assert code == 2 and "has ended" in err


@pytest.mark.slow
def test_another_mesh_goes_on_past_a_damaged_checkpoint(runs, tmp_path):
    folder = copy(runs, tmp_path)
    damage(folder, 25)
    code, out, err = speedrun(
        tmp_path, "half", "--resume", "--mesh", "data=4", "--checkpoint-every", "30"
    )
    assert code in (0, 1) and "step 25" in out and "not whole" in out and "after step 20" in out, (
        out,
        err,
    )
    assert (folder / "checkpoints" / "25.set-aside").is_dir()
    for kind in ("train_loss", "val_loss"):
        one, other = metrics(runs / "whole", kind), metrics(folder, kind)
        assert one.keys() == other.keys()
        np.testing.assert_allclose(list(other.values()), list(one.values()), atol=1e-5)


@pytest.mark.slow
def test_a_state_of_8x1_is_the_same_bits_on_4x2_and_on_one(tmp_path, monkeypatch):
    """The resumed run has the same losses for ten steps."""
    monkeypatch.setattr(layouts, "SMALL", 0)
    recipe, layout = find("stdlib", TOYS["stdlib"]).recipe, "fsdp+tp"
    tokens = batches(recipe, 12)
    saved, _ = run(recipe, mesh_of(data=8, model=1), None, tokens[:2], layout)
    with checkpoint.Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        checkpoints.save(2, saved, {})
    losses = []
    for axes in ({"data": 8, "model": 1}, {"data": 4, "model": 2}, {"data": 1, "model": 1}):
        shapes, shardings = program.state_shardings(recipe, layout, mesh_of(**axes))
        state = checkpoint.restore(tmp_path / "checkpoints", 2, shapes)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(saved))
        jax.tree.map(
            lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(str(leaf)),
            state,
            shardings,
        )
        state, found = run(recipe, mesh_of(**axes), None, tokens[2:], layout, state=state)
        assert int(state["step"]) == 12
        losses.append(found)
    assert abs(losses[0][-1] - losses[0][0]) > 1e-3
    for found in losses[1:]:
        np.testing.assert_allclose(found, losses[0], atol=1e-5)


def test_slow_parameters_are_read_from_a_checkpoint(tmp_path):
    recipe, mesh = find("r62", TOYS["r62"]).recipe, mesh_of(data=1)
    shapes, shardings = program.state_shardings(recipe, "zero1", mesh)
    state = jax.jit(
        lambda: init_state(recipe, np.uint32(1), "zero1", mesh), out_shardings=shardings
    )()
    assert state["accumulators"]
    with checkpoint.Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        checkpoints.save(6, state, {})
    params = checkpoint.restore(tmp_path / "checkpoints", 6, shapes)["params"]
    jax.tree.map(np.testing.assert_array_equal, params, state["params"])


@pytest.mark.slow
def test_slow_parameters_are_saved_between_their_updates_only(tmp_path):
    shards(tmp_path / "shards")
    fields = [*TOYS["r62"], "BOS=32", "EVAL_EVERY=6"]  # documents are words

    def r62(name, *arguments):
        words = [
            "r62",
            "--data",
            "shards",
            "--run-dir",
            name,
            "--no-sample",
            *arguments,
            "--set",
            *fields,
        ]
        code, out, err = ended([start(tmp_path, environment(), *words)])[0]
        assert code in (0, 1), err
        return out

    r62("whole")
    r62("half", "--steps", 9, "--checkpoint-every", 3)
    assert [path.name for path in (tmp_path / "half" / "checkpoints").iterdir()] == ["6"]
    assert "after step 6" in r62("half", "--resume", "--mesh", "data=4")
    for kind in ("train_loss", "val_loss"):
        one, other = metrics(tmp_path / "whole", kind), metrics(tmp_path / "half", kind)
        assert one.keys() == other.keys()
        np.testing.assert_allclose(list(other.values()), list(one.values()), atol=1e-5)


@pytest.mark.slow
def test_another_run_is_refused(runs, tmp_path):
    folder = copy(runs, tmp_path)
    for word, arguments, fields in [
        ("seed", ["--seed", "2"], FEW),
        ("MUON_LR 0.5", [], [*FEW, "MUON_LR=0.5"]),
        ("--run-dir", ["--run-dir", "half"], FEW),
    ]:
        resume = [] if word == "--run-dir" else ["--resume"]
        code, _, err = speedrun(tmp_path, "half", *resume, *arguments, fields=fields)
        assert code == 2 and word in err and err.startswith("error: ") and err.count("\n") == 1, err
    assert (folder / "run.json").exists() and (folder / "checkpoints" / "25").exists()


@pytest.mark.slow
def test_sigterm_saves_and_exits_143(runs, tmp_path):
    copy(runs, tmp_path)
    many = ["STEPS=100000", "EVAL_EVERY=100000"]
    process = start(tmp_path, environment(), "--run-dir", "run", "--data", "shards", *toy(*many))
    for _ in range(1200):
        if (tmp_path / "run" / "metrics.jsonl").exists() and len(metrics(tmp_path / "run")) > 5:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    ((code, out, err),) = ended([process])
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert code == 143 and run["status"] == "interrupted" and not err
    assert (tmp_path / "run" / "checkpoints" / str(run["steps"]) / "sha256.json").exists()
    more = run["steps"] + 3
    code, out, err = speedrun(tmp_path, "run", "--resume", "--steps", more, fields=many)
    assert code == 0 and list(metrics(tmp_path / "run")) == list(range(1, more + 1)), err
