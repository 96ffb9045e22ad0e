"""What a first hour on a GPU should find out, in parts of at most ten minutes;
``scripts/gpu_day.sh`` calls it.

Every result is one line of JSON, on disk before the next begins, the cheapest and most decisive
first. A part that was stopped goes on where it was; what ended its process is tried once more, with
what is compiled already. ``table`` prints predicted beside measured.
"""

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benches import gpu_measurements as measure
from benches.gpu_measurements import TOY, sets_of
from jspeed import accelerators
from jspeed.errors import BadInput, run_script, type_and_line
from jspeed.model import fp8
from jspeed.plan import predict
from jspeed.plan.attention import EMPTY_KERNELS, TILE
from jspeed.plan.target import load_target
from jspeed.recipe import OWN_KERNELS
from jspeed.run.clock import now
from jspeed.run.compute import preflight_checks
from jspeed.run.compute.compile_cache import use_compile_cache

# a part begins nothing after these, and is killed after 600
SECONDS = float(os.environ.get("PART_SECONDS", 540))
TRIES = 2  # what is not done after as many, a kill at the part's end among them, is left
LATER = 75  # exit code: run the part again, it has more to do (EX_TEMPFAIL)

Known = Mapping[str, Mapping[str, Any]]  # results by name


class Later(Exception):
    """The part's time is over."""


class Day:
    """The results so far, by name, in ``results.jsonl`` of each of ``folders``; the first is
    read."""

    def __init__(self, *folders: Path) -> None:
        self.files = [folder / "results.jsonl" for folder in folders]
        self.began = now()
        self.known: dict[str, dict[str, Any]] = {}
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        if self.files[0].exists():
            text = self.files[0].read_text()
            if text and not text.endswith("\n"):
                self.files[0].write_text(text + "\n")
            for line in text.splitlines():
                with suppress(ValueError):  # of a kill in the middle of a line
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
        """Find a result out unless it is known. Raises :class:`Later` when the part's time is
        over."""
        before = self.known.get(name, {})
        if "seconds" in before:
            return
        if before.get("began", 0) >= TRIES:
            self.write(name, seconds=0.0, failed=f"the process ended before it, {TRIES} times")
            return
        if now() - self.began > SECONDS:
            raise Later
        self.write(name, began=before.get("began", 0) + 1)
        began = now()
        try:
            facts: Mapping[str, Any] = call()
        except Exception as error:  # whatever a library raises is the result
            facts = {"failed": type_and_line(error)}
        gc.collect()
        self.write(name, seconds=round(now() - began, 1), **facts)


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
    """Versions, what the preflight says of each kernel, attention, FP8 and scatters at the records'
    shapes."""
    use_compile_cache()
    day.result("environment", measure.environment)
    backends = ("xla",) if TOY else ("cudnn", "cudnn_lanes", "triton", "xla")
    kinds: dict[str, dict[str, bool]] = {
        "packed": {},
        "causal": {"packed": False},
        "longest document": {"bounded": True},
        "documents tagged": {"tagged": True},
    }
    for backend in backends:
        for kind, how in kinds.items():
            if kind in ("packed", "causal") or backend in ("cudnn", "xla"):
                check = partial(
                    preflight_checks.attention_error, backend, 128, **{"packed": True} | how
                )
                day.result(f"preflight {backend}, {kind}", partial(measure.wrong, check))
    day.result("preflight FP8", partial(measure.wrong, preflight_checks.fp8_error))
    for kernel in sorted(OWN_KERNELS):
        check = partial(preflight_checks.own_kernel_error, kernel)
        day.result(f"preflight own kernel {kernel}", partial(measure.wrong, check))
    for name in ("jspeed3", "r92", "r89"):
        kept: dict[str, list[np.ndarray]] = {}
        for backend in backends:
            day.result(
                f"attention {backend} as {name}", partial(measure.attend, backend, name, kept)
            )
    tagged = partial(measure.attend, backends[0], "jspeed3", {}, tagged=True)
    day.result(f"attention {backends[0]}, documents tagged, as jspeed3", tagged)
    for scales in (None, fp8.Scales(768**0.5 / 448, 2**-9, 1 / 448)):
        for triton in (False, True):
            name = (
                f"head {'FP8' if scales else 'bf16'}, Triton's matmuls {'on' if triton else 'off'}"
            )
            day.result(name, partial(measure.head, scales, triton))
    day.result("scatter-add", measure.scatter_add)


