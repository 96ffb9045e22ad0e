"""Time to one validation loss on Shakespeare: jspeed recipes against nanoGPT's CPU setting."""

import json
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from benches.versus import or_nan, our_run
from jspeed.base.files import write_whole
from jspeed.cli.satellites import hooks
from jspeed.data.find_shards import HEADER_BYTES, find_split
from jspeed.errors import BadInput
from jspeed.plan.views.tables import Table
from jspeed.plan.views.terminal import print_table
from jspeed.run.find_recipe import find
from jspeed.run.setup import data_folder

# nanoGPT's README, "I only have a macbook": about 3 minutes there, and a validation loss of 1.88.
SETTING = (
    "--device=cpu --compile=False --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4"
    " --n_head=4 "
)
SETTING += "--n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
TARGET = 1.88  # nats per character, on the last tenth
# The same of the recipe nanogpt; its docstring has them too.
SETS = {
    "nanogpt": (
        "WIDTH=128 LAYERS=4 HEADS=4 DROPOUT=0.0 COMPUTE=float32 LANES=12 LANE_LEN=64 EVAL_LEN=64"
        f" STEPS=2000 COOLDOWN=2000 TARGET_LOSS={TARGET}"
    ).split()
}
NANOGPT = "nanoGPT"
STEP = re.compile(r"iter (\d+): loss \S+, time (\S+)ms")
VALIDATION = re.compile(r"step (\d+): train loss \S+, val loss (\S+)")


def contest(
    recipes: Sequence[str], folder: Path, python: Path | None, rounds: int, json_file: Path | None
) -> int:
    """Train ``recipes`` and nanoGPT in turn, ``rounds`` times each, and print the loss and seconds
    of each; ``nanogpt`` in nanoGPT's setting.

    nanoGPT's programs are copied from ``folder`` and see the recipes' own characters; ``python``
    (default: this one) has PyTorch. Its seconds are those of all its steps, with the median step in
    place of each that evaluated; they end with the first evaluation at the target, or with the last
    step. Returns 0 if every run of the first recipe reached the target, else 1. Raises
    :class:`BadInput` if one of them cannot run.
    """
    data = data_folder(find(recipes[0]).recipe, None, hooks())
    found: dict[str, list[dict[str, float]]] = {NANOGPT: [], **{recipe: [] for recipe in recipes}}
    with tempfile.TemporaryDirectory(prefix="jspeed-nanogpt-") as place:
        copy = nanogpt(folder, data, Path(place) / "nanoGPT")
        for number in range(1, rounds + 1):
            for who in list(found)[:: 1 if number % 2 else -1]:
                if who == NANOGPT:
                    found[who].append(their_run(copy, python or Path(sys.executable)))
                    print(
                        "nanoGPT: {loss:.4f} in {seconds:.1f} s, {steps} steps".format(
                            **found[who][-1]
                        ),
                        flush=True,
                    )
                else:
                    run_dir, sets = Path(place) / f"{Path(who).stem}-{number}", SETS.get(who, ())
                    run = our_run(who, data, run_dir, number, {}, sets)
                    loss = or_nan(run["val_loss"])
                    found[who].append(
                        {"seconds": run["timed_seconds"], "loss": loss, "steps": run["steps"]}
                    )
    seconds = {
        who: statistics.median(run["seconds"] for run in runs) for who, runs in found.items()
    }
    reached = {who: sum(run["loss"] <= TARGET for run in runs) for who, runs in found.items()}
    rows = [
        [
            who,
            f"{seconds[who]:.2f}",
            f"{seconds[NANOGPT] / seconds[who]:.2f}",
            f"{statistics.median(run['loss'] for run in runs):.4f}",
            f"{reached[who]} of {rounds}",
        ]
        for who, runs in found.items()
    ]
    title = f"medians of n={rounds}, seconds of training alone; target {TARGET} nats per character"
    print_table(
        Console(highlight=False),
        Table(title, ("", "timed s", "nanoGPT's / its", "loss", "reached it"), rows),
    )
    if json_file:
        content = {"setting": SETTING, "target": TARGET, "runs": found, "seconds": seconds}
        write_whole(json_file, json.dumps(content, indent=1) + "\n")
    return 0 if reached[recipes[0]] == rounds else 1


def nanogpt(folder: Path, data: Path, copy: Path) -> Path:
    """Copy nanoGPT's programs and write the characters of ``data`` as they read them; returns the
    copy's folder."""
    copy.mkdir()
    for name in ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py"):
        if not (folder / name).is_file():
            raise BadInput(
                f"--versus {folder}: has no {name}; give the folder of a clone of karpathy/nanoGPT"
            )
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / name, copy / name)
    characters = copy / "data" / "shakespeare_char"
    characters.mkdir(parents=True)
    for split in ("train", "val"):
        parts = [
            np.fromfile(path, "<u2", offset=HEADER_BYTES) for path in find_split(data, split).paths
        ]
        np.concatenate(parts).tofile(characters / f"{split}.bin")
    (characters / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))
    return copy


def their_run(folder: Path, python: Path) -> dict[str, float]:
    """Train nanoGPT once and return its seconds, loss and steps."""
    command = [str(python), "train.py", "config/train_shakespeare_char.py", *SETTING.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    steps = {int(number): float(ms) / 1e3 for number, ms in STEP.findall(done.stdout)}
    found = [(int(number), float(loss)) for number, loss in VALIDATION.findall(done.stdout)]
    if done.returncode or not steps or not found:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise BadInput(
            f"nanoGPT ended with exit code {done.returncode} and said: {said}; give a Python that"
            " has PyTorch and NumPy with --python FILE"
        )
    evaluated = {number for number, _ in found}
    usual = statistics.median(
        seconds for number, seconds in steps.items() if number not in evaluated
    )
    last, loss = next(((number, loss) for number, loss in found if loss <= TARGET), found[-1])
    seconds = sum(
        usual if number in evaluated else spent for number, spent in steps.items() if number < last
    )
    return {"seconds": seconds, "loss": loss, "steps": last}
