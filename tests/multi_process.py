"""Several real processes of speedrun.py on this machine, as a launcher would start them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jspeed.errors import BadInput

REPOSITORY = Path(__file__).parents[1]
TOY = (
    "WIDTH=32 LAYERS=2 HEADS=2 MLP_WIDTH=64 LANES=8 LANE_LEN=32 EVAL_LEN=32 EVAL_TOKENS=256".split()
)
TOLD = ("JAX_NUM_CPU_DEVICES", "RANK", "WORLD_SIZE")
QUICK = {"XLA_FLAGS": os.environ["XLA_FLAGS"]}  # those of tests/conftest.py
# For JAX 0.10's older emitter of fusions, in QUICK, the same program need not give the same bits
# twice.
SAME_BITS = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
}


def words(count: int, seed: int) -> bytes:
    """Words of one sentence in random order: a toy learns them in a few steps, and two seeds share
    no long piece."""
    return b" ".join(
        np.random.default_rng(seed).choice(
            b"the quick brown fox jumps over the lazy dog.".split(), count
        )
    )


def shards(folder: Path) -> Path:
    """A folder of bytes to train and validate on."""
    train, val = (np.append(256, np.frombuffer(words(n, n), np.uint8)) for n in (7000, 400))
    folder.mkdir(parents=True)
    for name, part in [("toy_train_000001.bin", train), ("toy_val_000000.bin", val)]:
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(part)
        (folder / name).write_bytes(header.tobytes() + part.astype("<u2").tobytes())
    return folder


def environment(**more: object) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in TOLD}
    return (
        kept
        | QUICK
        | {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
        | {name: str(value) for name, value in more.items()}
    )


def places(count: int, **more: object) -> list[dict[str, str]]:
    """The environments of ``count`` processes, as torchrun would set them."""
    from jspeed.cluster.rendezvous import free_port

    shared = dict(
        WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()
    )
    return [environment(RANK=index, LOCAL_RANK=index, **shared, **more) for index in range(count)]


def start(
    cwd: Path, variables: dict[str, str], *arguments: object, script: str = "speedrun.py"
) -> subprocess.Popen:
    command = [sys.executable, str(REPOSITORY / "scripts" / script), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=variables, text=True, stdout=pipe, stderr=pipe)


def ended(processes: list[subprocess.Popen], seconds: float = 300) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each; none is left running."""
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=seconds)
            results.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return results


def toy(*more: str) -> list[str]:
    return ["--no-sample", "--set", *TOY, *more]


def metrics(run_dir: Path, kind: str = "train_loss") -> dict[int, float]:
    text = (run_dir / "metrics.jsonl").read_text()
    # the last may be half written
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return {line["step"]: line[kind] for line in lines if kind in line}


def said(call: Callable[[], object]) -> str:
    """The sentence of the BadInput that ``call`` must raise."""
    with pytest.raises(BadInput) as caught:
        call()
    return str(caught.value)
