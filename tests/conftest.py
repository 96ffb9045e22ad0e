"""Eight virtual CPU devices and strict numerics for every test; tests/gpu runs in a session of its
own."""

import functools
import gc
import os
import signal
import threading
from collections.abc import Iterator
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

# Programs of toys, too, are kept for the next run of the same one, but not single operations.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

# NumPy's threads wait by spinning, on the cores that the other worker computes with: a matmul of a
# toy takes sixty times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest
from jax._src.interpreters import mlir

from jspeed.base.jax_versions import ask_again_for_compile_cache

# A trace makes a hundred thousand objects and more that live: looked through less often, tests take
# 5 % less.
gc.set_threshold(200_000, 50, 1000)
gc.unfreeze = lambda: None  # which a run ends with: the next one would look through all again

# A new one for each program is a fifth of the time that a single operation takes to compile.
# Threads that compile side by side have their own: a context is not locked.
new_context = mlir.make_ir_context
mlir.make_ir_context = lambda: contexts_of(threading.get_ident())
contexts_of = functools.cache(lambda _: new_context())

# A shell has what it starts in the background ignore Ctrl-C, and so would every program that tests
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if not os.environ.get("JSPEED_TEST_GPU"):
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With JSPEED_TEST_PART=1/3 keep every third file that has a test to run, from the second on:
    the parts 0/3, 1/3 and 2/3 are all."""
    if part := os.environ.get("JSPEED_TEST_PART"):
        first, of = map(int, part.split("/"))
        files = set(list(dict.fromkeys(item.path for item in items))[first::of])
        config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
        items[:] = [item for item in items if item.path in files]


@pytest.fixture(autouse=True)
def own_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Keep tests away from the user's prepared data; compiled programs are shared within one test
    run, and again after an audit or a planned run, which take none."""
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    yield
    if not jax.config.values["jax_enable_compilation_cache"]:
        jax.config.update("jax_enable_compilation_cache", True)
        ask_again_for_compile_cache()


@pytest.fixture(autouse=True)
def few_objects_to_look_through() -> Iterator[None]:
    """Collect each test's garbage with it. What else it leaves is never looked at again: a run
    collects several times, and a worker has millions of objects in the end."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def gpt2_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiktoken find GPT-2's vocabulary offline; skips the test where there is none."""
    found = Path(__file__).parents[2] / "shared" / "data" / "tiktoken_cache"
    if found.is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(found))
    elif "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip(
            f"GPT-2's vocabulary is not in {found}; TIKTOKEN_CACHE_DIR=FOLDER lets tiktoken keep it"
            " there"
        )
