"""``scripts/bench.py`` in a process of its own, on two devices."""

import os
import subprocess
import sys
from pathlib import Path

from ..toys import TINY

SCRIPTS = Path(__file__).parents[2] / "scripts"
GPU_TOY = ["--set", *TINY, "LAYERS=1", "STEPS=4", "EVAL_EVERY=2"]


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / "bench.py", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return subprocess.run(
        [str(a) for a in command], capture_output=True, text=True, timeout=600, env=environment
    )
