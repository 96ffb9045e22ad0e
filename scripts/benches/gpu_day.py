"""What a first hour on a GPU should find out, in parts of at most ten minutes; ``scripts/gpu_day.sh`` calls it.

Every result is one line of JSON, on disk before the next begins, the cheapest and most decisive first. A part that was
stopped goes on where it was; what killed its process is not tried again. ``table`` prints predicted beside measured.
"""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benches import steps
from jspeed import accelerators
from jspeed.errors import BadInput, first_line, run_script
from jspeed.jax_versions import loaded_cudnn
from jspeed.model import fp8
from jspeed.model.attention import attention, find_documents
from jspeed.parallel.mesh import make_mesh
from jspeed.plan import predict
from jspeed.plan.cost import kernels
from jspeed.plan.custom_calls.attention import TILE
from jspeed.plan.target import Facts, facts_of, load_facts, parse_target
from jspeed.recipe import Stage
from jspeed.run.compute import preflight_checks
from jspeed.run.compute.compile_cache import use_compile_cache
from jspeed.run.compute.compiler import FP8_CALL, custom_calls, memory_needed, options_for
from jspeed.run.evidence import provenance
from jspeed.run.find_recipe import find
from jspeed.sizes import scored_shape

TOY = os.environ.get("GPU_DAY") == "toy"  # the same parts on a CPU, in a minute
SECONDS = float(os.environ.get("PART_SECONDS", 540))  # a part begins nothing after these
LATER = 75  # exit code: run the part again, it has more to do (EX_TEMPFAIL)
PUBLISHED_LANE_MS = {"r89": 82.6}  # of record 89's last stage on 8 H100s, communication included
STAGES = {"r29": ["LANES=1"], "r89": ["LANES=1"]}  # one GPU as one of eight


class Later(Exception):
    """The part's time is over."""


class Day:
    """The results so far, by name, in ``results.jsonl`` of each of ``folders``; the first is read."""

    def __init__(self, *folders: Path) -> None:
        self.files = [folder / "results.jsonl" for folder in folders]
        self.began = time.monotonic()
        self.known: dict[str, dict[str, Any]] = {}
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        if self.files[0].exists():
            for line in self.files[0].read_text().splitlines():
                one = json.loads(line)
                self.known[one["name"]] = self.known.get(one["name"], {}) | one

    def write(self, name: str, **facts: Any) -> None:
        """Keep a result and print it."""
        line = json.dumps({"name": name, **facts}, default=str)
        self.known[name] = self.known.get(name, {}) | json.loads(line)
        for path in self.files:
            with path.open("a") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        if "began" not in facts:
            print(line[:600], flush=True)

    def result(self, name: str, call: Callable[[], Mapping[str, Any]]) -> None:
        """Find a result out unless it is known. Raises :class:`Later` when the part's time is over."""
        before = self.known.get(name, {})
        if "seconds" in before:
            return
        if "began" in before:  # and nothing else: it took the process with it
            self.write(name, seconds=0.0, failed="the process did not survive it, or was stopped")
            return
        if time.monotonic() - self.began > SECONDS:
            raise Later
        self.write(name, began=True)
        began = time.monotonic()
        try:
            facts: Mapping[str, Any] = call()
        except Exception as error:  # whatever a library raises is the result
            facts = {"failed": f"{type(error).__name__}: {first_line(error)}"}
        gc.collect()
        self.write(name, seconds=round(time.monotonic() - began, 1), **facts)


def main(part: str, *folders: str) -> int:
    """Run a part, or print the table; returns an exit code."""
    day = Day(*map(Path, folders))
    if part == "table":
        print("\n".join(table(day.known)))
        return 0
    if not TOY and not accelerators.find().gpus:
        raise BadInput("there is no NVIDIA GPU in /dev; GPU_DAY=toy tries the parts on a CPU")
    try:
        PARTS[part](day)
    except Later:
        print(f"{part}: time is over, run it again for the rest", flush=True)
        return LATER
    return 0


