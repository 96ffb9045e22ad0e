"""The fused matmuls beside their references in plain JAX, on one GPU."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benches.text import timed
from jspeed.errors import BadInput
from jspeed.model.fp8 import E4M3
from jspeed.model.kernels.fused_mlp import (
    squared_relu_gradient,
    squared_relu_gradient_reference,
    squared_relu_matmul,
    squared_relu_matmul_reference,
)

WIDTH, MLP_WIDTH = 768, 3072  # record 89's


def fused(tokens: int = 49_152, rounds: int = 20) -> None:
    """Milliseconds of each own kernel and of its reference, as XLA compiles it, in turn on the same arrays.

    Args:
        tokens: Rows; default: a device's in the last stage of record 89.
        rounds: Times of each, of 10 calls in a row; medians are printed.
    """
    if jax.default_backend() != "gpu":
        raise BadInput(f"bench.py fused needs a Hopper GPU, JAX has found {jax.devices()[0].device_kind}")
    x, up, g, down, h = (
        0.1 * jax.random.normal(jax.random.key(n), shape, jnp.bfloat16)
        for n, shape in enumerate(
            [(tokens, WIDTH), (MLP_WIDTH, WIDTH), (tokens, WIDTH), (WIDTH, MLP_WIDTH), (tokens, MLP_WIDTH)]
        )
    )
    forward = x.astype(E4M3), up.astype(E4M3), jnp.array([1.0, 1 / 448], jnp.float32)
    cases: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[jax.Array, ...]]] = {
        "squared ReLU, FP8": (squared_relu_matmul, squared_relu_matmul_reference, forward),
        "its gradient": (squared_relu_gradient, squared_relu_gradient_reference, (g, down, h * h)),
    }
    print(
        f"{tokens:,} tokens, {WIDTH} x {MLP_WIDTH}, {jax.devices()[0].device_kind}, JAX {jax.__version__}; ms, medians"
    )
    for name, (kernel, reference, arrays) in cases.items():
        calls = [partial(jax.jit(way), *arrays) for way in (kernel, reference)]
        spent: list[list[float]] = [[], []]
        for _ in range(rounds):
            for call, times in zip(calls, spent, strict=True):
                jax.block_until_ready(call())
                _, seconds = timed(lambda call=call: jax.block_until_ready([call() for _ in range(10)]))
                times.append(1e3 * seconds / 10)
        ours, theirs = map(statistics.median, spent)
        print(f"{name:<20}{ours:8.3f} kernel {theirs:8.3f} XLA   ratio {ours / theirs:.2f}")
