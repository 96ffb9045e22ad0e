"""Ask the real cuDNN, without a GPU, which engine it takes for a call of attention and how much workspace that needs.

``make test-cudnn`` downloads its wheels into ``.venv/cudnn``, 1.7 GB, where a plan finds them. Its heuristics and its
compiler of kernels then run as on a GPU, with a driver that is a pretence (:mod:`jspeed.plan.cudnn.absent_driver`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jspeed.plan.cudnn import absent_driver
from jspeed.plan.custom_calls import attention
from jspeed.plan.hlo import Instruction
from jspeed.plan.target import Target, device_numbers


class Call(NamedTuple):
    """A call of cuDNN's attention: the graph that it is, but for scale and dropout."""

    backward: bool
    documents: int  # slots: lanes, or rows of a lane, by the documents of each
    heads: int
    length: int  # tokens of a slot
    width: int
    packed: bool
    causal: bool
    window: int  # 0: none

    @property
    def words(self) -> str:
        """The call in words."""
        way = "backward" if self.backward else "forward"
        what = f"{self.documents:,} {'documents' if self.packed else 'lanes'} of up to {self.length:,} tokens"
        return f"{way}, {what}, {self.heads} heads of {self.width}, window {self.window or 'none'}"


class Answer(NamedTuple):
    """What cuDNN says of a call: its engine and bytes of workspace, or why it has none."""

    engine: str
    workspace: int
    refused: str = ""


class Answers(NamedTuple):
    """What a version of cuDNN says of the calls of a plan."""

    version: str
    by_call: dict[Call, Answer]


def calls(steps: Iterable[Instruction]) -> list[Call]:
    """The different calls among instructions, forward before backward, smallest first."""
    return sorted({Call(*attention.graph_of(step)) for step in steps if step.target in attention.CUDNN})


def folder() -> Path | None:
    """Where ``make test-cudnn`` put the wheels; None where it did not."""
    found = Path(sys.prefix, "cudnn")
    return found if (found / "installed").is_file() else None


def ask(site: Path, target: Target, asked: Sequence[Call]) -> Answers:
    """Return what cuDNN says of each call for a GPU that is not here.

    Raises OSError without a C compiler, and RuntimeError where cuDNN's process ends before it has answered.
    """
    driver = site / "driver" / target.name
    device = absent_driver.properties(device_numbers(target.text), target.device_kind, target.capability)
    if not (driver / "libcudart.so.13").is_file():
        libraries = [*site.glob("nvidia/cudnn/lib/libcudnn*.so.9")]
        absent_driver.build(driver, libraries, device)
    places = [driver, site / "nvidia/cudnn/lib", site / "nvidia/cu13/lib"]
    lines = [device, *(call._asdict() for call in asked)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("worker.py")), str(site)],
        input="\n".join(map(json.dumps, lines)),
        env=os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, places))},
        capture_output=True,
        text=True,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    if len(said) != 1 + len(asked):
        raise RuntimeError(f"cuDNN's process ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
    first, *answers = said
    found = [Answer(one.get("engine", ""), one.get("workspace", 0), one.get("refused", "")) for one in answers]
    return Answers(first["version"], dict(zip(asked, found, strict=True)))