def probe(day: Day) -> None:
    """Versions, what the preflight says of each kernel, attention, FP8 and scatters at the records' shapes."""
    use_compile_cache()
    day.result("environment", environment)
    backends = ("xla",) if TOY else ("cudnn", "cudnn_lanes", "triton", "xla")
    for backend in backends:
        for packed, bounded in ((True, True), (True, False), (False, False)):
            if not bounded or backend in ("cudnn", "xla"):
                name = f"preflight {backend}, " + ("longest document" if bounded else "packed" if packed else "causal")
                check = partial(preflight_checks.attention_error, backend, 128, packed, bounded)
                day.result(name, partial(wrong, check))
    day.result("preflight FP8", partial(wrong, preflight_checks.fp8_error))
    day.result("preflight own kernels", partial(wrong, preflight_checks.own_kernels_error))
    for kind in (None, fp8.Scales(768**0.5 / 448, 2**-9, 1 / 448)):
        for triton in (False, True):
            name = f"head {'FP8' if kind else 'bf16'}, Triton's matmuls {'on' if triton else 'off'}"
            day.result(name, partial(head, kind, triton))
    for name in STAGES:
        kept: dict[str, list[np.ndarray]] = {}
        for backend in backends:
            day.result(f"attention {backend} as {name}", partial(attend, backend, name, kept))
    day.result("scatter-add", scatter_add)


def stages(day: Day) -> None:
    """Step times of record 29's and 89's last stages, as one of eight GPUs runs them."""
    for name, sets in STAGES.items():
        day.result(f"stage {name}", partial(stage, name, sets))
    one = partial(stage, "r29", STAGES["r29"])
    day.result("stage r29, Triton's matmuls on", partial(one, "--xla_gpu_enable_triton_gemm=true"))
    day.result("stage r29, no CUDA graphs", partial(one, "--xla_gpu_enable_command_buffer="))
    day.result("stage r29, attention triton", partial(one, attention="xla" if TOY else "triton"))


def own(day: Day) -> None:
    """jspeed2's last stage without and with jspeed's own kernels."""
    for word in ("off", "off" if TOY else "on"):
        sets = ["LANES=1", f"OWN_KERNELS={word}"]
        day.result(f"stage jspeed2, own kernels {word}", partial(stage, "jspeed2", sets))


def product(day: Day) -> None:
    """Runs as a user makes them: the default, then record 29 for 40 steps with evaluation and a checkpoint."""
    folder = day.files[0].parent
    steps_ = 6 if TOY else 250
    sets = ["--set", "WIDTH=32", "LAYERS=2", "HEADS=2", "MLP_WIDTH=64"] if TOY else []
    day.result("run stdlib", partial(run, folder / "stdlib", "stdlib", "--steps", steps_, *sets))
    shards = folder / "tokens"
    day.result("tokens", partial(tokens, shards))
    wanted = sets_of("r29", ["LANES=1"])
    flags = ("--data", shards, "--steps", 4 if TOY else 40, "--checkpoint-every", 2 if TOY else 20, "--set", *wanted)
    day.result("run r29", partial(run, folder / "r29", "r29", *flags))


PARTS = {"probe": probe, "stages": stages, "own": own, "product": product}


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
    facts = facts_of(first.device_kind)
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": first.device_kind,
        "count": len(jax.devices()),
        "planned_as": facts is not None,
        "memory_GB": stats.get("bytes_limit", 0) / 1e9,
        "cudnn": loaded_cudnn(),
        "versions": provenance.versions(),
        "gpus": provenance.gpus(),
        "xla_flags": provenance.xla_flags(),
    }


def wrong(check: Callable[[], str | None]) -> dict[str, Any]:
    """What a check of the preflight says."""
    return {"wrong": check()}