def stages(day: Day) -> None:
    """Step times of recipes' longest stages, as one of eight GPUs runs them."""
    for name in ("jspeed3", "r92"):
        day.result(f"stage {name}", partial(stage, name))
    day.result("stage jspeed3, own kernels off", partial(stage, "jspeed3", ["OWN_KERNELS=off"]))
    for name in ("r89", "r29"):
        day.result(f"stage {name}", partial(stage, name))
    one = partial(stage, "r29")
    day.result(
        "stage r29, Triton's matmuls on", partial(one, flags="--xla_gpu_enable_triton_gemm=true")
    )
    day.result("stage r29, no CUDA graphs", partial(one, flags="--xla_gpu_enable_command_buffer="))
    day.result("stage r29, attention triton", partial(one, attention="xla" if TOY else "triton"))


def own(day: Day) -> None:
    """Each own kernel beside XLA's, alone; a whole step without them is in `stages`."""
    if not TOY:
        day.result("own kernels alone", fused)


def fused() -> dict[str, Any]:
    """What ``bench.py fused`` prints."""
    done = subprocess.run(
        [sys.executable, "scripts/bench.py", "fused"], capture_output=True, text=True
    )
    said = done.stdout.splitlines()
    return {"lines": said} | ({"failed": last_line(done)} if done.returncode else {})


def product(day: Day) -> None:
    """Runs as a user makes them: the default, then record 29 for 40 steps with evaluation and a
    checkpoint."""
    folder = day.files[0].parent
    steps_ = 6 if TOY else 250
    sets = ["--set", "WIDTH=32", "LAYERS=2", "HEADS=2", "MLP_WIDTH=64"] if TOY else []
    day.result("run stdlib", partial(run, folder / "stdlib", "stdlib", "--steps", steps_, *sets))
    shards = folder / "tokens"
    day.result("tokens", partial(measure.tokens, shards))
    wanted = sets_of("r29", ["LANES=1"])
    flags = (
        "--data",
        shards,
        "--steps",
        4 if TOY else 40,
        "--checkpoint-every",
        2 if TOY else 20,
        "--set",
        *wanted,
    )
    day.result("run r29", partial(run, folder / "r29", "r29", *flags))


