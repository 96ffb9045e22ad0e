"""The fused products beside their twins in plain JAX, on one GPU."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspeed.errors import BadInput
from jspeed.model import fused
from jspeed.model.fp8 import E4M3


def kernels(tokens: int = 49_152, width: int = 768, mlp_width: int = 3072, rounds: int = 20) -> None:
    """Milliseconds of each own kernel and of its twin, as XLA compiles it, in turn on the same arrays.

    Args:
        tokens: Rows; default: a device's in the last stage of record 89.
        width: Model width.
        mlp_width: Width of the MLP.
        rounds: Times of each, of 10 calls in a row; medians are printed.
    """
    if jax.default_backend() != "gpu":
        raise BadInput(f"bench.py kernels needs a Hopper GPU, JAX has found {jax.devices()[0].device_kind}")
    x, up, g, down, h = (
        0.1 * jax.random.normal(jax.random.key(n), shape, jnp.bfloat16)
        for n, shape in enumerate(
            [(tokens, width), (mlp_width, width), (tokens, width), (width, mlp_width), (tokens, mlp_width)]
        )
    )
    forward = x.astype(E4M3), up.astype(E4M3), jnp.array([1.0, 1 / 448], jnp.float32)
    cases: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[jax.Array, ...]]] = {
        "squared ReLU, FP8": (fused.squared_relu_product, fused.squared_relu_product_twin, forward),
        "its gradient": (fused.squared_relu_gradient, fused.squared_relu_gradient_twin, (g, down, h * h)),
    }
    print(
        f"{tokens:,} tokens, {width} x {mlp_width}, {jax.devices()[0].device_kind}, JAX {jax.__version__}; ms, medians"
    )
    for name, (kernel, twin, arrays) in cases.items():
        calls = [jax.jit(kernel), jax.jit(twin)]
        spent: list[list[float]] = [[], []]
        for _ in range(rounds):
            for call, times in zip(calls, spent, strict=True):
                jax.block_until_ready(call(*arrays))
                start = time.perf_counter()
                results = [call(*arrays) for _ in range(10)]
                jax.block_until_ready(results)
                times.append((time.perf_counter() - start) * 100)
        ours, theirs = map(statistics.median, spent)
        print(f"{name:<20}{ours:8.3f} kernel {theirs:8.3f} twin   ratio {ours / theirs:.2f}")