def compiled(function: Callable[..., Any], arrays: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Compile as steps are, with further XLA ``options``; returns the program and what it needs."""
    began = time.monotonic()
    given = options_for(jax.default_backend())
    program = jax.jit(function).lower(*arrays).compile(compiler_options=given and given | options)
    seconds = round(time.monotonic() - began, 1)
    return program, {"compile_seconds": seconds, "need_GB": round(memory_needed(program) / 1e9, 2)}


def milliseconds(program: Callable[..., Any], arrays: Any, calls: int = 10) -> float:
    """Milliseconds of a call, of several in a row after two to warm up."""
    for _ in range(2):
        jax.block_until_ready(program(*arrays))
    began = time.perf_counter()
    for _ in range(calls):
        out = program(*arrays)
    jax.block_until_ready(out)
    return round(1e3 * (time.perf_counter() - began) / calls, 4)


def attend(backend: str, name: str, kept: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """Attention of a lane of the last stage, forward and backward; off by how much from the first backend's."""
    found = loaded(name)
    recipe, heads = found.recipe, found.fields["HEADS"]
    last, width = recipe.stages[-1], recipe.attention_width // heads
    lane = steps.synthetic(dataclasses.replace(recipe, lanes=1), last)[:, :-1]
    draw = np.random.default_rng(1)
    shape = (1, last.lane_len, heads, width)
    q, k, v, g = (jnp.asarray(draw.normal(size=shape), jnp.bfloat16) for _ in range(4))
    window = max(last.windows)

    def forward(lane: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        documents = find_documents(lane, recipe.data.bos_id, last.max_docs, last.max_doc_len)
        return attention(q, k, v, scale=0.12, documents=documents, window=window, backend=backend)

    def both(lane: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        out, back = jax.vjp(partial(forward, lane), q, k, v)
        return out, *back(g)

    arrays = [jnp.asarray(lane), q, k, v]
    only, _ = compiled(forward, arrays)
    program, facts = compiled(both, [*arrays, g])
    kept[backend] = [np.asarray(x, np.float64) for x in jax.device_get(program(*arrays, g))]
    first = next(iter(kept))
    off = [preflight_checks.relative_rms_error(x, y) for x, y in zip(kept[backend], kept[first], strict=True)]
    return facts | {
        "shape": shape, "documents": last.max_docs, "longest": last.max_doc_len, "window": window,
        "forward_ms": milliseconds(only, arrays), "both_ms": milliseconds(program, [*arrays, g]),
        f"off_from_{first}": [round(one, 6) for one in off],
    }  # fmt: skip


def head(scales: fp8.Scales | None, triton: bool) -> dict[str, Any]:
    """Record 29's head, forward and backward: its time, and whether the program multiplies in FP8."""
    recipe = loaded("r29").recipe
    vocabulary, width = scored_shape(recipe.parameters["head"], recipe.stages[-1])
    rows = recipe.stages[-1].lane_len
    shapes = [(rows, width), (vocabulary, width), (rows, vocabulary)]
    arrays = [0.1 * jax.random.normal(jax.random.key(n), s, jnp.bfloat16) for n, s in enumerate(shapes)]

    def call(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, back = jax.vjp(lambda x, w: fp8.matmul(x, w, scales) if scales else x @ w.T, x, w)
        return y, *back(g)

    program, facts = compiled(call, arrays, xla_gpu_enable_triton_gemm=triton)
    calls = custom_calls(program)
    return facts | {"both_ms": milliseconds(program, arrays, 5), "fp8_calls": calls[FP8_CALL], "calls": calls}


def scatter_add() -> dict[str, Any]:
    """The embedding's gradient in rows, and single fp32 numbers by index (slow in jaxlib 0.10.2 to 0.11.0)."""
    recipe = loaded("r29").recipe
    vocabulary, width = recipe.parameters["embed"].shape
    draw = np.random.default_rng(0).zipf(1.3, recipe.stages[-1].lane_len)
    at = jnp.asarray(np.minimum(draw, vocabulary) - 1, jnp.int32)
    g = jnp.ones((len(draw), width), jnp.float32)
    rows, _ = compiled(lambda at, g: jnp.zeros((vocabulary, width), jnp.float32).at[at].add(g), [at, g])
    single, _ = compiled(lambda at, g: jnp.zeros(vocabulary, jnp.float32).at[at].add(g[:, 0]), [at, g])
    return {"rows_ms": milliseconds(rows, [at, g]), "single_ms": milliseconds(single, [at, g])}


def stage(name: str, sets: list[str], flags: str = "", attention: str = "") -> dict[str, Any]:
    """What :func:`stage_here` returns in a process of its own, with further XLA ``flags`` and all of the memory."""
    words = [sys.executable, "-m", "benches.gpu_day", "stage", name, attention or "-", *sets]
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=SECONDS)
    if done.returncode:
        return {"failed": (done.stderr.strip() or str(done.returncode)).splitlines()[-1][:500]}
    return json.loads(done.stdout.splitlines()[-1])


def stage_here(name: str, attention: str, sets: list[str]) -> dict[str, Any]:
    """Time the last stage of a recipe on one GPU; the time of its kernels by family, predicted beside measured."""
    use_compile_cache()
    found = loaded(name, sets)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    backend = None if attention == "-" else attention
    setting = steps.Setting(mesh, backend or ("xla" if TOY else None), None, 3 if TOY else 20, None)
    row, texts, _ = steps.measure_stage(found.recipe, found.hash, len(found.recipe.stages) - 1, setting)
    facts = dataclasses.asdict(row)
    profile = facts.pop("profile")
    facts |= {
        "fp8_calls": texts[-1].count(f'"{FP8_CALL}"'),
        "published_lane_ms": PUBLISHED_LANE_MS.get(name),
        "predicted_ms": predicted(texts, found.recipe.stages[-1]),
        "measured_ms": None,
    }
    if isinstance(profile, str):
        return facts | {"no_profile": profile}
    measured = by_family(profile["by_operation"], texts)
    measured["idle"] = row.step_ms_in_a_row - profile["busy_ms"] / len(texts)
    return facts | {"measured_ms": measured, "longest_kernels": profile["kernels"]}


def predicted(texts: list[str], last: Stage) -> dict[str, float]:
    """Milliseconds of a step by family of kernels, as ``jspeed plan`` counts them in this program; idle: launches."""
    kind = jax.devices()[0].device_kind
    facts: Facts = facts_of(kind) or load_facts("h100")
    target = parse_target("h200x1" if "H200" in kind else "h100x1")
    found: defaultdict[str, float] = defaultdict(float)
    for text in texts:
        listed = kernels(text, last.max_doc_len)
        for kernel in listed:
            if not kernel.collective:
                found[kernel.kind] += 1e3 * kernel.times * max(predict.kernel_seconds(kernel, facts)) / len(texts)
        times, _ = predict.times(listed, target)
        found["idle"] += 1e3 * times.launches / len(texts)
        found["empty blocks, in attention"] += 1e3 * times.empty_blocks / len(texts)
    return found


def by_family(operations: Mapping[str, float], texts: list[str]) -> dict[str, float]:
    """Milliseconds of a step by family of kernels, from those by HLO instruction; what belongs to none is unknown."""
    families = {kernel.instruction.name: kernel.kind for text in texts for kernel in kernels(text)}
    found: defaultdict[str, float] = defaultdict(float)
    for name, spent in operations.items():
        found[families.get(name.lstrip("%"), "unknown")] += spent / len(texts)
    return found


def tokens(folder: Path) -> dict[str, Any]:
    """Write shards of random tokens in documents as long as FineWeb's: 12 million, the validation set among them."""
    recipe = loaded("r29").recipe
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"train": 40_000, "val": 4_000} if TOY else {"train": 12_000_000, "val": 1_000_000}
    for number, (split, size) in enumerate(sizes.items()):
        lane = dataclasses.replace(recipe.stages[-1], lane_len=size, max_docs=size)
        row = steps.synthetic(dataclasses.replace(recipe, lanes=1), lane, seed=number)[0, :size]
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, len(row)
        (folder / f"gpu_{split}_000000.bin").write_bytes(header.tobytes() + row.astype(np.uint16).tobytes())
    return {"folder": str(folder), **sizes}


def run(folder: Path, recipe: str, *flags: object) -> dict[str, Any]:
    """Make a run in a process of its own; what its run.json says."""
    words = ["-m", "jspeed", "run", recipe, "--run-dir", folder, "--no-progress", "--no-sample", *flags]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode > 1:
        return {"failed": (done.stderr.strip() or str(done.returncode)).splitlines()[-1][:500]}
    made = json.loads((folder / "run.json").read_text())
    names = (
        "status",
        "steps",
        "val_loss",
        "timed_seconds",
        "compile_seconds",
        "wall_seconds",
        "kernels",
        "micro_batch",
    )
    checks = {name: probe_["passed"] for name, probe_ in made["probes"].items()}
    return {name: made.get(name) for name in names} | {"probes": checks, "ledger": made["ledger"]}


def empty_block_us(known: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    """Microseconds of an SM for an empty block: the difference of attention by lanes and by rows, over that of blocks.

    Forward has one kernel with such blocks, backward three (:func:`jspeed.plan.custom_calls.attention.empty_blocks`).
    """
    rows, lanes = (known.get(f"attention {backend} as {name}", {}) for backend in ("cudnn", "cudnn_lanes"))
    if "both_ms" not in rows or "both_ms" not in lanes:
        return None
    _, length, heads, _ = rows["shape"]
    slots = rows["documents"]
    fewer = 4 * heads * slots * (-(-length // TILE) - -(-rows["longest"] // TILE))
    return 1e3 * (lanes["both_ms"] - rows["both_ms"]) * CORES / fewer


CORES = 132  # of an H100 or H200


def table(known: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The results as lines of Markdown: what failed, predicted beside measured by family, attention, FP8."""
    there = known.get("environment", {})
    versions = there.get("versions", {})
    lines = [f"{there.get('device')}, jax {versions.get('jax')}, cuDNN {there.get('cudnn')}, {there.get('date')}", ""]
    for name, one in known.items():
        wrong = one.get("failed") or one.get("wrong")
        if wrong or "seconds" not in one:
            lines.append(f"- {name}: {wrong or 'not finished'}")
    for name, one in known.items():
        if not name.startswith("stage ") or "predicted_ms" not in one:
            continue
        found, measured = one["predicted_ms"], one["measured_ms"] or {}
        lines += ["", f"**{name}**: {one['step_ms_in_a_row']:.2f} ms a step, {one['memory_needed'] / 1e9:.1f} GB, "
                  f"{one['fp8_calls']} FP8 calls, attention {one['attention']}"]  # fmt: skip
        lines += ["", "| family | predicted ms | measured ms | ratio |", "|---|---|---|---|"]
        for family in sorted(found | measured, key=lambda family: -found.get(family, 0.0)):
            ms, seen = found.get(family, 0.0), measured.get(family)
            ratio = f"{seen / ms:.2f}" if seen is not None and ms else ""
            lines.append(f"| {family} | {ms:.2f} | {'' if seen is None else f'{seen:.2f}'} | {ratio} |")
    rows = [(name, one) for name, one in known.items() if "both_ms" in one]
    if rows:
        lines += ["", "| what | forward ms | forward and backward ms | GB | FP8 calls |", "|---|---|---|---|---|"]
    for name, one in rows:
        lines.append(f"| {name} | {one.get('forward_ms', '')} | {one['both_ms']} | {one['need_GB']} | "
                     f"{one.get('fp8_calls', '')} |")  # fmt: skip
    for name in STAGES:
        if (found := empty_block_us(known, name)) is not None:
            lines.append(f"\nempty blocks as {name}: {found:.3f} us of an SM, planned {1e6 * predict.EMPTY_BLOCK:.3f}")
    for name, one in known.items():
        if name.startswith("run ") and "status" in one:
            lines.append(f"\n{name}: {one['status']} after {one['steps']} steps, {one['timed_seconds']:.1f} s timed, "
                         f"{one['compile_seconds']:.0f} s of compilation, loss {one['val_loss']}")  # fmt: skip
    return lines


if __name__ == "__main__":
    if sys.argv[1] == "stage":
        print(json.dumps(stage_here(sys.argv[2], sys.argv[3], sys.argv[4:]), default=str))
    else:
        run_script(lambda: main(*sys.argv[1:]))
