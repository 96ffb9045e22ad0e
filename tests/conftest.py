"""Eight virtual CPU devices and strict numerics for every test; tests/gpu runs in a session of its own."""

import os

# LLVM takes half as long over programs that run for milliseconds. Read when the first one is compiled.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

import jax
import pytest

if not os.environ.get("JSPEED_TEST_GPU"):
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Toys take longer to compile than to run: without LLVM's optimisations the whole suite needs half the time.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests away from the user's prepared data; compiled programs are shared within one test run."""
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
