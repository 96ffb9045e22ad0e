"""Benchmark jspeed's GPU kernels against their plain-JAX references."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benches.synthetic import zipf_ids
from benches.text import timed
from jspeed.base.compiler import options_for
from jspeed.errors import BadInput, type_and_line
from jspeed.fields import Count
from jspeed.kernels import own_value, pointer_attention
from jspeed.kernels.fp8_cast import cast, cast_reference
from jspeed.kernels.fused_mlp import (
    squared_relu_gradient_fp8,
    squared_relu_gradient_fp8_reference,
    squared_relu_matmul_fp8,
    squared_relu_matmul_fp8_reference,
)
from jspeed.kernels.qk_norm import norm_and_rotate
from jspeed.kernels.row_sums import sum_rows
from jspeed.model import pointer
from jspeed.model.attention import find_documents, without_own_value
from jspeed.model.custom_kernels import Kernel, custom_kernel
from jspeed.model.fp8 import E4M3, E5M2
from jspeed.model.positions import frequencies, queries_and_keys
from jspeed.speedrun.mudd import add_normed

WIDTH, MLP_WIDTH, HEADS = 768, 3072, 6  # record 89's
DOCUMENT = 700  # tokens


def fused(tokens: Count = 49_152, rounds: Count = 20) -> None:
    """Milliseconds of each own kernel and of its reference, as XLA compiles it, in turn on the same
    arrays.

    Args:
        tokens: Rows; default: a device's in the last stage of record 89.
        rounds: Times of each, of 10 calls in a row; medians are printed.
    """
    if jax.default_backend() != "gpu":
        raise BadInput(
            f"bench.py fused needs a Hopper GPU, JAX has found {jax.devices()[0].device_kind}"
        )
    x, up, g, down, h = (
        0.1 * jax.random.normal(jax.random.key(n), shape, jnp.bfloat16)
        for n, shape in enumerate(
            [
                (tokens, WIDTH),
                (MLP_WIDTH, WIDTH),
                (tokens, WIDTH),
                (WIDTH, MLP_WIDTH),
                (tokens, MLP_WIDTH),
            ]
        )
    )
    forward = x.astype(E4M3), up.astype(E4M3), jnp.array([1.0, 1 / 448], jnp.float32)
    backward = (
        g.astype(E5M2),
        down.T.astype(E4M3),
        (h * h).astype(E4M3),
        jnp.array([1.0, 1.0, 1e-3], jnp.float32),
    )
    cases: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[jax.Array, ...]]] = {
        "squared ReLU": (squared_relu_matmul_fp8, squared_relu_matmul_fp8_reference, forward),
        "its gradient": (
            squared_relu_gradient_fp8,
            squared_relu_gradient_fp8_reference,
            backward,
        ),
        "FP8 copies": (
            partial(cast, dtype=E5M2),
            partial(cast_reference, dtype=E5M2),
            (g, jnp.float32(1e-3)),
        ),
        **head_cases(tokens),
        **table_cases(tokens),
    }
    print(
        f"{tokens:,} tokens, {WIDTH} x {MLP_WIDTH}, {jax.devices()[0].device_kind}, JAX"
        f" {jax.__version__}; ms, medians"
    )
    for name, (kernel, reference, arrays) in cases.items():
        calls = [
            partial(jax.jit(each, compiler_options=options_for("gpu")), *arrays)
            for each in (kernel, reference)
        ]
        spent: list[list[float]] = [[], []]
        try:
            for _ in range(rounds):
                for call, times in zip(calls, spent, strict=True):
                    jax.block_until_ready(call())
                    _, seconds = timed(
                        lambda call=call: jax.block_until_ready([call() for _ in range(10)])
                    )
                    times.append(1e3 * seconds / 10)
        except (BadInput, jax.errors.JaxRuntimeError) as error:  # the others are timed all the same
            print(f"{name:<20}failed: {type_and_line(error)}")
            continue
        ours, theirs = map(statistics.median, spent)
        print(f"{name:<20}{ours:8.3f} kernel {theirs:8.3f} XLA   ratio {ours / theirs:.2f}")


def head_cases(
    tokens: int,
) -> dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[jax.Array, ...]]]:
    """QK-norm with rotary, XSA and a pointer, each with its gradients: kernel,
    reference, arrays."""

    def drawn(number: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(number), (1, tokens, *shape), jnp.bfloat16)

    width = WIDTH // HEADS
    angles, positions = frequencies(width // 4), jnp.arange(tokens)[:, None]
    angle = positions[..., None] * jnp.asarray(angles, jnp.float32)
    rest = jnp.cos(angle), jnp.sin(angle), jnp.ones(1), None, HEADS
    plain = (1, tokens, HEADS, width), angles, positions
    documents = find_documents(jnp.minimum(jnp.arange(tokens) % DOCUMENT, 1)[None], 0)
    rotate = [
        with_gradients(lambda y, call=call, arguments=arguments: call(y, *arguments))
        for call, arguments in ((norm_and_rotate, rest), (queries_and_keys, plain))
    ]
    xsa = [with_gradients(partial(without_own_value, kernel=k)) for k in (own_value.KERNEL, None)]
    words = jnp.asarray(zipf_ids(np.random.default_rng(6), 50_257, (1, tokens + 1)), jnp.int32)

    def copied(
        kernel: Kernel | None, q: jax.Array, k: jax.Array, none: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        of_tokens = words[:, :-1], words[:, 1:], documents
        return pointer.copies(q, k, none, *of_tokens, 2048, kernel)

    kernels = pointer_attention.KERNEL, None
    copy = [with_gradients(partial(copied, kernel)) for kernel in kernels]
    heads = *(drawn(n, HEADS, width) for n in range(3)), *(drawn(n, HEADS) for n in (3, 4))
    return {
        "QK-norm, rotary": (rotate[0], rotate[1], (drawn(5, 2 * WIDTH),)),
        "XSA": (xsa[0], xsa[1], heads[1:]),
        "pointer": (
            copy[0],
            copy[1],
            (drawn(7, width) / 10, drawn(8, width), drawn(9, width)[0, 0]),
        ),
    }


def table_cases(
    tokens: int,
) -> dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[jax.Array, ...]]]:
    """A norm beside a residual stream, with its gradients, and sums of the gradients of equal
    n-grams."""
    x, rows = (
        jax.random.normal(jax.random.key(n), (1, n * tokens, WIDTH), jnp.bfloat16) for n in (1, 2)
    )
    kernels = custom_kernel("gradient of a norm").kernel, None
    norms = [
        with_gradients(partial(add_normed, lambda a, _: [(1, a)], kernel=kernel))
        for kernel in kernels
    ]
    # Two n-grams a token, as frequent as words.
    sums_N = jnp.asarray(zipf_ids(np.random.default_rng(3), tokens, (2 * tokens,)), jnp.int32)
    starts = jnp.searchsorted(jnp.sort(sums_N), jnp.arange(tokens + 1)).astype(jnp.int32)

    def scattered(rows_ND: jax.Array, order_N: jax.Array, starts_S1: jax.Array) -> jax.Array:
        sums_SD = (
            jnp.zeros((tokens, WIDTH), jnp.float32).at[sums_N].add(rows_ND.astype(jnp.float32))
        )
        return sums_SD.astype(rows_ND.dtype)

    return {
        "norm and residual": (norms[0], norms[1], (x, jnp.float32(1.1))),
        "sums of rows": (
            sum_rows,
            scattered,
            (rows[0], jnp.argsort(sums_N).astype(jnp.int32), starts),
        ),
    }


def with_gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what computes ``run`` and its gradients, of ones."""

    def both(*arrays: jax.Array) -> Any:
        out, back = jax.vjp(run, *arrays)
        return out, back(jax.tree.map(jnp.ones_like, out))

    return both
