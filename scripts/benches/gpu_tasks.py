"""The tasks of a day on a GPU (gpu_day.py), in the order of their worth, and the process that does
one: ``python -m benches.gpu_tasks KIND NAMES``."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

TOY = os.environ.get("GPU_DAY") == "toy"
UNTUNED = "--xla_gpu_autotune_level=0"  # XLA tries no kernels: a program compiles without a device
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
TRITON_MATMULS = "--xla_gpu_enable_triton_gemm=true"
HAS_THE_DEVICE = "has the device"  # a line that a task prints
OWN_OFF = ("OWN_KERNELS=off",)


class Task(NamedTuple):
    """Results that one process finds out, and XLA's flags for it."""

    kind: str
    names: tuple[str, ...]
    flags: str = UNTUNED


class Variant(NamedTuple):
    """How a recipe's stage is measured."""

    recipe: str
    sets: tuple[str, ...] = ()
    flags: str = UNTUNED
    attention: str = "-"  # backend; -: what a run takes


STAGES = {
    "stage r92": Variant("r92"),
    "stage jspeed3": Variant("jspeed3"),
    "stage r92, own kernels off": Variant("r92", OWN_OFF),
    "stage r92, no CUDA graphs": Variant("r92", (), f"{UNTUNED} {NO_GRAPHS}"),
    "stage jspeed3, own kernels off": Variant("jspeed3", OWN_OFF),
    "stage jspeed3, no CUDA graphs": Variant("jspeed3", (), f"{UNTUNED} {NO_GRAPHS}"),
    "stage r92, tuned": Variant("r92", (), ""),
    "stage jspeed3, tuned": Variant("jspeed3", (), ""),
    "stage r29": Variant("r29"),
    "stage r89": Variant("r89"),
    "stage r29, tuned": Variant("r29", (), ""),
    "stage r29, Triton's matmuls on": Variant("r29", (), TRITON_MATMULS),
    "stage r29, no CUDA graphs": Variant("r29", (), f"{UNTUNED} {NO_GRAPHS}"),
    "stage r29, attention triton": Variant("r29", (), UNTUNED, "xla" if TOY else "triton"),
}
QUARTER = 8  # stages of the first quarter of an hour
BACKENDS = ("xla",) if TOY else ("cudnn", "cudnn_lanes", "triton")


def quarter(folder: Path) -> list[Task]:
    """What the first minutes find out: rates, the newest recipes' steps, each with its causes."""
    from benches.elsewhere import NAMES
    from benches.gpu_rates import groups

    rates = {name: Task("rates", tuple(cases)) for name, cases in groups().items()}
    matmuls = [*rates["FP8 matmuls"].names, *rates["bf16 matmuls"].names]
    first, second, third, *rest = stages(list(STAGES)[:QUARTER])
    attention = [task for name, task in rates.items() if name.startswith("attention")]
    pytorch = Task("PyTorch", tuple(f"{name}, PyTorch" for name in matmuls))
    # Steps are prepared for two minutes, while the rates beside them are measured.
    return [
        Task("probe", ("environment",)),
        Task("elsewhere", tuple(NAMES)),
        rates["FP8 matmuls"],
        first,
        second,
        rates["copies and fusions"],
        rates["own kernels"],
        third,
        attention[0],
        rates["bf16 matmuls"],
        *attention[1:],
        pytorch,
        Task("probe", tuple(preflights())),
        *rest,
    ]


def more(folder: Path) -> list[Task]:
    """Kernels beside each other, and the steps of older recipes."""
    return [Task("probe", (name,), "") for name in kernels()] + stages(list(STAGES)[QUARTER:])


def product(folder: Path) -> list[Task]:
    """Runs as a user makes them: the default, then record 29 for 40 steps with evaluation and a
    checkpoint."""
    return [Task("run", (name,), "") for name in ("run stdlib", "run r29")]


PARTS: dict[str, Callable[[Path], list[Task]]] = {
    "quarter": quarter,
    "more": more,
    "product": product,
}


def stages(names: Iterable[str]) -> list[Task]:
    """A task for each stage."""
    return [Task("stage", (name,), STAGES[name].flags) for name in names]


def preflights() -> dict[str, Callable[[], str | None]]:
    """The checks of a run's preflight by their names; XLA's own attention is no candidate here."""
    from jspeed.kernels import CUSTOM
    from jspeed.kernels.preflight import checks as of_preflight

    checks: dict[str, Callable[[], str | None]] = {"preflight FP8": of_preflight.fp8_error}
    for kernel in sorted(CUSTOM):
        check = partial(of_preflight.custom_kernel_error, kernel)
        checks[f"preflight own kernel {kernel}"] = check
    kinds: dict[str, dict[str, bool]] = {"packed": {}, "causal": {"packed": False}}
    bounded = {"longest document": {"bounded": True}, "documents tagged": {"doc_tagged": True}}
    for backend in BACKENDS:
        for kind, how in (kinds | (bounded if backend == "cudnn" else {})).items():
            checks[f"preflight {backend}, {kind}"] = partial(
                of_preflight.attention_error, backend, 128, **{"packed": True} | how
            )
    return checks