def stage(
    name: str, sets: Sequence[str] = (), flags: str = "", attention: str = ""
) -> dict[str, Any]:
    """:func:`.gpu_measurements.stage` in a process of its own, with further XLA ``flags`` and all
    of the memory."""
    words = [sys.executable, "-m", "benches.gpu_day", "stage", name, attention or "-", *sets]
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"failed": last_line(done)}
    return json.loads(done.stdout.splitlines()[-1])


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process failed."""
    return (done.stderr.strip() or str(done.returncode)).splitlines()[-1][:500]


def run(folder: Path, recipe: str, *flags: object) -> dict[str, Any]:
    """Make a run in a process of its own; what its run.json says."""
    words = [
        "-m",
        "jspeed",
        "run",
        recipe,
        "--run-dir",
        folder,
        "--no-progress",
        "--no-sample",
        *flags,
    ]
    shutil.rmtree(folder, ignore_errors=True)  # of a try that was killed
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
    if done.returncode > 1:
        return {"failed": last_line(done)}
    made = json.loads((folder / "run.json").read_text())
    names = "status steps val_loss timed_seconds compile_seconds wall_seconds kernels \
micro_batch".split()
    checks = {name: probe_["passed"] for name, probe_ in made["probes"].items()}
    return {name: made.get(name) for name in names} | {"probes": checks, "ledger": made["ledger"]}


def empty_block_us(known: Known, name: str) -> float | None:
    """Microseconds of an SM for an empty block: the difference of attention by lanes and by rows,
    over that of blocks.

    How many kernels have such blocks: :func:`jspeed.plan.attention.empty_blocks`.
    """
    rows, lanes = (
        known.get(f"attention {backend} as {name}", {}) for backend in ("cudnn", "cudnn_lanes")
    )
    if "both_ms" not in rows or "both_ms" not in lanes:
        return None
    _, length, heads, _ = rows["shape"]
    slots = rows["documents"]
    fewer = (
        sum(EMPTY_KERNELS.values())
        * heads
        * slots
        * (-(-length // TILE) - -(-rows["longest"] // TILE))
    )
    # an H200 has as many
    return 1e3 * (lanes["both_ms"] - rows["both_ms"]) * load_target("h100").cores / fewer


def table(known: Known) -> list[str]:
    """The results as lines of Markdown: what failed, predicted beside measured by family,
    attention, FP8."""
    there = known.get("environment", {})
    versions = there.get("versions", {})
    lines = [
        (
            f"{there.get('device')}, jax {versions.get('jax')}, cuDNN {there.get('cudnn')},"
            f" {there.get('date')}"
        ),
        "",
    ]
    for name, one in known.items():
        wrong = one.get("failed") or one.get("wrong")
        if wrong or "seconds" not in one:
            lines.append(f"- {name}: {wrong or 'not finished'}")
    for name, one in known.items():
        if not name.startswith("stage ") or "predicted_ms" not in one:
            continue
        found, measured = one["predicted_ms"], one["measured_ms"] or {}
        lines += ["", f"**{name}**: {one['step_ms_in_a_row']:.2f} ms a step, \
{one['memory_needed'] / 1e9:.1f} GB, "
                  f"{one['fp8_calls']} FP8 calls, attention {one['attention']}"]  # fmt: skip
        lines += ["", "| family | predicted ms | measured ms | ratio |", "|---|---|---|---|"]
        for family in sorted(found | measured, key=lambda family: -found.get(family, 0.0)):
            ms, seen = found.get(family, 0.0), measured.get(family)
            ratio = f"{seen / ms:.2f}" if seen is not None and ms else ""
            lines.append(
                f"| {family} | {ms:.2f} | {'' if seen is None else f'{seen:.2f}'} | {ratio} |"
            )
    rows = [(name, one) for name, one in known.items() if "both_ms" in one]
    if rows:
        lines += [
            "",
            "| what | forward ms | forward and backward ms | GB | FP8 calls |",
            "|---|---|---|---|---|",
        ]
    for name, one in rows:
        lines.append(f"| {name} | {one.get('forward_ms', '')} | {one['both_ms']} | \
{one['need_GB']} | "
                     f"{one.get('fp8_calls', '')} |")  # fmt: skip
    for line in known.get("own kernels alone", {}).get("lines", ()):
        lines.append(f"    {line}")
    for name in ("r92", "r89"):
        if (found := empty_block_us(known, name)) is not None:
            lines.append(
                f"\nempty blocks as {name}: {found:.3f} us of an SM, planned"
                f" {1e6 * predict.EMPTY_BLOCK:.3f}"
            )
    for name, one in known.items():
        if name.startswith("run ") and "status" in one:
            lines.append(
                f"\n{name}: {one['status']} after {one['steps']} steps, \
{one['timed_seconds']:.1f} s timed, "
                f"{one['compile_seconds']:.0f} s of compilation, loss {one['val_loss']}"
            )
    return lines


PARTS = {"probe": probe, "stages": stages, "own": own, "product": product}


if __name__ == "__main__":
    if sys.argv[1] == "stage":
        print(json.dumps(measure.stage(sys.argv[2], sys.argv[3], sys.argv[4:]), default=str))
    else:
        run_script(lambda: main(*sys.argv[1:]))
