"""A program that lies in the compile cache, or among saved ones, under another one's key."""

import json

import jax
import jax.numpy as jnp
import pytest

from jspeed.base.compile_cache import folder, use_compile_cache
from jspeed.base.files import PROGRAMS, cache_folder
from jspeed.base.jax_versions import ask_again_for_compile_cache, machine_code
from jspeed.inference.audit import audit
from jspeed.parallel.mesh import make_mesh
from jspeed.run.compute.device import device_of
from jspeed.run.compute.division import place
from jspeed.run.compute.program import compile_evaluation
from jspeed.run.compute.score import losses
from jspeed.run.find_recipe import find
from jspeed.run.hooks import NO_HOOKS
from jspeed.run.options import Options
from jspeed.run.train import train
from jspeed.saved import programs as saved
from jspeed.saved.hooks import add

from .attack import PARENT


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A compile cache of its own, which keeps every program."""
    names = (
        "jax_enable_compilation_cache",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: jax.config.values[name] for name in names}
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    for name, value in zip(names, (True, str(tmp_path / "xla"), 0), strict=True):
        jax.config.update(name, value)
    ask_again_for_compile_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    ask_again_for_compile_cache()
    jax.clear_caches()


def evaluation(scale):
    """Return the loss that a program called evaluation computes, compiled or from the cache."""

    def evaluate(x):
        return jnp.sum(x) * scale

    jax.clear_caches()
    return float(jax.jit(evaluate)(jnp.ones(4)))


def test_a_planned_run_takes_no_program_from_the_cache(cache):
    assert evaluation(0.3) == pytest.approx(1.2)
    (theirs,) = folder().glob("jit_evaluate-*-cache")
    content = theirs.read_bytes()
    theirs.unlink()
    assert evaluation(1.0) == 4
    (honest,) = folder().glob("jit_evaluate-*-cache")
    honest.write_bytes(content)
    assert evaluation(1.0) == pytest.approx(1.2)  # the attack is one
    use_compile_cache(announced=True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    kept = set(folder().iterdir())
    assert evaluation(1.0) == 4 and evaluation(0.5) == 2
    assert set(folder().iterdir()) == kept


def test_a_saved_evaluation_of_another_program(data, tmp_path, monkeypatch):
    """Whoever can write the cache folder makes a run say a false loss; its programs' hash and an
    audit tell. A announced run loads none."""
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path / "cache"))
    recipe = tmp_path / "mine.py"
    recipe.write_text(PARENT)

    def run(name):
        options = Options(str(recipe), data=data, run_dir=tmp_path / name, progress=False)
        train(options, add(NO_HOOKS), saves=True)
        return json.loads((tmp_path / name / "run.json").read_text())

    honest = run("honest")
    (listed,) = (cache_folder() / PROGRAMS).glob("parent-*")
    kept = saved.read(listed)
    mesh, loaded = make_mesh({"data": 1}, jax.devices()[:1]), find(str(recipe))
    placement = place(loaded.recipe, mesh, "zero1", device_of(mesh, recipe=loaded.recipe))
    facts = kept["facts"]
    rows, at_once = facts["eval_lanes"], facts["micro_tokens"]
    padded, false = compile_evaluation(
        loaded.recipe, placement, at_once, rows, measure=lambda *args: 0.3 * losses(*args)
    )
    assert padded == rows
    saved.save(listed.with_name(kept["others"][1]), machine_code(false))
    forged = run("forged")
    assert forged["programs"]["loaded"] and not honest["programs"]["loaded"]
    assert forged["val_loss"] < 0.4 * honest["val_loss"] and forged["reached"]  # the attack is one
    texts = [each["programs"]["sha256"]["evaluation"] for each in (honest, forged)]
    assert texts[0] != texts[1]
    found, _ = audit(tmp_path / "forged", None, data, trust=True)[:2]
    assert "validation loss" in {what for what, _, right in found if not right}
