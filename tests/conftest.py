"""Eight virtual CPU devices and strict numerics for every test; tests/gpu runs in a session of its
own."""

import gc
import os
import signal
from importlib.metadata import version
from pathlib import Path

# Toys take longer to compile than to run: half as long without LLVM's optimisations and, where XLA
# has another one, without its newer emitter of fusions; and 15 % less in one piece, where workers
# use all cores. Read when the first program is compiled.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    + ["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10.")
)

import jax
import pytest

# A trace makes a hundred thousand objects and more that live: looked through less often, tests take
# 5 % less.
gc.set_threshold(200_000, 50, 1000)

# A shell has what it starts in the background ignore Ctrl-C, and so would every program that tests
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if not os.environ.get("JSPEED_TEST_GPU"):
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests away from the user's prepared data; compiled programs are shared within one test
    run."""
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def gpt2_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiktoken find GPT-2's vocabulary without a network; skips the test where there is
    none."""
    found = Path(__file__).parents[2] / "shared" / "data" / "tiktoken_cache"
    if found.is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(found))
    elif "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip(
            f"GPT-2's vocabulary is not in {found}; TIKTOKEN_CACHE_DIR=FOLDER lets tiktoken keep it"
            " there"
        )
