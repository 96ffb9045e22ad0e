"""The preflight's checks: small computations on a device, compared with a reference.

Each returns None or a message, and raises what the device raises.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspeed.base.compiler import options_for
from jspeed.model import fp8
from jspeed.model.attention import attention, find_documents, tags
from jspeed.model.custom_kernels import Run, Sizes, custom_kernel
from jspeed.parallel.mesh import put

LENGTH = 1280  # tokens of the example: cuDNN 9.14.0 is wrong for more than 1,024 keys
WINDOW = 300
# where documents of the first lane start; the second lane is one document
BORDERS = (1, 100, 101, 700)
HEADS = 2
FP8_SHAPE = (256, 384, 512)  # rows, columns, contracted
LIMIT = 0.008
"""Root mean square error relative to what is expected. Rounding to bf16 makes 0.002 to 0.003 of it
(seen with ``xla`` on a CPU) and a result that is 1 % off at least 0.01."""
FP8_LIMIT = 0.02
"""Of a kernel that rounds to FP8, where a sum in another order may fall to the next number; 1 % off
makes 0.03."""
KERNEL_SIZES = Sizes(tokens=1024, width=256, mlp_width=512, heads=2)


def on_first_device(run: Run, arrays: Any) -> Any:
    """Return what ``run`` computes of ``arrays`` on a device of this process, compiled as steps
    are; on the host."""
    device = jax.local_devices()[0]
    return jax.device_get(
        jax.jit(run, compiler_options=options_for(device.platform))(*jax.device_put(arrays, device))
    )


def relative_rms_error(found: Any, expected: np.ndarray) -> float:
    """Root mean square error relative to the root mean square of what is expected; NaN if anything
    is."""
    found = np.asarray(found, np.float64)
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def first_mismatch(
    names: Sequence[str], found: Sequence[Any], expected: Sequence[np.ndarray], limit: float = LIMIT
) -> str | None:
    """Return a message on the first array that is off by more than ``limit``, or None."""
    for name, one, wanted in zip(names, found, expected, strict=True):
        off = relative_rms_error(one, wanted)
        if np.isnan(off):
            return f"{name} is not a number somewhere"
        if off > limit:
            return f"{name} is off by {off:.2%} where rounding explains less than {limit:.1%}"
    return None


def attention_error(
    backend: str, width: int, packed: bool, bounded: bool = False, doc_tagged: bool = False
) -> str | None:
    """Compare output and gradients of ``backend``, bf16 and ``width`` a head, with float64; return
    what is wrong.

    ``packed`` lanes have documents and a window; else attention is causal. ``bounded`` lanes are
    half as long again, of documents that ``backend`` is told to be at most LENGTH. ``doc_tagged``
    heads have documents in their second half. Both have gradients of near keys alone, as a recipe
    may. Raises what the backend raises.
    """
    tokens = np.zeros((2, LENGTH * 3 // 2 if bounded else LENGTH), np.int32)
    tokens[0, [at for at in BORDERS if at < tokens.shape[1]]] = 1
    if bounded:
        tokens[1, LENGTH // 2 + 10] = 1
    draw = np.random.default_rng(0)
    q, k, v, g = (
        draw.normal(size=(*tokens.shape, HEADS, width)).astype(jnp.bfloat16) for _ in range(4)
    )
    scale, window, half = width**-0.5, WINDOW if packed else None, width // 2
    near = WINDOW // 2 if bounded or doc_tagged else None
    if doc_tagged:
        q[..., half:] = k[..., half:] = 0

    def call(
        tokens: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array
    ) -> tuple[jax.Array, ...]:
        documents = (
            find_documents(tokens, 1, len(BORDERS) + 2, LENGTH if bounded else None)
            if packed
            else None
        )

        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            if doc_tagged and documents:
                q, k = (x.at[..., half:].set(tags(documents, half)[:, :, None]) for x in (q, k))
            call = partial(
                attention, scale=scale, documents=documents, window=window, backend=backend
            )
            return call(q, k, v, doc_tagged=doc_tagged, gradient_window=near)

        out, back = jax.vjp(run, q, k, v)
        return out, *back(g)

    found = on_first_device(call, [tokens, q, k, v, g])
    ids = np.cumsum(tokens, axis=1) if packed else np.zeros_like(tokens)
    expected = attention_in_float64(q, k, v, g, scale, ids, window, near)
    return first_mismatch(("the output", "dq", "dk", "dv"), found, expected)


def attention_in_float64(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    scale: float,
    ids: np.ndarray,
    window: int | None,
    near: int | None = None,
) -> tuple[np.ndarray, ...]:
    """Attention and its gradients by NumPy, all scores at once: (out, dq, dk, dv), each ``[B, T, H,
    K]``. ``near``: the gradients' own window."""
    q, k, v, g = (np.moveaxis(x.astype(np.float64), 1, 2) for x in (q, k, v, g))
    t, s = np.arange(ids.shape[1])[:, None], np.arange(ids.shape[1])[None]
    seen = (s <= t) & (t - s < (window or len(t))) & (ids[:, :, None] == ids[:, None, :])
    scores = np.where(seen[:, None], scale * (q @ np.swapaxes(k, 2, 3)), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp, out = g @ np.swapaxes(v, 2, 3), p @ v
    mean = (dp * p).sum(-1, keepdims=True)
    p = np.where(t - s < (near or len(t)), p, 0)
    ds = scale * p * (dp - mean)
    found = out, ds @ k, np.swapaxes(ds, 2, 3) @ q, np.swapaxes(p, 2, 3) @ g
    return tuple(np.moveaxis(x, 2, 1) for x in found)


def fp8_error() -> str | None:
    """Compare an FP8 matmul and both of its gradients with matmuls of the same FP8 values in
    float64."""
    rows, columns, depth = FP8_SHAPE
    draw = np.random.default_rng(0)
    x, w, g = (
        draw.normal(size=s).astype(jnp.bfloat16)
        for s in ((rows, depth), (columns, depth), (rows, columns))
    )
    scales = fp8.Scales(x=1 / 64, w=1 / 64, grad=1 / 8192)

    def call(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, back = jax.vjp(lambda x, w: fp8.matmul(x, w, scales), x, w)
        return y, *back(g)

    found = on_first_device(call, [x, w, g])
    rounded = zip((x, w, g), scales, (fp8.E4M3, fp8.E4M3, fp8.E5M2), strict=True)
    qx, qw, qg = (scale * _quantised(a, scale, dtype) for a, scale, dtype in rounded)
    return first_mismatch(("the output", "dx", "dw"), found, (qx @ qw.T, qg @ qw, qg.T @ qx))


def _quantised(a: np.ndarray, scale: float, dtype: Any) -> np.ndarray:
    limit = float(jnp.finfo(dtype).max)
    return (
        np.clip(a.astype(np.float32) / np.float32(scale), -limit, limit)
        .astype(dtype)
        .astype(np.float64)
    )


def custom_kernel_error(name: str) -> str | None:
    """Compare all parts of a custom kernel, and their gradients, with the same in plain JAX."""
    for part, (kernel, plain, arrays) in custom_kernel(name).examples(KERNEL_SIZES).items():
        found, expected = (jax.tree.leaves(on_first_device(run, arrays)) for run in (kernel, plain))
        names = [f"{part}, result {number}," for number in range(1, len(found) + 1)]
        limit = FP8_LIMIT if any(one.dtype.itemsize == 1 for one in found) else LIMIT
        wanted = [np.asarray(one, np.float64) for one in expected]
        if wrong := first_mismatch(names, found, wanted, limit):
            return wrong
    return None


def collectives_error(mesh: Mesh) -> str | None:
    """Sum over all devices, whole and cut among them, numbers whose sums are known; return what is
    wrong."""
    axes, size = tuple(mesh.axis_names), mesh.size
    cut = PartitionSpec(axes)

    def on_device(mine: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.psum(mine, axes), jax.lax.psum_scatter(
            mine, axes, scatter_dimension=1, tiled=True
        )

    # Device d has the numbers d + j * size, all of them exact in fp32.
    wide = 128 * size
    given = (np.arange(size)[:, None] + size * np.arange(wide)[None]).astype(np.float32)
    shared = jax.shard_map(
        on_device, mesh=mesh, in_specs=cut, out_specs=(cut, cut), check_vma=False
    )
    reduced, scattered = jax.jit(shared)(put(given, NamedSharding(mesh, cut)))
    wanted = given.astype(np.float64).sum(0)
    for shard in reduced.addressable_shards:
        if not np.allclose(np.asarray(shard.data)[0], wanted, rtol=1e-6):
            return f"the sum of all devices is wrong on {shard.device}"
    for shard in scattered.addressable_shards:
        first = 128 * (shard.index[0].start or 0)
        if not np.allclose(np.asarray(shard.data)[0], wanted[first : first + 128], rtol=1e-6):
            return f"the part of the sum that {shard.device} should have is wrong"
    return None
