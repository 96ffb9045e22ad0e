"""--stop-at-target, --keep-best and --keep-checkpoints: what a run leaves."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jspeed.record.run_json import read_run
from jspeed.run.checkpoint import steps_in
from jspeed.run.export import load
from jspeed.run.find_recipe import find
from jspeed.run.finish import keep_best
from jspeed.run.options import Options
from jspeed.run.train import train

from ..multi_process import TOY, shards


@pytest.mark.slow
def test_a_run_stops_at_its_target(tmp_path):
    run_dir = tmp_path / "run"
    sets = (*TOY, "LAYERS=1", "STEPS=40", "EVAL_EVERY=3")
    more = {"checkpoint_every": 2, "keep_checkpoints": 3, "keep_best": True, "stop_at_target": True}
    options = Options(
        "stdlib", data=shards(tmp_path / "shards"), run_dir=run_dir, set_=sets, target_loss=4.2
    )
    assert train(Options(**vars(options) | more | {"progress": False})) == 0
    run = read_run(run_dir)
    assert run["status"] == "stopped" and run["reached"] and run["planned_steps"] == 40
    losses = {point["step"]: point["val_loss"] for point in run["curve"]}
    assert list(losses) == list(range(0, run["steps"] + 1, 3)) and 0 < run["steps"] < 40
    assert [step for step, loss in losses.items() if loss <= 4.2] == [run["steps"]]
    saved = range(2, run["steps"] + 1, 2)
    assert steps_in(run_dir / "checkpoints") == sorted({*saved, run["steps"]})[-3:]
    best, about = load(run_dir / "best")
    jax.tree.map(np.testing.assert_array_equal, best, load(run_dir)[0])
    assert about["step"] == str(run["steps"])


def test_the_best_change_only_when_validation_improves(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "recipe.py").write_text("")
    found = find("stdlib", TOY)
    program = SimpleNamespace(tables=None)
    setup = SimpleNamespace(run_dir=tmp_path, loaded=found, recipe=found.recipe, program=program)
    progress = SimpleNamespace(losses=[], steps=0, failed=[])
    kept = []
    for step, loss in enumerate([3.0, 2.5, 2.6, 2.5, 2.4, 9.0]):
        progress.steps, progress.losses = step, [*progress.losses, loss]
        keep_best(setup, progress, {"w": jax.numpy.full(2, float(step))})
        tensors, about = load(tmp_path / "best")
        assert about["step"] == str(int(tensors["w"][0]))
        kept.append((about["step"], float(about["val_loss"])))
    assert kept == [("0", 3.0), ("1", 2.5), ("1", 2.5), ("1", 2.5), ("4", 2.4), ("4", 2.4)]
    assert {path.name for path in (tmp_path / "best").iterdir()} == {
        "config.json",
        "recipe.py",
        "model.safetensors",
    }
    (tmp_path / "best" / "model.safetensors").unlink()
    (tmp_path / "best" / "model.safetensors").mkdir()  # nothing can be put in its place
    progress.losses.append(1.0)
    keep_best(setup, progress, {"w": jax.numpy.zeros(2)})
    assert progress.failed[0].startswith("the best parameters: ")
