"""Test helpers: synthetic run directories, with plan and recipe source, that no trainer made."""

import hashlib
import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from jspeed.board.records import preregistration
from jspeed.fields import recipe_hash
from jspeed.record.run_json import write_run

START = datetime.fromisoformat("2026-01-31T12:00:00+00:00")
NOW = datetime.fromisoformat("2026-06-01T00:00:00+00:00")
SOURCE = '''"""stdlib: a recipe in a test.

What        {what}
Parent      none
"""

RATE = {rate}


def loss(x):
    return x * RATE
'''
PROBES = (
    "causality normalisation evaluation_leaves_state evaluation_repeats evaluation_stays_on_device "
    "replicas_agree warm_up_leaves_state no_overlap"
).split()
SHA = "c3ae961c6afbe3bff079f103d174859f3ec55e0666560101df3716e5bd4e046a"


def source_of(rate: float = 0.1, what: str = "What it does.") -> str:
    return SOURCE.format(rate=rate, what=what)


def as_run(
    seconds: float = 60.0,
    seed: int = 1,
    loss: float | None = 1.39,
    source: str = source_of(),
    **changes: Any,
) -> dict[str, Any]:
    """A run.json of schema 2 before it is sealed. Written out from the published list of fields."""
    fields = changes.pop("fields", {"RATE": 0.1})
    started = changes.pop("started", START + timedelta(minutes=5 * seed))
    steps = changes.get("steps", 300)
    run = {
        "schema": 2,
        "recipe": "stdlib",
        "recipe_hash": recipe_hash(source, fields),
        "recipe_source": "stdlib.py",
        "recipe_sha256": hashlib.sha256(source.encode()).hexdigest(),
        "fields": fields,
        "overrides": {},
        "parent": None,
        "track": "stdlib/cpu",
        "seed": seed,
        "status": "finished" if loss is not None else "diverged",
        "reached": loss is not None and loss <= 1.4,
        "target_loss": 1.4,
        "val_loss": loss,
        "timed_seconds": seconds,
        "compile_seconds": 8.0,
        "wall_seconds": seconds + 20.0,
        "started": started.isoformat(),
        "ended": (started + timedelta(seconds=round(seconds + 20))).isoformat(),
        "asked_steps": None,
        "steps": steps,
        "planned_steps": steps,
        "tokens": 2457600,
        "parameters": 1234567,
        "flops_per_token": 6.1e6,
        "devices": {"kind": "cpu", "count": 1, "processes": 1, "platform": "cpu"},
        "mesh": {"data": 1},
        "layout": "dp",
        "micro_batch": 8192,
        "head_chunk": 4096,
        "remat": False,
        "kernels": {
            "attention": "cudnn",
            "fp8": "native",
            "own": True,
            "calls": {"__cublas$lt$matmul$f8": 3},
            "checked": ["FP8 matmuls"],
            "refused": ["attention cudnn: a test"],
        },
        "data": {
            "name": "stdlib",
            "fingerprint": "aa" * 8,
            "val_fingerprint": "bb" * 8,
            "train_tokens": 20000000,
            "val_tokens": 65536,
            "tokenizer": None,
            "val_sha256": "dd" * 32,
            "train_shards": [
                {"name": "stdlib_train_000001.bin", "sha256": SHA, "first": 0, "end": 20000000}
            ],
            "position": {"step": 300, "epoch": 0, "shard": 0, "offset": 2457600, "shuffle": "none"},
        },
        "loader": {"waits": 3},
        "host": {"data_wait_seconds": 0.01, "dispatch_seconds": 0.2},
        "ledger": [
            {"name": "compile", "seconds": 8.0, "timed": False},
            {"name": "training", "seconds": seconds / 2, "timed": True},
            {"name": "evaluation", "seconds": 2.0, "timed": False},
            {"name": "training", "seconds": seconds / 2, "timed": True},
            {"name": "probes", "seconds": 10.0, "timed": False},
        ],
        "curve": [
            {"step": 0, "timed_seconds": 0.0, "val_loss": 5.606},
            {"step": steps // 2, "timed_seconds": seconds / 2, "val_loss": 1.7},
            {"step": steps, "timed_seconds": seconds, "val_loss": loss},
        ],
        "probes": {name: {"passed": True} for name in PROBES},
        "versions": dict.fromkeys(("python", "jax", "jaxlib", "numpy", "optax", "jspeed"), "1"),
        "xla_flags": "",
        "git": {"commit": "c0ffee00c0ffee00", "dirty": False},
        "resumed": [],
        "plan": None,
        "initial_state": f"{seed:016x}",
        "machine": "0123456789ab",
        "gpus": None,
        "container": None,
        "environment": "ee" * 32,
    }
    return run | changes


def make_run(folder: Path, *values: Any, source: str = source_of(), **changes: Any) -> Path:
    """Write a run directory, run.json and recipe.py, and return it; arguments as :func:`as_run`."""
    write_run(folder, as_run(*values, source=source, **changes))
    (folder / "recipe.py").write_text(source)
    return folder


def make_series(
    folder: Path,
    seconds: Sequence[float],
    losses: Sequence[float | None] | None = None,
    source: str = source_of(),
    start: datetime = START,
    **changes: Any,
) -> Path:
    """Write a plan with a seed for each of ``seconds``, and its runs; return its folder."""
    losses = losses or [round(1.39 + 0.0005 * (n % 3), 4) for n in range(len(seconds))]
    name = changes.get("recipe", "stdlib")
    digest = recipe_hash(source, changes.get("fields", {"RATE": 0.1}))
    runs = [(name, digest, seed) for seed in range(1, len(seconds) + 1)]
    plan = preregistration.make_preregistration(
        "seeds", start.isoformat(), changes.get("asked_steps"), runs
    )
    folder.mkdir(parents=True)
    preregistration.write_preregistration(folder, plan)
    for number, (run, each, loss) in enumerate(zip(plan["runs"], seconds, losses, strict=True)):
        started = start + timedelta(minutes=1 + 10 * number)
        mine = {
            "plan": {"sha256": plan["sha256"], "folder": run["folder"]},
            "started": started,
        } | changes
        make_run(folder / run["folder"], each, run["seed"], loss, source=source, **mine)
    return folder


def rewrite(path: Path, *place: str | int, value: Any) -> None:
    """Set one value in a JSON file by hand, without new hashes."""
    content = json.loads(path.read_text())
    node = content
    for part in place[:-1]:
        node = node[part]
    node[place[-1]] = value
    path.write_text(json.dumps(content, indent=2) + "\n")
