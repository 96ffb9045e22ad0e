"""The measurements of a day on a GPU (gpu_day.py): each returns its figures as plain values.

With GPU_DAY=toy recipes have toy size, for a CPU.
"""

import dataclasses
import fcntl
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benches import steps
from benches.gpu_tasks import HAS_THE_DEVICE, TOY
from benches.synthetic import lanes_of, zipf_ids
from jspeed._dataloader import header
from jspeed.base.compile_cache import use_compile_cache
from jspeed.base.compiler import FP8_CALL, custom_calls, memory_needed, options_for
from jspeed.base.jax_versions import loaded_cudnn
from jspeed.kernels.preflight.fall_back import preflight
from jspeed.model import fp8
from jspeed.model.attention import attention, find_documents, tags
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.parallel.mesh import make_mesh
from jspeed.plan.cost import Kernel, kernels
from jspeed.plan.target import data_sheet_of
from jspeed.recipe import Recipe, Stage
from jspeed.record import provenance
from jspeed.record.sizes import scored_shape
from jspeed.run.clock import now, utc_now
from jspeed.run.compute.device import device_of
from jspeed.run.compute.division import place
from jspeed.run.find_recipe import find

STEPS = 100  # timed one by one, and again in a row
HELD: list[Any] = []  # turns until this process ends
TURNS: list[list[float]] = []  # of this process: [when it began, when it ended]
# of the records' steps in STAGES on 8 H100s, communication included
PUBLISHED_MS = {"r89": 82.6, "r92": 45.0}
# The stages that are measured: record 92's with the most tokens, else the last. One GPU as one of
# eight, and an eighth of the n-grams.
STAGES = {"jspeed3": 3, "r92": 3, "r89": -1, "r29": -1}
AS_ONE_OF_EIGHT = {name: ["LANES=1"] for name in STAGES} | dict.fromkeys(
    ("jspeed3", "r92"), ["LANES=1", "NGRAMS=10575360"]
)


@contextmanager
def turn(until_exit: bool = False) -> Iterator[list[float]]:
    """Have the device alone among the processes that share the file TURN, ``until_exit`` of this
    one if only that gives memory back; yields [when it began, when it ended], in seconds of the
    epoch.

    What only a CPU does is done outside of it, so that the device need not wait for compilers.
    """
    file = open(os.environ.get("TURN", os.devnull), "a")
    if file.name != os.devnull:
        fcntl.flock(file, fcntl.LOCK_EX)
    span = [time.time()]
    TURNS.append(span)
    print(HAS_THE_DEVICE, flush=True)
    try:
        yield span
    finally:
        span.append(time.time())
        print("another may have the device", flush=True)
        HELD.append(file) if until_exit else file.close()


def loaded(name: str, sets: Iterable[str] = ()) -> Any:
    """The recipe, at toy size where that was asked for."""
    return find(name, sets_of(name, sets))


def sets_of(name: str, sets: Iterable[str]) -> list[str]:
    """``sets`` and, for a toy, those that shrink the recipe."""
    if not TOY:
        return list(sets)
    from tests.toys import TOYS  # the repository's

    given = {word.partition("=")[0] for word in sets}
    return [word for word in TOYS[name] if word.partition("=")[0] not in given] + list(sets)


