"""What this room adds to a run: its programs, where an earlier start has saved them."""

from dataclasses import replace

from jspeed.run.hooks import Hooks
from jspeed.saved.programs import saved_or_compiled


def add(hooks: Hooks) -> Hooks:
    """Return ``hooks`` with this room's."""
    return replace(hooks, saved=saved_or_compiled)
