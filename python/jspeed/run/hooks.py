"""What may be added to a run, each by its name; a run to which nothing is added is whole."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from jspeed.errors import BadInput
from jspeed.run.options import Options


@contextmanager
def alone(options: Options) -> Iterator[None]:
    """Make the run in this process alone. Raises BadInput where ``options`` name others."""
    if options.coordinator is not None or options.processes is not None:
        raise BadInput(
            "--coordinator and --processes need jspeed.cluster, which is not installed; leave them"
            " out"
        )
    yield


def nothing(options: Options, run_dir: Path) -> None:
    """Add nothing."""


@dataclass(frozen=True)
class Hooks:
    """``joined`` is around the whole run: there its processes meet, and there they end together.

    When the run has kept its parameters, process 0 calls ``afterwards`` with its directory."""

    joined: Callable[[Options], AbstractContextManager[object]] = alone
    afterwards: Callable[[Options, Path], None] = nothing


NO_HOOKS = Hooks()
