"""Races against PyTorch programs: their logs, seconds to a loss, nanoGPT."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from jspeed.errors import BadInput
from jspeed.run.find_recipe import find

from .call_bench import GPU_TOY, bench

THEIR_LOG = """echo "step:0/9 train_time:0ms step_avg:nanms"
test -d "$JSPEED_DATA" -a "$DATA_PATH" = "$JSPEED_DATA" || exit 9
echo "step:0/9 val_loss:9.5000 train_time:0ms step_avg:nanms"
echo "step:5/9 val_loss:0.5000 train_time:9000ms step_avg:1800.00ms"
echo "step:9/9 val_loss:nan train_time:10000ms step_avg:1111.11ms"
"""


@pytest.mark.slow
def test_two_programs_race_on_the_same_tokens(shards, tmp_path):
    files = ["--json", tmp_path / "race.json", "--svg", tmp_path / "race.svg"]
    done = bench(
        "gpu", "--recipe", "stdlib", "--data", shards, "--versus", THEIR_LOG, *files, *GPU_TOY
    )
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "race.json").read_text())
    assert content["curves"]["theirs"][0][:2] == [[0, 0.0, 9.5], [5, 9.0, 0.5]]
    ours = content["curves"]["ours"][0]
    assert [step for step, *_ in ours] == [0, 2, 4]
    lowest = content["needed"][-1]
    assert lowest["loss"] == min(loss for *_, loss in ours)
    assert lowest["theirs"] == pytest.approx(9.5 - lowest["loss"])
    assert f"{lowest['loss']:.4f}" in done.stdout
    assert "jspeed, round 1" in (tmp_path / "race.svg").read_text()


def test_a_log_that_cannot_be_read_is_one_error_message(tmp_path):
    from benches.versus import their_curve

    with pytest.raises(BadInput, match="expected modded-nanogpt's log"):
        their_curve("echo step 1, loss 2", tmp_path)
    with pytest.raises(BadInput, match="ended with exit code 3"):
        their_curve("exit 3", tmp_path)


def test_seconds_to_a_loss_are_linear_between_validations():
    from benches.versus import compare, seconds_to

    ours = [(0, 0.0, 8.0), (1, 10.0, 4.0), (2, 20.0, 5.0), (3, 30.0, 3.0)]
    assert [seconds_to(ours, loss) for loss in (9.0, 6.0, 4.5, 3.5, 2.0)] == [
        0.0,
        5.0,
        8.75,
        27.5,
        None,
    ]
    theirs = [(0, 0.0, 7.5), (1, 30.0, 4.5), (2, 60.0, float("nan"))]
    assert compare([ours, ours], [theirs, theirs])[:2] == [
        {"loss": 7.0, "ours": 2.5, "theirs": 5.0, "ratio": 2.0},
        {"loss": 6.0, "ours": 5.0, "theirs": 15.0, "ratio": 3.0},
    ]
    assert compare([ours], [theirs])[-1] == dict(loss=4.5, ours=8.75, theirs=30.0, ratio=30 / 8.75)


def test_seconds_of_nanogpt_leave_evaluation_out(shards, tmp_path):
    from benches import nanogpt

    said = [
        "step 0: train loss 4.2, val loss 4.2874",
        "iter 0: loss 4.2, time 900.00ms, mfu -100.00%",
    ]
    said += [f"iter {n}: loss 3.0, time {20 + n}.00ms, mfu 0.01%" for n in (1, 2, 3)]
    said += [
        "step 4: train loss 1.7, val loss 1.8799",
        "saving checkpoint",
        "iter 4: loss 1.7, time 800.00ms, mfu 1%",
    ]
    said += ["iter 5: loss 1.7, time 24.00ms, mfu 1%", "step 6: train loss 1.6, val loss 1.8000"]
    clone = tmp_path / "clone"
    (clone / "config").mkdir(parents=True)
    for name in ("model.py", "configurator.py", "config/train_shakespeare_char.py"):
        (clone / name).write_text("")
    with pytest.raises(BadInput, match=r"has no train.py; give the folder of a clone"):
        nanogpt.nanogpt(clone, shards, tmp_path / "none")
    (clone / "train.py").write_text("print(" + repr("\n".join(said)) + ")")
    copy = nanogpt.nanogpt(clone, shards, tmp_path / "copy")
    text = np.fromfile(copy / "data" / "shakespeare_char" / "val.bin", np.uint16)
    assert text.tolist() == [256, *b"round and round " * 200]
    found = nanogpt.their_run(copy, Path(sys.executable))
    assert found == dict(
        seconds=pytest.approx(0.0225 + 0.021 + 0.022 + 0.023), loss=1.8799, steps=4
    )
    (copy / "train.py").write_text("import pytorch")
    with pytest.raises(BadInput, match=r"exit code 1 and said: .*'pytorch'; give a Python"):
        nanogpt.their_run(copy, Path(sys.executable))


def test_a_run_that_diverges_has_a_curve(monkeypatch, tmp_path):
    """run.json has null for a loss that is not finite."""
    from benches import nanogpt, quality, versus

    point = {"timed_seconds": 1.0, "step": 1, "val_loss": None}
    run = {
        "curve": [point | {"step": 0, "val_loss": 8.0}, point],
        "timed_seconds": 1.0,
        "val_loss": None,
        "steps": 1,
    }
    run |= {"target_loss": 3.0, "recipe": "r29", "devices": {"kind": "cpu"}}
    for module in (nanogpt, quality, versus):
        monkeypatch.setattr(module, "our_run", lambda *_: run)
    monkeypatch.setattr(versus, "their_curve", lambda *_: [(0, 0.0, 8.0), (1, 1.0, 5.0)])
    assert versus.race("r29", "theirs", tmp_path, 1, {}, (), tmp_path / "race.json", None) == 0
    assert np.isnan(json.loads((tmp_path / "race.json").read_text())["curves"]["ours"][0][1][2])
    monkeypatch.setattr(quality, "write_tokens", lambda out, texts, most: [256] * 2000)
    quality.quality((), ("r29", "r62"), seeds=2, json_=tmp_path / "kept.json")
    assert np.isnan(json.loads((tmp_path / "kept.json").read_text())["compared"]["r29"]["loss"])
    monkeypatch.setattr(nanogpt, "data_folder", lambda *_: tmp_path)
    monkeypatch.setattr(nanogpt, "nanogpt", lambda *_: tmp_path)
    monkeypatch.setattr(nanogpt, "their_run", lambda *_: {"seconds": 2.0, "loss": 1.8, "steps": 4})
    assert nanogpt.contest(("shakespeare-char",), tmp_path, None, 1, None) == 1


def test_nanogpt_s_setting_is_the_one_that_the_recipe_names():
    """Flag by flag, and as the recipe's docstring has it."""
    from benches.nanogpt import SETS, SETTING, TARGET

    found = find("nanogpt", SETS["nanogpt"], trace=False)
    theirs = dict(word.removeprefix("--").split("=") for word in SETTING.split())
    ours = {"block_size": "LANE_LEN", "batch_size": "LANES", "n_layer": "LAYERS"}
    ours |= {"n_head": "HEADS", "n_embd": "WIDTH", "max_iters": "STEPS"}
    ours |= {"lr_decay_iters": "COOLDOWN", "dropout": "DROPOUT"}
    assert {name: float(theirs[name]) for name in ours} == {
        name: found.fields[field] for name, field in ours.items()
    }
    assert set(theirs) - set(ours) == {"device", "compile", "log_interval"}
    assert found.fields["EVAL_LEN"] == 64 and found.recipe.target_loss == TARGET
    named = re.search(r"--set ((?:\w+=[\w.]+\s+)+)", found.source)
    assert named and named[1].split() == SETS["nanogpt"]


