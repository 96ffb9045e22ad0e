"""Generate many synthetic records, for scale tests and for viewing a full page."""

import hashlib
import json
import shutil
import tomllib
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from jspeed.board.records import preregistration, store
from jspeed.fields import recipe_hash
from jspeed.record.run_json import content_hash

from ..record.synthetic_runs import START, as_run

REPOSITORY = Path(__file__).parents[2]
H100 = {"kind": "NVIDIA H100 80GB HBM3", "count": 8, "processes": 8, "platform": "gpu"}
CPU = {"kind": "AMD EPYC (2 cores)", "count": 1, "processes": 1, "platform": "cpu"}
LARGE, SMALL = (
    {"parameters": n, "devices": on} for n, on in ((275_742_048, H100), (1_873_920, CPU))
)
IDEAS = (
    "Muon on the matrices of the blocks", "longer cooldown", "value embeddings", "sparse attention \
gate",
    "windows that grow in three stages", "FP8 head", "U-net skips", "<b>markup</b> & \"quotes\" in \
a title",
    "no first MLP", "a schedule of the batch size", "rows cut at 2,048 tokens", "another rate for \
the embedding",
)  # fmt: skip
STAGES = np.linspace(0, 1, 9)


def recipe(name: str, parent: str | None, number: int) -> str:
    """A recipe's source: a hundred lines, of which a few differ from its parent's."""
    body = "\n".join(f"LAYER_{n} = {n * (1 + (number > n))}" for n in range(60))
    return (
        f'"""{name}: {IDEAS[number % len(IDEAS)]}.\n\nWhat        Idea {number} of many, which'
        f' changes a field and a line.\nParent      {parent or "none"}\n"""\n\nRATE ='
        f" {0.1 + 0.01 * number:.3f}\n{body}\n\n\ndef forward(x):\n    return x * RATE * {number}\n"
    )


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def pin(rules: str, name: str) -> str | None:
    """The hash called ``name`` in the text of a track.toml."""
    pinned = tomllib.loads(rules)["data"].get(name)
    return pinned and str(pinned)


def fill(records: Path, track: str, recipes: int, seeds: int, seed: int = 0) -> int:
    """Add ``recipes`` recipes to ``track``, each the child of the best before it, with ``seeds``
    planned runs each; the last takes about half the first's time, however many there are.

    Every fifth misses its target and every seventh is slower than its parent. Returns the number of
    runs.
    """
    rng = np.random.default_rng(seed)
    home = records / track
    home.mkdir(parents=True, exist_ok=True)
    rules = (REPOSITORY / "records" / track / "track.toml").read_text()
    (home / "track.toml").write_text(rules)
    fineweb = track.startswith("fineweb")
    target, val_tokens = (3.28, 10_485_760) if fineweb else (1.4, 65_536)
    pinned = pin(rules, "val_sha256") or "dd" * 32
    best, parent = (1500.0 if fineweb else 120.0), None
    gain = min(1.0, 30 / recipes)
    for number in range(recipes):
        name = f"r{number:03d}" if fineweb else f"stdlib-{number:03d}"
        misses, slower = number % 5 == 4, number % 7 == 6
        source = recipe(name, parent, number)
        fields = {"RATE": round(0.1 + 0.01 * number, 3)}
        digest, sha = recipe_hash(source, fields), hashlib.sha256(source.encode()).hexdigest()
        made = START + timedelta(days=2 * number)
        runs = [(name, digest, each) for each in range(1, seeds + 1)]
        plan = preregistration.make_preregistration("seeds", made.isoformat(), None, runs)
        write(home / name / f"plan-{plan['sha256'][:8]}.json", plan)
        (home / name / f"recipe-{sha[:8]}.py").write_text(source)
        mean = best * (1.04 if slower else (0.93 + 0.05 * rng.random()) ** gain)
        for run, (_, _, each) in zip(plan["runs"], runs, strict=True):
            loss = round(
                float(target + (0.006 if misses else -0.0035) + 0.0013 * rng.standard_normal()), 6
            )
            seconds = float(mean * np.exp(0.004 * rng.standard_normal()))
            values = as_run(
                seconds, each, loss, source, fields=fields, recipe=name, parent=parent, track=track,
                started=made + timedelta(hours=each), plan={"sha256": plan["sha256"], "folder":
                run["folder"]},
            )  # fmt: skip
            values |= {"target_loss": target, "reached": loss <= target}
            values["data"] |= {"val_tokens": val_tokens, "val_sha256": pinned}
            values["data"] |= {"val_shard_sha256": pin(rules, "val_shard_sha256")}
            if first := pin(rules, "train_sha256"):
                (shard,) = values["data"]["train_shards"]
                values["data"]["train_shards"] = [shard | {"sha256": first}]
            if fineweb:
                second = {
                    "first": 20_971_520,
                    "tokens": val_tokens,
                    "sha256": "ab" * 32,
                    "val_loss": loss + 0.002,
                }
                values |= {"holdout": second}
            put(records, track, values | (LARGE if fineweb else SMALL), seconds, loss)
        if not misses and not slower:
            best, parent = mean, name
    return recipes * seeds


def put(records: Path, track: str, run: dict, seconds: float, loss: float) -> None:
    """Give a run the rest of what it needs and put it into its place."""
    steps, first = 1600, 10.8 if run["parameters"] > 10**8 else 5.6
    state = hashlib.sha256(f"{run['recipe']} {run['seed']}".encode()).hexdigest()[:16]
    falling = [
        loss + (first - loss) * np.exp(-9 * share) + 0.25 * (1 - share) for share in STAGES[:-1]
    ]
    curve = [
        {"step": round(share * steps), "timed_seconds": float(share * seconds), "val_loss": value}
        for share, value in zip(
            STAGES, [*(round(float(value), 4) for value in falling), loss], strict=True
        )
    ]
    run |= dict(
        steps=steps, planned_steps=steps, initial_state=state, curve=curve, tokens=steps * 393_216
    )
    run["sha256"] = content_hash(run)
    content = json.dumps(run).encode()
    (records / store.run_path(run, content, track)).write_bytes(content)


def demonstration(records: Path) -> None:
    """A small board with everything on it, for looking at; one run's devices are called something
    that bites."""
    track, source = "fineweb/8xH100", recipe("odd", "r012", 3)
    fill(records, track, 14, 8)
    odd = H100 | {"kind": """<img src=x onerror="document.title='bitten'"> H100 & 'co'"""}
    names = {"fields": {"RATE": 0.13}, "recipe": "odd", "parent": "r012", "track": track}
    run = as_run(990.0, 1, 3.27, source, **names)
    run |= dict(target_loss=3.28, reached=True, devices=odd, parameters=275_742_048)
    run |= {"overrides": {"X": "</details><script>1</script>"}}
    (records / track / "odd").mkdir()
    put(records, track, run, 990.0, 3.27)
    (records / track / "odd" / f"recipe-{run['recipe_sha256'][:8]}.py").write_text(source)
    fill(records, "stdlib/cpu", 6, 5)
    files = [f"fineweb/{name}/track.toml" for name in ("1xGPU", "steps")]
    for name in (*files, "history/modded-nanogpt.csv", "history/prices.csv"):
        (records / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "records" / name, records / name)


NOW = datetime.fromisoformat("2036-01-01T00:00:00+00:00")
