"""What this room adds to a run: the processes that its launcher has started meet."""

from contextlib import AbstractContextManager
from dataclasses import replace

from jspeed.cluster.join import joined
from jspeed.run.hooks import Hooks
from jspeed.run.options import Options


def join(options: Options) -> AbstractContextManager[object]:
    """Meet the other processes, where there are any."""
    return joined(options.coordinator, options.processes, options.process_id)


def add(hooks: Hooks) -> Hooks:
    """Return ``hooks`` with this room's."""
    return replace(hooks, joined=join)
