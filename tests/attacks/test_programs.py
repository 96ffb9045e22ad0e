"""A program that lies in the compile cache under another one's key."""

import jax
import jax.numpy as jnp
import pytest

from jspeed.base.compile_cache import folder, use_compile_cache
from jspeed.base.jax_versions import ask_again_for_compile_cache


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
    use_compile_cache(planned=True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    kept = set(folder().iterdir())
    assert evaluation(1.0) == 4 and evaluation(0.5) == 2
    assert set(folder().iterdir()) == kept