def environment() -> dict[str, Any]:
    """Date, device and versions."""
    first = jax.devices()[0]
    stats = first.memory_stats() or {}
    return {
        "date": utc_now()[:10],
        "device_kind": first.device_kind,
        "count": len(jax.devices()),
        "planned_as": data_sheet_of(first.device_kind) is not None,
        "memory_GB": stats.get("bytes_limit", 0) / 1e9,
        "cudnn": loaded_cudnn(),
        "versions": provenance.versions(),
        "gpus": provenance.gpus(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def wrong(check: Callable[[], str | None]) -> dict[str, Any]:
    """What a check of the preflight says."""
    return {"wrong": check()}


def compiled(
    function: Callable[..., Any], arrays: Any, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Compile as steps are, with further XLA ``options``; returns the program and what it needs."""
    began = now()
    given = options_for(jax.default_backend())
    program = jax.jit(function).lower(*arrays).compile(compiler_options=given and given | options)
    seconds = round(now() - began, 1)
    return program, {"compile_seconds": seconds, "need_GB": round(memory_needed(program) / 1e9, 2)}


def milliseconds(program: Callable[..., Any], arrays: Any, calls: int = 10) -> float:
    """Milliseconds of a call, of several in a row after two to warm up."""
    with turn():
        for _ in range(2):
            jax.block_until_ready(program(*arrays))
        began = now()
        for _ in range(calls):
            out = program(*arrays)
        jax.block_until_ready(out)
        return round(1e3 * (now() - began) / calls, 4)


def stage_of(recipe: Recipe) -> Stage:
    """The stage of a recipe that is measured; of a toy, which has fewer, its last."""
    return recipe.stages[min(STAGES[recipe.name], len(recipe.stages) - 1)]


def attend(backends: Iterable[str], name: str, tagged: bool = False) -> dict[str, Any]:
    """Attention of a lane of a recipe's stage, forward and backward, by each of ``backends``; how
    far off the first they are.

    ``tagged`` heads have documents in their second half, as narrow layers of records from 92 on;
    else layers with the longest window. Gradients are those that the recipe computes.
    """
    found = loaded(name)
    recipe, heads = found.recipe, found.fields["HEADS"]
    measured, width = stage_of(recipe), recipe.attention_width // heads
    lane = lanes_of(dataclasses.replace(recipe, lanes=1), measured)[:, :-1]
    draw = np.random.default_rng(1)
    shape = (1, measured.lane_len, heads, width)
    q, k, v, g = (jnp.asarray(draw.normal(size=shape), jnp.bfloat16) for _ in range(4))
    window = min(measured.windows) if tagged else max(measured.windows)
    blocks = found.fields.get("GRADIENT_WINDOWS", {measured.own: 0})[measured.own]
    near = 1 + blocks * found.fields["BLOCK"] if blocks else None

    def forward(
        backend: str, lane: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> jax.Array:
        bounds = measured.max_docs, measured.max_doc_len, found.fields.get("SEGMENT")
        documents = find_documents(lane, recipe.data.bos_id, *bounds)
        if tagged:
            q, k = (
                x.at[..., width // 2 :].set(tags(documents, width // 2)[:, :, None]) for x in (q, k)
            )
        call = partial(
            attention, window=window, backend=backend, doc_tagged=tagged, gradient_window=near
        )
        return call(q, k, v, scale=0.12, documents=documents)

    def both(backend: str, lane: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        out, back = jax.vjp(partial(forward, backend, lane), *arrays[:-1])
        return out, *back(arrays[-1])

    arrays = [jnp.asarray(lane), q, k, v]
    longest = min(measured.max_doc_len, found.fields.get("SEGMENT", measured.max_doc_len))
    facts: dict[str, Any] = {
        "shape": shape, "documents": measured.max_docs, "longest": longest, "window": window,
        "near": near,
    }  # fmt: skip
    first: tuple[jax.Array, ...] | None = None
    for backend in backends:
        only, _ = compiled(partial(forward, backend), arrays)
        program, seen = compiled(partial(both, backend), [*arrays, g])
        out = program(*arrays, g)
        first = first or out
        seen["off"] = [round(relative_error(x, y), 6) for x, y in zip(out, first, strict=True)]
        seen["forward_ms"] = milliseconds(only, arrays)
        seen["both_ms"] = milliseconds(program, [*arrays, g])
        facts[backend] = seen
    return facts


@jax.jit
def _relative_error(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.sqrt(jnp.mean(jnp.square(x - y)) / jnp.mean(jnp.square(y)))


def relative_error(x: jax.Array, y: jax.Array) -> float:
    """Root mean square of the difference relative to ``y``'s, summed in fp32 on the device."""
    return float(_relative_error(x, y))


def head(scales: fp8.Scales | None, triton: bool) -> dict[str, Any]:
    """Record 29's head, forward and backward: its time, and whether the program multiplies in
    FP8."""
    recipe = loaded("r29").recipe
    vocabulary, width = scored_shape(recipe.parameters["head"], recipe.stages[-1])
    rows = recipe.stages[-1].lane_len
    shapes = [(rows, width), (vocabulary, width), (rows, vocabulary)]
    arrays = [
        0.1 * jax.random.normal(jax.random.key(n), s, jnp.bfloat16) for n, s in enumerate(shapes)
    ]

    def call(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, back = jax.vjp(lambda x, w: fp8.matmul(x, w, scales) if scales else x @ w.T, x, w)
        return y, *back(g)

    program, facts = compiled(call, arrays, xla_gpu_enable_triton_gemm=triton)
    calls = custom_calls(program)
    return facts | {
        "both_ms": milliseconds(program, arrays, 5),
        "fp8_calls": calls[FP8_CALL],
        "calls": calls,
    }


def scatter_add() -> dict[str, Any]:
    """The embedding's gradient in rows, and single fp32 numbers by index (slow in jaxlib 0.10.2 to
    0.11.0)."""
    recipe = loaded("r29").recipe
    vocabulary, width = recipe.parameters["embed"].shape
    shape = (recipe.stages[-1].lane_len,)
    at = jnp.asarray(zipf_ids(np.random.default_rng(0), vocabulary, shape), jnp.int32)
    g = jnp.ones((*shape, width), jnp.float32)
    rows, _ = compiled(
        lambda at, g: jnp.zeros((vocabulary, width), jnp.float32).at[at].add(g), [at, g]
    )
    single, _ = compiled(
        lambda at, g: jnp.zeros(vocabulary, jnp.float32).at[at].add(g[:, 0]), [at, g]
    )
    return {"rows_ms": milliseconds(rows, [at, g]), "single_ms": milliseconds(single, [at, g])}


def stage(name: str, attention: str, sets: Iterable[str], tuned: bool = False) -> dict[str, Any]:
    """Time a stage of a recipe on one GPU, with what a run's preflight leaves of its kernels; their
    time by family, predicted beside measured, and the kernels that were predicted.

    What is ``tuned`` compiles with the device to itself, as XLA tries kernels on it. Only the
    process's end gives the device's memory back, so it keeps its turn until then.
    """
    use_compile_cache()
    found = loaded(name, [*AS_ONE_OF_EIGHT[name], *sets])
    recipe, mesh = found.recipe, make_mesh({"data": 1}, jax.devices()[:1])
    measured, backend = stage_of(recipe), None if attention == "-" else attention
    setting = steps.Settings(mesh, backend or ("xla" if TOY else None), None, STEPS, None)
    device = device_of(mesh, setting.attention, recipe=recipe, fields=found.fields)
    placement = place(recipe, mesh, DEFAULT_LAYOUT, device)
    device = preflight(recipe, placement, Console(stderr=True)).device
    index = recipe.stages.index(measured)
    with turn() if tuned else nullcontext():
        made = steps.compile_stage(recipe, index, setting, device, 1 if tuned else 4)
    texts = made.texts
    counted = [kernels(text, measured.max_doc_len) for text in texts]
    facts: dict[str, Any] = {
        "kernels": device.record(),
        "fp8_calls": texts[-1].count(f'"{FP8_CALL}"'),
        "published_ms": PUBLISHED_MS.get(name),
        "counted": summary(counted),
        "measured_ms": None,
    }
    with turn(until_exit=True) as span:
        row, _ = steps.measure_stage(recipe, found.hash, index, setting, made)
    facts |= dataclasses.asdict(row) | {"span": span}
    profile = facts.pop("profile")
    if isinstance(profile, str):
        return facts | {"no_profile": profile}
    seen = by_family(profile["by_operation"], counted, texts)
    seen["idle"] = row.step_ms_in_a_row - profile["busy_ms"] / len(texts)
    return facts | {"measured_ms": seen, "longest_kernels": profile["kernels"]}


def summary(programs: Iterable[Iterable[Kernel]]) -> list[list[Any]]:
    """Kernels of a period's steps as [kind, dtype, FLOPs, bytes, empty blocks, runs in a step],
    equal ones once; collectives, which one GPU has none of, are left out."""
    listed = list(programs)
    runs: Counter[tuple[Any, ...]] = Counter()
    for kernel in (kernel for program in listed for kernel in program if not kernel.collective):
        what = (kernel.kind, kernel.dtype, kernel.flops, kernel.bytes, kernel.empty_blocks)
        runs[what] += kernel.runs
    return [[*what, count / len(listed)] for what, count in runs.items()]


# The family of kernels of libraries by a part of their names, the first that fits: cuBLAS's kernels
# for Hopper begin with the dtypes of their operands, q e4m3 and r e5m2.
LIBRARIES = {
    r"sdpa\w*bprop|sdpa_bwd": "attention_backward",
    "sdpa": "attention_forward",
    "nvjet_sm90_[qr]|e4m3|e5m2": "fp8_matmul",
    "nvjet|cutlass|gemm": "matmul",
    "mosaic": "other",  # Pallas, of the names that it gives to no kernel of a recipe
}


def by_family(
    operations: Mapping[str, Mapping[str, float]],
    programs: Iterable[Iterable[Kernel]],
    texts: list[str],
) -> dict[str, float]:
    """Milliseconds of a step by family of kernels, from those by HLO instruction and kernel, of
    ``programs`` whose HLO is ``texts``.

    XLA names a fusion's kernel after its instruction, with _ for each dot, so that a CUDA graph's
    are known by their own name, as are custom kernels. What is neither nor a library's is unknown.
    """
    families: dict[str, str] = {k.instruction.name: k.kind for each in programs for k in each}
    families |= {name.replace(".", "_"): kind for name, kind in families.items()}

    def family(operation: str, name: str) -> str:
        if known := families.get(operation.lstrip("%")) or families.get(name):
            return known
        if by_name := [kind for part, kind in LIBRARIES.items() if re.search(part, name)]:
            return by_name[0]
        return "other" if any(f'"{name}"' in text for text in texts) else "unknown"

    found: defaultdict[str, float] = defaultdict(float)
    for operation, its in operations.items():
        for name, spent in its.items():
            found[family(operation, name)] += spent / len(texts)
    return found


def tokens(folder: Path) -> dict[str, Any]:
    """Write shards of synthetic tokens (synthetic.py): 12 million, the validation set among
    them."""
    recipe = loaded("r29").recipe
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"train": 40_000, "val": 4_000} if TOY else {"train": 12_000_000, "val": 1_000_000}
    for number, (split, size) in enumerate(sizes.items()):
        lane = dataclasses.replace(recipe.stages[-1], lane_len=size, max_docs=size)
        row = lanes_of(dataclasses.replace(recipe, lanes=1), lane, seed=number)[0, :size]
        (folder / f"gpu_{split}_000000.bin").write_bytes(
            header(len(row)) + row.astype(np.uint16).tobytes()
        )
    return {"folder": str(folder), **sizes}