def test_nanogpt_s_setting_stands_beside_nanogpt(monkeypatch, tmp_path, capsys):
    from benches import cpu, nanogpt

    order, figures = [], {"shakespeare-char": (1.8, 2.0), "nanogpt": (1.9, 50.0)}

    def our_run(recipe, data, run_dir, seed, flags, sets):
        order.append(recipe)
        assert ("WIDTH=128" in sets) == (recipe == "nanogpt")
        loss, seconds = figures[recipe]
        return {"val_loss": loss, "timed_seconds": seconds, "steps": 9}

    monkeypatch.setattr(nanogpt, "our_run", our_run)
    monkeypatch.setattr(nanogpt, "data_folder", lambda *_: tmp_path)
    monkeypatch.setattr(nanogpt, "nanogpt", lambda *_: tmp_path)
    monkeypatch.setattr(
        nanogpt,
        "their_run",
        lambda *_: order.append("nanoGPT") or {"seconds": 100.0, "loss": 1.92, "steps": 4},
    )
    assert cpu.cpu(versus=tmp_path, rounds=2, json_=tmp_path / "f.json") == 0
    assert order == [*(turn := ["nanoGPT", "shakespeare-char", "nanogpt"]), *turn[::-1]]
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["nanogpt", "50.00", "2.00", "1.9000", "0", "of", "2"] in said
    assert ["nanoGPT", "100.00", "1.00", "1.9200", "0", "of", "2"] in said
    assert json.loads((tmp_path / "f.json").read_text())["seconds"]["shakespeare-char"] == 2.0
    for name in figures:
        find(name, trace=False)
    with pytest.raises(BadInput, match="--versus draws nothing"):
        cpu.cpu(versus=tmp_path, svg=tmp_path / "f.svg")
