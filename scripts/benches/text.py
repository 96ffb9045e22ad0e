"""Benchmark tokenisation against a plain tiktoken loop, and generation with and without the KV
cache."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.corpus import chunks, parallel_tokenise, process_pool
from jspeed.corpus.sources import text_files
from jspeed.corpus.tokenizers import bytes_tokenizer, tiktoken_encoding
from jspeed.data.manifest import TokenizerFacts
from jspeed.fields import Count, Wants, integer
from jspeed.inference.generate import Generator, Sampling
from jspeed.inference.trained import Model
from jspeed.parallel.mesh import make_mesh
from jspeed.recipe import init_parameters
from jspeed.run.compute.device import device_of
from jspeed.run.compute.program import eval_context
from jspeed.run.find_recipe import find

Texts = Annotated[tuple[Path, ...], Wants("FILE|FOLDER", positional=True)]


def tokenise(inputs: Texts, processes: Count = 2, rounds: Count = 5) -> None:
    """Tokens a second of prepare.py's tokenising and of a plain loop over tiktoken's
    encode_ordinary.

    Both read the same files, take each document's text from them and write its tokens to disk;
    neither is charged for starting Python or loading the vocabulary: processes are started and have
    tokenised once before the clock starts.

    Args:
        inputs: Text files, as prepare.py text takes them.
        processes: Processes that tokenise.
        rounds: Measurements of each, in turn; medians are printed.
    """
    encoding = tiktoken_encoding("gpt2")
    encode = partial(parallel_tokenise.encode, "gpt2", "before", encoding.eot_token)
    paths = [path for _, path in text_files(inputs)]

    def plain(folder: Path) -> int:
        total = 0
        with open(folder / "plain.bin", "wb") as file:
            for path in paths:
                for segment in chunks.segments(path):
                    for document in chunks.documents(segment):
                        ids = encoding.encode_ordinary(document.decode())
                        ids.append(encoding.eot_token)
                        file.write(np.array(ids, np.uint16).tobytes())
                        total += len(ids)
        return total

    def ours(folder: Path, repeats: int) -> int:
        """The files again and again through one pool; the first time is not measured."""
        encoded = process_pool.in_order(encode, again(repeats), processes)
        with open(folder / "ours.bin", "wb") as file:
            return sum(len(part.tokens) + 0 * file.write(part.tokens.tobytes()) for part in encoded)

    def again(repeats: int):
        return itertools.chain.from_iterable(chunks.pieces(paths) for _ in range(repeats))

    rates: dict[str, list[float]] = {"plain": [], "ours": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(rounds):
            tokens, seconds = timed(lambda: plain(folder))
            rates["plain"].append(tokens / seconds)
            (once, first), (several, longer) = (
                timed(lambda: ours(folder, 1)),
                timed(lambda: ours(folder, 5)),
            )
            rates["ours"].append((several - once) / (longer - first))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{tokens:,} tokens, {rounds} rounds of each in turn, medians")
    print(f"plain tiktoken loop            {medians['plain'] / 1e6:6.2f} M tokens/s")
    print(f"prepare.py, {processes} process(es)       {medians['ours'] / 1e6:6.2f} M tokens/s")
    print(f"ratio                          {medians['ours'] / medians['plain']:6.2f}")


def generate(
    recipe: str = "stdlib", positions: Annotated[int, integer(3)] = 256, rounds: Count = 3
) -> None:
    """Tokens a second of greedy generation with the cache, and with a whole forward pass for each
    token.

    Args:
        recipe: Whose model to use, with random parameters.
        positions: Length of the text, all of it generated.
        rounds: Measurements of each, in turn; medians are printed.
    """
    loaded = find(
        recipe, [f"LANE_LEN={positions}", f"EVAL_LEN={positions}", f"EVAL_TOKENS={positions}"]
    )
    params = init_parameters(loaded.recipe.parameters, jax.random.key(0))
    params = jax.tree.map(
        lambda p: p + 0.02 * jax.random.normal(jax.random.key(1), p.shape), params
    )
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    facts: TokenizerFacts = {**bytes_tokenizer().facts, "bos_id": None}
    generator = Generator(Model(loaded, params, mesh, facts), 1, Sampling(0.0))
    context = eval_context(loaded.recipe, device_of(mesh, "xla"))

    @jax.jit
    def whole(params, tokens_BT, place):
        return jnp.argmax(loaded.recipe.forward(params, tokens_BT, context)[0, place, :257])

    def cached() -> list[int]:
        return [int(token[0]) for token in generator([[1]], positions - 1)]

    def forwards() -> list[int]:
        tokens = np.zeros((1, positions), np.int32)
        tokens[0, 0] = 1
        for place in range(positions - 1):
            tokens[0, place + 1] = whole(params, tokens, place)
        return tokens[0, 1:].tolist()

    methods: dict[str, Callable[[], list[int]]] = {
        "with the cache": cached,
        "whole forward passes": forwards,
    }
    same = [method() for method in methods.values()]  # also compiles
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            seconds[name].append(timed(method)[1])
    medians = [statistics.median(values) for values in seconds.values()]
    print(
        f"{recipe}, {positions} positions, {rounds} rounds of each in turn, medians; same tokens:"
        f" {same[0] == same[1]}"
    )
    for name, median in zip(methods, medians, strict=True):
        print(f"{name:<22}{(positions - 1) / median:8.0f} tokens/s")
    print(f"ratio                 {medians[1] / medians[0]:8.1f}")


def timed(call: Callable) -> tuple:
    """Return what ``call`` returns and the seconds it took."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start
