"""The rates that ``jspeed plan`` assumes, measured at r92's shapes: matmuls, own kernels,
attention, fusions, and PyTorch's matmuls beside them.

A case is compiled while others are measured, and is measured with the device to itself: bursts,
then a second and a half in a row, in which clocks settle.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benches.gpu_measurements import compiled, turn
from benches.gpu_tasks import TOY
from benches.synthetic import document_starts
from jspeed.fields import Stage
from jspeed.kernels import fp8_cast, fused_mlp, norm_gradient
from jspeed.model import fp8
from jspeed.model.attention import attention, find_documents, tags
from jspeed.model.layers import rms_norm
from jspeed.plan.attention import MATMULS
from jspeed.record.sizes import mean_context
from jspeed.run.clock import now
from jspeed.speedrun.heads import pair_documents

BURSTS, SUSTAINED = 5, 1.5  # number, seconds
# Tokens of the longest stage's lane, channels of the model and its MLP, columns of the head.
N, D, F, C = (512, 64, 128, 256) if TOY else (49_152, 768, 2_816, 14_336)
LARGE = 2**16 if TOY else 2**29  # numbers of a copy: 1 GB each way
LONGEST, SEGMENT, DOCUMENTS = 3_072, 2_560, 128  # r92's; documents attend within segments
NEAR = 257  # keys that jspeed3 computes gradients of
HEADS, WIDTH = (2, 16) if TOY else (6, 128)
WINDOWS = (129, 385, 641, 897, 1_409)  # of r92's stages
BACKENDS = ("xla",) if TOY else ("cudnn", "triton")
BF16, E4M3, E5M2 = jnp.bfloat16, fp8.E4M3, fp8.E5M2
# rows, contracted, columns
MATMULS_OF_R92 = {
    "MLP up": (N, D, F),
    "MLP down": (N, F, D),
    "MLP weights": (D, N, F),
    "projection": (N, D, D),
    "head": (N, D, C),
    "head back": (N, C, D),
}
# Fast accumulation is cuBLASLt's rounding of sums to about 14 bits; HIGHEST asks for fp32.
PRECISIONS = {
    "fast sums": (E4M3, jax.lax.Precision.DEFAULT),
    "fp32 sums": (E5M2, jax.lax.Precision.HIGHEST),
}

Shape = tuple[tuple[int, ...], Any]


class Case(NamedTuple):
    """One program: its arrays, and by which of the plan's rates (``family``) how many FLOPs or
    bytes take time."""

    run: Callable[..., Any]
    arrays: Sequence[Shape]
    family: str
    flops: float = 0.0
    bytes: float = 0.0


def groups() -> dict[str, dict[str, Case]]:
    """All cases by name, in groups that share a process, the most decisive first."""
    found: dict[str, dict[str, Case]] = {
        "copies and fusions": fusions(),
        "FP8 matmuls": dict(fp8_matmuls()),
        "bf16 matmuls": {
            f"bf16 {name}": Case(
                lambda a, b: a @ b.T, [((m, k), BF16), ((n, k), BF16)], "matmul", 2.0 * m * k * n
            )
            for name, (m, k, n) in MATMULS_OF_R92.items()
        },
        "own kernels": own_kernels(),
    }
    return found | {f"attention {name}": dict(attentions(name)) for name in BACKENDS}


def fusions() -> dict[str, Case]:
    """Passes over memory, as XLA fuses them."""
    wide, narrow = ((N, F), BF16), ((N, D), BF16)
    moment = ((N, D), jnp.float32)

    def adam(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 0.001 * m / (jnp.sqrt(v) + 1e-8), m, v

    def passes(run: Callable[..., Any], *arrays: Shape, factor: float) -> Case:
        read = sum(np.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in arrays)
        return Case(run, list(arrays), "memory", bytes=float(read * factor))

    return {
        "copy": passes(lambda x: -x, ((LARGE,), BF16), factor=2),
        "sums of rows": passes(lambda x: x.astype(jnp.float32).sum(0), wide, factor=1),
        "transposing cast": passes(lambda x: x.T.astype(E4M3), wide, factor=1.5),
        "norm": passes(rms_norm, narrow, factor=2),
        "Adam": passes(adam, *[moment] * 4, factor=1.75),
    }


def fp8_matmuls() -> Iterator[tuple[str, Case]]:
    """Yield each matmul in FP8 with each kind of sum."""
    for name, (m, k, n) in MATMULS_OF_R92.items():
        for sums, (kind, precision) in PRECISIONS.items():
            arrays = [((m, k), kind), ((n, k), E4M3)]

            def run(a: jax.Array, b: jax.Array, precision: Any = precision) -> jax.Array:
                return fp8.dot(a, b, (1, 1), (0.5, 0.25), BF16, precision)

            yield f"FP8 {name}, {sums}", Case(run, arrays, "fp8_matmul", 2.0 * m * k * n)


def own_kernels() -> dict[str, Case]:
    """Own kernels of an MLP in FP8 and what stands beside it."""
    scales, flops = lambda n: ((n,), jnp.float32), 2.0 * N * D * F
    rows, up, wide = (((N, D), E4M3), ((F, D), E4M3), ((N, F), E4M3))
    gradient, one = ((N, D), E5M2), ((), jnp.float32)
    narrow = ((N, D), BF16)
    return {
        "own MLP, forward": Case(
            fused_mlp.squared_relu_matmul_fp8, [rows, up, scales(2)], "fp8_matmul", flops
        ),
        "own MLP, gradient": Case(
            fused_mlp.squared_relu_gradient_fp8,
            [gradient, up, wide, scales(3)],
            "fp8_matmul",
            flops,
        ),
        "own FP8 cast": Case(
            partial(fp8_cast.cast, dtype=E5M2), [narrow, one], "memory", bytes=4.0 * N * D
        ),
        "own norm gradient": Case(
            norm_gradient.norm_gradient,
            [*[narrow] * 3, ((N,), jnp.float32), one],
            "memory",
            bytes=8.0 * N * D,
        ),
    }


def attentions(backend: str) -> Iterator[tuple[str, Case]]:
    """Yield attention of r92's lane at each window, forward alone and with all gradients; with
    cuDNN also what jspeed3 has: gradients of near keys, and pairs of heads with documents as
    channels."""
    flops = partial(attention_flops, HEADS)
    lane, shape = ((1, N), jnp.int32), ((1, N, HEADS, WIDTH), BF16)
    for window in WINDOWS:
        run = partial(attend, backend, window, None, False)
        forward, backward = (flops(window, n) for n in MATMULS.values())
        name = f"attention {backend}, window {window}"
        yield f"{name}, forward", Case(run, [lane, *[shape] * 3], "attention_forward", forward)
        both = partial(with_gradients, run)
        yield (
            f"{name}, both",
            Case(both, [lane, *[shape] * 4], "attention_backward", forward + backward),
        )
    if backend == "cudnn":
        run = partial(attend, backend, 1_409, NEAR, False)
        both = partial(with_gradients, run)
        near = Case(both, [lane, *[shape] * 4], "", 0.0)
        yield f"attention {backend}, window 1409, gradients of {NEAR}, both", near
        pairs = ((1, 2 * N, HEADS // 2, WIDTH), BF16)
        both = partial(with_gradients, partial(attend, backend, 641, NEAR, True))
        yield (
            f"attention {backend}, pairs, window 641, both",
            Case(both, [lane, *[pairs] * 4], "", 0.0),
        )


def attention_flops(heads: int, window: int, matmuls: int) -> float:
    """FLOPs as the plan counts them: keys that mask, window and longest document leave."""
    keys = mean_context(Stage(1, N, max_doc_len=LONGEST), min(window, N))
    return 2.0 * matmuls * heads * N * keys * WIDTH


def attend(
    backend: str,
    window: int,
    near: int | None,
    paired: bool,
    lane: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> jax.Array:
    """Attention within a lane's documents; ``paired``: of pairs, with documents as channels."""
    documents = find_documents(lane, 0, DOCUMENTS, LONGEST, SEGMENT)
    if paired:
        documents = pair_documents(documents)
        half = WIDTH // 2
        tag = tags(documents, half)[:, :, None]
        q, k = (x.at[..., half:].set(tag) for x in (q, k))
    return attention(
        q,
        k,
        v,
        scale=0.13,
        documents=documents,
        window=min(window, N),
        backend=backend,
        doc_tagged=paired,
        gradient_window=near,
    )