def kernels() -> dict[str, Callable[[], Mapping[str, Any]]]:
    """Comparisons of kernels by their names."""
    from benches import gpu_measurements as measure
    from jspeed.model import fp8

    found: dict[str, Callable[[], Mapping[str, Any]]] = {
        f"attention as {name}": partial(measure.attend, BACKENDS, name)
        for name in ("jspeed3", "r92", "r89")
    }
    tagged = partial(measure.attend, BACKENDS[:1], "jspeed3", tagged=True)
    found["attention, documents tagged, as jspeed3"] = tagged
    for scales in (None, fp8.Scales(768**0.5 / 448, 2**-9, 1 / 448)):
        for triton in (False, True):
            kind, which = "FP8" if scales else "bf16", "on" if triton else "off"
            name = f"head {kind}, Triton's matmuls {which}"
            found[name] = partial(measure.head, scales, triton)
    found["scatter-add"] = measure.scatter_add
    return found if TOY else found | {"own kernels alone": fused}


def fused() -> dict[str, Any]:
    """What ``bench.py fused`` prints."""
    words = [sys.executable, "scripts/bench.py", "fused"]
    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=end_with_parent)
    said = {"lines": done.stdout.splitlines()}
    return said | ({"failed": last_line(done)} if done.returncode else {})


def rate(name: str) -> Mapping[str, Any]:
    """A rate by its name."""
    from benches.gpu_rates import groups, measure

    return measure({k: v for cases in groups().values() for k, v in cases.items()}[name])


def pytorch(name: str) -> Mapping[str, Any]:
    """PyTorch's time of a matmul by its name."""
    from benches.gpu_rates import in_pytorch

    return in_pytorch(name.removesuffix(", PyTorch"))


def stage(name: str) -> Mapping[str, Any]:
    """A stage by its name."""
    from benches import gpu_measurements as measure

    how = STAGES[name]
    tuned = UNTUNED not in how.flags
    return measure.stage(how.recipe, how.attention, how.sets, tuned)


def probe(name: str) -> Mapping[str, Any]:
    """Versions, what the preflight says of a kernel, or a comparison of kernels, by its name."""
    from benches import gpu_measurements as measure

    if name == "environment":
        return measure.environment()
    if check := preflights().get(name):
        return {"wrong": check()}
    return kernels()[name]()


def elsewhere(name: str) -> Mapping[str, Any]:
    """What became of a program that was compiled without a GPU, by its name."""
    from benches.elsewhere import load

    return load(name)


def run(name: str) -> Mapping[str, Any]:
    """Make a run in a process of its own; what its run.json says."""
    from benches.gpu_measurements import sets_of, tokens

    folder = Path(os.environ["DAY"])
    recipe = name.removeprefix("run ")
    if recipe == "stdlib":
        flags: list[object] = ["--steps", 6 if TOY else 250]
        if TOY:
            flags += ["--set", "WIDTH=32", "LAYERS=2", "HEADS=2", "MLP_WIDTH=64"]
    else:
        steps, every = (4, 2) if TOY else (40, 20)
        tokens(folder / "tokens")
        flags = ["--data", folder / "tokens", "--steps", steps, "--checkpoint-every", every]
        flags += ["--set", *sets_of(recipe, ["LANES=1"])]
    shutil.rmtree(folder / recipe, ignore_errors=True)  # of a try that was killed
    how = ["--run-dir", folder / recipe, "--no-progress", "--no-sample", *flags]
    words = [sys.executable, "-m", "jspeed", "run", recipe, *map(str, how)]
    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=end_with_parent)
    if done.returncode > 1:
        return {"failed": last_line(done)}
    made = json.loads((folder / recipe / "run.json").read_text())
    names = "status steps val_loss timed_seconds compile_seconds wall_seconds kernels micro_batch"
    checks = {name: probe_["passed"] for name, probe_ in made["probes"].items()}
    kept = {name: made.get(name) for name in names.split()}
    return kept | {"probes": checks, "ledger": made["ledger"]}


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process failed."""
    return (done.stderr.strip() or str(done.returncode)).splitlines()[-1][:500]


KINDS: dict[str, Callable[[str], Mapping[str, Any]]] = {
    "rates": rate,
    "PyTorch": pytorch,
    "stage": stage,
    "probe": probe,
    "elsewhere": elsewhere,
    "run": run,
}


def main(kind: str, names: Sequence[str]) -> None:
    """Find out each of ``names``, and print a line of JSON before it and after it."""
    end_with_parent()
    from jspeed.base.compile_cache import use_compile_cache
    from jspeed.errors import type_and_line

    use_compile_cache()
    for name in names:
        began = time.time()
        print(json.dumps({"name": name, "begins": True}), flush=True)
        try:
            facts: Mapping[str, Any] = KINDS[kind](name)
        except Exception as error:  # whatever a library raises is the result
            facts = {"failed": type_and_line(error)} | turn_since(began)
        print(json.dumps({"name": name, **facts}, default=str), flush=True)


def turn_since(began: float) -> dict[str, list[float]]:
    """When this process has had the device since ``began``, if it has: what failed used it, too."""
    from benches.gpu_measurements import TURNS

    return {"span": TURNS[-1]} if TURNS and TURNS[-1][0] >= began else {}


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however that is."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
