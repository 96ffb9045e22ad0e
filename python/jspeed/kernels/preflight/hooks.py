"""What this room adds to a run: attention, FP8 and custom kernels, each checked first."""

from dataclasses import replace

from jspeed.kernels.preflight.fall_back import compile_or_fall_back, preflight
from jspeed.kernels.preflight.known_faults import known_faults
from jspeed.run.hooks import Hooks


def add(hooks: Hooks) -> Hooks:
    """Return ``hooks`` with this room's."""
    return replace(hooks, preflight=preflight, compiled=compile_or_fall_back, faults=known_faults)
