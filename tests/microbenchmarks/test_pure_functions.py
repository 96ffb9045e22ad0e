"""Micro-benchmarks on one core: loader batches, tokenisation, statistics, HLO parsing.

Timings decide nothing here: pytest-benchmark prints and compares them, the asserts are about
results.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.board import stats
from jspeed.corpus.shards.folder import EncodedDocuments, write_folder
from jspeed.corpus.tokenizers import bytes_tokenizer, named_tokenizer
from jspeed.data import TokenLoader, open_shards
from jspeed.plan import hlo

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")
BOS = 50_256
LANES, LANE_LEN = 8, 16_384  # the first stage of r62


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four million tokens in documents of 500."""
    tokens = np.random.default_rng(0).integers(0, BOS, 4_000_000, dtype=np.uint16)
    tokens[::500] = BOS
    lengths = np.full(8000, 500)
    out = tmp_path_factory.mktemp("benchmarks") / "data"
    facts = {"tokenizer": "gpt2", "vocab_size": BOS + 1, "bos_id": BOS, "source": {}}
    write_folder(
        out,
        [
            EncodedDocuments("train", tokens, lengths),
            EncodedDocuments("val", tokens[:500], lengths[:1]),
        ],
        facts,
        "random",
    )
    return open_shards(str(out / "*_train_*.bin"))


@pytest.fixture(scope="module")
def text():
    return Path(jax.__file__).with_name("_src").joinpath("numpy", "lax_numpy.py").read_bytes()


@pytest.mark.parametrize("align", [None, "bos"])
def test_batches_through_pyo3(benchmark, shards, align):
    """131,072 tokens a batch, tables of documents included."""
    schedule = dict(lanes=LANES, lane_len=LANE_LEN, bos_id=BOS, vocab_size=BOS + 1, align=align)
    with TokenLoader(shards, **schedule, epochs=None, prefetch=0) as loader:
        batch = benchmark(lambda: next(loader))
    assert batch.tokens.shape == (LANES, LANE_LEN + 1) and batch.tokens.max() <= BOS


def test_bytes_of_text(benchmark, text):
    assert benchmark(bytes_tokenizer().encode, text).size == len(text)


def test_gpt2_tokens_of_text(benchmark, text, gpt2_vocabulary):
    tokenizer = named_tokenizer("gpt2")
    ids = benchmark(tokenizer.encode, text)
    assert tokenizer.decode(ids) == text


def test_statistics_of_two_recipes(benchmark):
    rng = np.random.default_rng(0)
    a, b = (tuple(rng.normal(mean, 0.001, 40)) for mean in (3.279, 3.281))

    def compared():
        return stats.t_below(
            float(np.mean(a)), float(np.std(a, ddof=1)), 40, 3.28
        ), stats.unpaired_ratio(a, b)

    below, ratio = benchmark(compared)
    assert below.p < 0.01 and ratio.low > 1


def test_reading_of_hlo(benchmark):
    """A program of a few hundred instructions: 20 layers written out, and their gradient."""

    def layers(w, x):
        for n in range(20):
            x = jnp.tanh(x @ w[n]) + x
        return jnp.sum(x)

    shapes = (
        jax.ShapeDtypeStruct((20, 64, 64), jnp.float32),
        jax.ShapeDtypeStruct((8, 64), jnp.float32),
    )
    program = jax.jit(jax.grad(layers)).lower(*shapes).compile().as_text()
    steps = benchmark(hlo.instructions.__wrapped__, program)  # without its cache
    assert len(steps) > 150 and any(step.opcode == "dot" for step in steps)
