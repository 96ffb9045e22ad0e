"""What this room adds to a run: its programs, where an earlier start has saved them or
the first of several processes has compiled them."""

from dataclasses import replace

from jspeed.run.hooks import Hooks
from jspeed.saved.programs import programs_of_run


def add(hooks: Hooks) -> Hooks:
    """Return ``hooks`` with this room's."""
    return replace(hooks, saved=programs_of_run)
