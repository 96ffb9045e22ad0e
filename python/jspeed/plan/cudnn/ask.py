"""Ask the real cuDNN, without a GPU, which engine it takes for a call of attention and how much
workspace that needs.

``make test-cudnn`` downloads its wheels into ``.venv/cudnn``, 1.7 GB, where a plan finds them. Its
heuristics and its compiler of kernels then run as on a GPU, with a driver that is a pretence
(:mod:`jspeed.plan.cudnn.absent_driver`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from jspeed.base.cores import cores
from jspeed.plan import attention
from jspeed.plan.attention import Call
from jspeed.plan.cudnn import absent_driver
from jspeed.plan.hlo import Instruction
from jspeed.plan.target import Target, device_numbers


class Answer(NamedTuple):
    """What cuDNN says of a call."""

    engine: str  # of the execution plan that it takes; empty if it refuses
    workspace_bytes: int
    refused: str = ""  # why


class Answers(NamedTuple):
    """What a version of cuDNN says of the calls of a plan."""

    version: str
    by_call: dict[Call, Answer]


def attention_calls(ops: Iterable[Instruction]) -> list[Call]:
    """The different calls among instructions, forward before backward, smallest first."""
    return sorted({attention.call_of(op) for op in ops if op.target in attention.CUDNN})


def wheels_folder() -> Path | None:
    """Where ``make test-cudnn`` put the wheels; None where it did not."""
    site = Path(sys.prefix, "cudnn")
    return site if (site / "installed").is_file() else None


def ask(site: Path, target: Target, asked: Sequence[Call]) -> Answers:
    """Return what cuDNN says of each call for a GPU that is not here, asked in as many processes as
    there are cores.

    Raises OSError without a C compiler, and RuntimeError where cuDNN's process ends before it has
    answered.
    """
    driver = site / "driver" / target.name
    device = absent_driver.properties(
        device_numbers(target.text), target.device_kind, target.capability
    )
    if not (driver / "libcudart.so.13").is_file():
        libraries = [*site.glob("nvidia/cudnn/lib/libcudnn*.so.9")]
        absent_driver.build(driver, libraries, device)
    places = [driver, site / "nvidia/cudnn/lib", site / "nvidia/cu13/lib"]

    def answers(some: Sequence[Call]) -> tuple[str, list[Answer]]:
        """The version of cuDNN and its answers to ``some`` calls, a second or two each."""
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("worker.py")), str(site)],
            input="\n".join(map(json.dumps, [device, *(call._asdict() for call in some)])),
            env=os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, places))},
            capture_output=True,
            text=True,
        )
        said = [json.loads(line) for line in done.stdout.splitlines()]
        if len(said) != 1 + len(some):
            raise RuntimeError(
                f"cuDNN's process ended with code {done.returncode}: {done.stderr.strip()[-300:]}"
            )
        found = [
            Answer(one.get("engine", ""), one.get("workspace", 0), one.get("refused", ""))
            for one in said[1:]
        ]
        return said[0]["version"], found

    shares = [share for n in range(cores()) if (share := asked[n :: cores()])]
    with ThreadPoolExecutor(len(shares)) as pool:
        said = list(pool.map(answers, shares))
    by_call = {call: one for share, (_, found) in zip(shares, said, strict=True)
               for call, one in zip(share, found, strict=True)}  # fmt: skip
    return Answers(said[0][0], {call: by_call[call] for call in asked})
