"""Check attention, FP8 and collectives against NumPy before the clock; fall back to the next backend where one fails.

A kernel can be refused when its plan is built, or be wrong in one version of a library: both are seen here, on a small
example, and a run goes on with the next backend. What passed is remembered in the cache folder, for one kind of device
and one set of versions; what failed is tried again in every run.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from rich.console import Console

from jspeed.cluster.distributed import everyones
from jspeed.errors import BadInput
from jspeed.files import cache_folder, read_json, write_whole
from jspeed.model import fp8
from jspeed.model.attention import attention, find_documents
from jspeed.model.kernels import attention_backends
from jspeed.model.kernels.attention_backends import Refused
from jspeed.parallel.mesh import put
from jspeed.recipe import Recipe
from jspeed.record.schema import Kernels
from jspeed.run.compute.device import Device, head_width, packs
from jspeed.run.compute.program import Program, compile_program
from jspeed.run.evidence.provenance import installed_version
from jspeed.run.output.console import waiting

LENGTH = 1280  # tokens of the example: cuDNN 9.14.0 is wrong for more than 1,024 keys
WINDOW = 300
BORDERS = (1, 100, 101, 700)  # where documents of the first lane start; the second lane is one document
HEADS = 2
FP8_SHAPE = (256, 384, 512)  # rows, columns, contracted
LIMIT = 0.008
"""Root mean square error relative to what is expected. Rounding to bf16 makes 0.002 to 0.003 of it (seen with ``xla``
on a CPU) and a result that is 1 % off at least 0.01."""


@dataclass(frozen=True)
class Preflight:
    """What was found: ``checks`` are the names of what passed, ``refused`` those of what did not, with the reasons."""

    device: Device
    checks: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def record(self) -> Kernels:
        """What run.json says of it."""
        return {
            "attention": self.device.attention,
            "fp8": self.device.fp8,
            "checked": list(self.checks),
            "refused": list(self.refused),
        }


def preflight(recipe: Recipe, mesh: Mesh, device: Device, fp8_field: str | None, console: Console) -> Preflight:
    """Return what of ``device`` works, in the order of ``device.attention`` and ``device.fallbacks``.

    ``fp8_field`` is the recipe's field FP8, None where it has none. Where there is nothing to choose between (a CPU),
    nothing is checked. All processes must call this and agree. Raises :class:`BadInput` when no backend works, when
    what was asked for (``--attention``, ``FP8=on``) does not, or when the devices add up wrongly.
    """
    wants_fp8 = device.fp8 == "native" and fp8_field in ("auto", "on")
    if device.platform == "cpu" and device.attention == "xla" and not wants_fp8:
        return Preflight(device)
    remembered = Remembered(mesh)
    found = working_attention(recipe, device, remembered)
    device, checks, refused = found.device, [*found.checks], [*found.refused]
    if wants_fp8:
        name = "FP8 matmuls"
        reason = outcome(name, fp8_error, remembered)
        if reason is None:
            checks.append(name)
        elif fp8_field == "on":
            raise BadInput(f"field FP8 is 'on' but FP8 matmuls fail here: {reason}; set FP8=auto or FP8=off")
        else:
            refused.append(f"FP8: {reason}")
            device = replace(device, fp8="missing")
    if mesh.size > 1:
        name = f"all-reduce and reduce-scatter over {mesh.size} devices"
        if reason := outcome(name, partial(collectives_error, mesh)):
            raise BadInput(f"{name}: {reason}; see NCCL_DEBUG=INFO, or use one device (CUDA_VISIBLE_DEVICES=0)")
        checks.append(name)
    if refused:
        fp8_words = "" if not wants_fp8 or device.fp8 == "native" else "; matmuls in the compute dtype instead of FP8"
        console.print(
            f"preflight: {'; '.join(refused)}; attention by {device.attention}{fp8_words}", markup=False, soft_wrap=True
        )
    remembered.write()
    return Preflight(device, tuple(checks), tuple(refused))


def working_attention(recipe: Recipe, device: Device, remembered: "Remembered") -> Preflight:
    """Return ``device`` with the first of its attention backends that computes what it should.

    Raises :class:`BadInput` when none does.
    """
    width = head_width(recipe) or 128
    packed = packs(recipe)
    backends: Sequence[str] = (device.attention, *device.fallbacks)
    refused: list[str] = []
    for used, backend in enumerate(backends, start=1):
        name = f"attention {backend}, {'packed' if packed else 'causal'}, heads of {width}"
        reason = outcome(name, partial(attention_error, backend, width, packed), remembered)
        if reason is None:
            device = replace(device, attention=backend, fallbacks=tuple(backends[used:]))
            return Preflight(device, (name,), tuple(refused))
        refused.append(f"attention {backend}: {reason}")
    what = "--" if device.asked else "no attention backend works on these devices: "
    raise BadInput(
        f"{what}{'; '.join(refused)}; update the driver, JAX or cuDNN, choose another --attention, or give "
        "--no-preflight to run without this check"
    )


def outcome(name: str, check: Callable[[], str | None], remembered: "Remembered | None" = None) -> str | None:
    """Return why ``check`` failed on any process; None where it passed on all, now or in an earlier run."""
    if remembered and all(everyones(f"remembered: {name}", name in remembered.passed)):
        return None
    try:
        reason = check()
    except Exception as error:  # whatever a library raises, its message is the reason
        reason = f"{type(error).__name__}: {_first_line(error)}"
    first = next((text for text in everyones(f"checked: {name}", reason) if text), None)
    if first is None and remembered:
        remembered.passed.add(name)
    return first


class Remembered:
    """What passed in earlier runs on such devices with these versions of driver and libraries."""

    def __init__(self, mesh: Mesh) -> None:
        key = hashlib.sha256(json.dumps(versions(mesh)).encode()).hexdigest()[:16]
        self._path = cache_folder() / "preflight" / f"{key}.json"
        try:
            self._before = set(read_json(self._path))
        except (OSError, ValueError, TypeError):
            self._before = set()
        self.passed = set(self._before)

    def write(self) -> None:
        """Keep what passed; a cache folder that cannot be written is no reason to stop."""
        if self.passed != self._before:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._path, json.dumps(sorted(self.passed)))
            except (OSError, BadInput):
                pass


def versions(mesh: Mesh) -> list[str]:
    """What the outcome depends on: kind of device, driver, packages whose kernels are checked, our calls of them."""
    first = mesh.devices.flat[0]
    driver = Path("/proc/driver/nvidia/version")
    found = [first.device_kind, str(getattr(first.client, "platform_version", ""))]
    found.append(driver.read_text().splitlines()[0] if driver.is_file() else "")
    try:
        from jax._src.lib import cuda_versions  # of the cuDNN that was loaded, which need not be the installed one

        found.append(str(cuda_versions.cudnn_get_version()) if cuda_versions else "")
    except (ImportError, AttributeError, RuntimeError):
        found.append("")
    packages = "jax", "jaxlib", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "fa4-jax"
    ours = (sys.modules[function.__module__] for function in (attention, attention_backends.cudnn, fp8.matmul))
    sources = [inspect.getsource(one) for one in ours]
    # Not imported: a JAX may lack what they import, and only one backend wants each.
    kernels = Path(attention_backends.__file__)
    sources += [kernels.with_name(f"{name}.py").read_text() for name in ("fused_attention", "splash_attention")]
    return found + [installed_version(package) or "" for package in packages] + sources


def distance(found: Any, expected: np.ndarray) -> float:
    """Root mean square error relative to the root mean square of what is expected; NaN if anything is."""
    found = np.asarray(found, np.float64)
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def _worst(names: Sequence[str], found: Sequence[Any], expected: Sequence[np.ndarray]) -> str | None:
    """The first array that is off by more than LIMIT, in words."""
    for name, one, wanted in zip(names, found, expected, strict=True):
        off = distance(one, wanted)
        if np.isnan(off):
            return f"{name} is not a number somewhere"
        if off > LIMIT:
            return f"{name} is off by {off:.2%} where rounding explains less than {LIMIT:.1%}"
    return None


def attention_error(backend: str, width: int, packed: bool) -> str | None:
    """Compare output and gradients of ``backend``, bf16 and ``width`` a head, with float64; return what is wrong.

    ``packed`` lanes have documents and a window; else attention is causal. Raises what the backend raises.
    """
    tokens = np.zeros((2, LENGTH), np.int32)
    tokens[0, [at for at in BORDERS if at < LENGTH]] = 1
    draw = np.random.default_rng(0)
    q, k, v, g = (draw.normal(size=(2, LENGTH, HEADS, width)).astype(jnp.bfloat16) for _ in range(4))
    scale, window = width**-0.5, WINDOW if packed else None

    def call(tokens: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        documents = find_documents(tokens, 1, len(BORDERS) + 2) if packed else None
        run = partial(attention, scale=scale, documents=documents, window=window, backend=backend)
        out, back = jax.vjp(run, q, k, v)
        return out, *back(g)

    placed = jax.device_put([tokens, q, k, v, g], jax.local_devices()[0])
    found = jax.device_get(jax.jit(call)(*placed))
    ids = np.cumsum(tokens, axis=1) if packed else np.zeros_like(tokens)
    return _worst(("the output", "dq", "dk", "dv"), found, attention_in_float64(q, k, v, g, scale, ids, window))


def attention_in_float64(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, scale: float, ids: np.ndarray, window: int | None
) -> tuple[np.ndarray, ...]:
    """Attention and its gradients by NumPy, all scores at once: (out, dq, dk, dv), each ``[B, T, H, K]``."""
    q, k, v, g = (np.moveaxis(x.astype(np.float64), 1, 2) for x in (q, k, v, g))
    t, s = np.arange(ids.shape[1])[:, None], np.arange(ids.shape[1])[None]
    seen = (s <= t) & (t - s < (window or len(t))) & (ids[:, :, None] == ids[:, None, :])
    scores = np.where(seen[:, None], scale * (q @ np.swapaxes(k, 2, 3)), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = g @ np.swapaxes(v, 2, 3)
    ds = scale * p * (dp - (dp * p).sum(-1, keepdims=True))
    found = p @ v, ds @ k, np.swapaxes(ds, 2, 3) @ q, np.swapaxes(p, 2, 3) @ g
    return tuple(np.moveaxis(x, 2, 1) for x in found)


def fp8_error() -> str | None:
    """Compare an FP8 matmul and both of its gradients with products of the same FP8 numbers in float64."""
    rows, columns, depth = FP8_SHAPE
    draw = np.random.default_rng(0)
    x, w, g = (draw.normal(size=s).astype(jnp.bfloat16) for s in ((rows, depth), (columns, depth), (rows, columns)))
    scales = fp8.Scales(x=1 / 64, w=1 / 64, grad=1 / 8192)

    def call(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, back = jax.vjp(lambda x, w: fp8.matmul(x, w, scales), x, w)
        return y, *back(g)

    found = jax.device_get(jax.jit(call)(*jax.device_put([x, w, g], jax.local_devices()[0])))
    rounded = zip((x, w, g), scales, (fp8.E4M3, fp8.E4M3, fp8.E5M2), strict=True)
    qx, qw, qg = (scale * _quantised(a, scale, dtype) for a, scale, dtype in rounded)
    return _worst(("the product", "dx", "dw"), found, (qx @ qw.T, qg @ qw, qg.T @ qx))


def _quantised(a: np.ndarray, scale: float, dtype: Any) -> np.ndarray:
    limit = float(jnp.finfo(dtype).max)
    return np.clip(a.astype(np.float32) / np.float32(scale), -limit, limit).astype(dtype).astype(np.float64)


def collectives_error(mesh: Mesh) -> str | None:
    """Sum over all devices, whole and cut among them, numbers whose sums are known; return what is wrong."""
    axes, size = tuple(mesh.axis_names), mesh.size
    cut = PartitionSpec(axes)

    def on_device(mine: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.psum(mine, axes), jax.lax.psum_scatter(mine, axes, scatter_dimension=1, tiled=True)

    # Device d has the numbers d + j * size, all of them exact in fp32.
    wide = 128 * size
    given = (np.arange(size)[:, None] + size * np.arange(wide)[None]).astype(np.float32)
    shared = jax.shard_map(on_device, mesh=mesh, in_specs=cut, out_specs=(cut, cut), check_vma=False)
    reduced, scattered = jax.jit(shared)(put(given, jax.sharding.NamedSharding(mesh, cut)))
    wanted = given.astype(np.float64).sum(0)
    for shard in reduced.addressable_shards:
        if not np.allclose(np.asarray(shard.data)[0], wanted, rtol=1e-6):
            return f"the sum of all devices is wrong on {shard.device}"
    for shard in scattered.addressable_shards:
        first = 128 * (shard.index[0].start or 0)
        if not np.allclose(np.asarray(shard.data)[0], wanted[first : first + 128], rtol=1e-6):
            return f"the part of the sum that {shard.device} should have is wrong"
    return None


def compile_or_fall_back(
    recipe: Recipe,
    mesh: Mesh,
    layout: str,
    micro_batch: int | None,
    rows: int,
    checked: Preflight,
    console: Console,
) -> tuple[Program, Preflight]:
    """Compile the run's program; an attention backend that is refused at its real shapes makes way for the next one.

    All processes go on with the same backend, and none before all have compiled: whoever runs a collective first waits
    for the others 30 s only, with gloo. Raises :class:`BadInput` for a backend that was asked for, and what
    :func:`compile_program` raises.
    """
    while True:
        device = checked.device
        program, failure, error = None, None, None
        with waiting(console, "compiling"):
            try:
                program = compile_program(recipe, mesh, layout, micro_batch, rows, device)
            except (Refused, jax.errors.JaxRuntimeError) as caught:
                if device.attention == "xla" or "RESOURCE_EXHAUSTED" in str(caught):
                    raise
                error, failure = caught, _first_line(caught)
        reason = next((text for text in everyones(f"compiled with {device.attention}", failure) if text), None)
        if program and reason is None:
            return program, checked
        if not device.fallbacks:
            raise BadInput(
                f"--attention {device.attention}: the step cannot be compiled with it ({reason}); choose another one, "
                "or leave the flag out"
            ) from error
        refused = f"attention {device.attention}: the step cannot be compiled with it ({reason})"
        device = replace(device, attention=device.fallbacks[0], fallbacks=device.fallbacks[1:])
        checked = replace(checked, device=device, refused=(*checked.refused, refused))
        if checked.checks:  # not with --no-preflight
            rest = working_attention(recipe, device, remembered := Remembered(mesh))
            remembered.write()
            others = tuple(name for name in checked.checks if not name.startswith("attention "))
            checked = Preflight(rest.device, rest.checks + others, checked.refused + rest.refused)
        said = "; ".join(checked.refused[checked.refused.index(refused) :])
        console.print(f"{said}; attention by {checked.device.attention}", markup=False, soft_wrap=True)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