def lane_of_documents() -> jax.Array:
    """A lane ``[1, N]`` that is 0 where a document starts, an array of the program: a constant
    would be folded by XLA, for ten seconds."""
    lane = np.ones((1, N), np.int32)
    lane[0, document_starts(np.random.default_rng(0), N, LONGEST)[:DOCUMENTS]] = 0
    return jnp.asarray(lane)


def with_gradients(
    run: Callable[..., jax.Array], lane: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """What ``run`` computes of all arrays but the last, and the gradients to it."""
    out, back = jax.vjp(partial(run, lane), *arrays[:-1])
    return out, *back(arrays[-1])


def measure(case: Case) -> dict[str, Any]:
    """Compile a case and time it."""
    arrays = [
        lane_of_documents() if dtype == jnp.int32 else drawn(n, shape, dtype)
        for n, (shape, dtype) in enumerate(case.arrays)
    ]
    program, facts = compiled(case.run, arrays)
    said = {"family": case.family, "flops": case.flops, "bytes": case.bytes}
    return facts | said | timed(partial(program, *arrays), jax.block_until_ready)


@partial(jax.jit, static_argnums=(0, 1, 2))
def drawn(number: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal numbers of 0.1."""
    return (0.1 * jax.random.normal(jax.random.key(number), shape, jnp.float32)).astype(dtype)


def timed(call: Callable[[], Any], wait: Callable[[Any], Any]) -> dict[str, Any]:
    """Milliseconds of a call, median of bursts of 20, and in a row for SUSTAINED seconds, with the
    device to itself; ``wait`` for what it returns."""

    def burst() -> float:
        began = now()
        for _ in range(20):
            out = call()
        wait(out)
        return 1e3 * (now() - began) / 20

    with turn() as span:
        wait(call())
        bursts = [burst() for _ in range(BURSTS)]
        sustained, began = [], now()
        while now() - began < SUSTAINED:
            sustained.append(burst())
    median, settled = (statistics.median(times) for times in (bursts, sustained))
    return {"ms": round(median, 5), "sustained_ms": round(settled, 5), "span": span}


def in_pytorch(name: str) -> dict[str, Any]:
    """The matmul called ``name`` of :func:`groups` as PyTorch computes it: cuBLAS's, and
    ``_scaled_mm`` (cuBLASLt) in FP8."""
    if not find_spec("torch"):
        return {"skipped": "PyTorch is not installed"}
    import torch

    if not torch.cuda.is_available():
        return {"skipped": "PyTorch has no GPU"}
    shape, _, sums = name.partition(" ")[2].partition(", ")
    m, k, n = MATMULS_OF_R92[shape]
    a, b = (0.1 * torch.randn(size, device="cuda").bfloat16() for size in ((m, k), (n, k)))

    def call() -> Any:
        return a @ b.T

    if sums:
        kind = torch.float8_e4m3fn if sums == "fast sums" else torch.float8_e5m2
        x, w = a.to(kind), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        fast = sums == "fast sums"

        def call() -> Any:  # noqa: F811
            return torch._scaled_mm(x, w.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return {"flops": 2.0 * m * k * n} | timed(call, lambda _: torch.cuda.synchronize())
