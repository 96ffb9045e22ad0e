"""Programs on several processes: they join, one of them prints, they end together, and each can
tell the others.

:func:`jspeed.join` is this for programs of one's own; ``jspeed run`` is one of ours.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jspeed.base.processes import Stop, use
from jspeed.base.standard_streams import (
    open_closed_streams,
    stdout_error,
    stdout_of_process_0_only,
)
from jspeed.cluster import distributed, failure
from jspeed.cluster.graceful_stop import GracefulStop
from jspeed.cluster.launch import write_result
from jspeed.cluster.rank import find_rank
from jspeed.errors import BadInput, exit_codes


@dataclass(frozen=True)
class Processes:
    """The processes that have joined: this one is ``index`` of ``count``, from 0."""

    index: int
    count: int

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every process, by index. All must call this, and equally often.

        Values travel as JSON: numbers, strings, lists, dictionaries with strings as keys; numbers
        and arrays of NumPy and JAX become Python's numbers and lists. This is for results; large
        arrays are for JAX's collectives.
        """
        return [said[0] for said in self._meet([value])]

    def result(self, record: Mapping[str, Any]) -> None:
        """Leave this process's record, as JSON, for ``jspeed launch --results FILE``; the last one
        counts.

        The launcher adds ``rank`` and ``exit_code``. Without ``--results`` this does nothing.
        """
        write_result(_json(dict(record)))

    def _meet(self, mine: list[Any]) -> list[Any]:
        """Wait for all, at the next :meth:`gather` or, with an empty list, at the end; return what
        each brought."""
        if self.count > 1 and distributed.client() is None:
            raise RuntimeError("the block of jspeed.join() has ended; call gather() inside")
        everyone = [json.loads(text) for text in distributed.gather("gather or end", _json(mine))]
        gone = [str(index) for index, said in enumerate(everyone) if not said]
        if 0 < len(gone) < self.count:
            raise BadInput(
                "gather() is called by some processes while others are at the end of jspeed.join()"
                f" (process {', '.join(gone)}); call it on all processes, equally often"
            )
        return everyone


def _json(value: Any) -> str:
    def plain(value: Any) -> Any:
        if hasattr(value, "tolist"):  # NumPy's and JAX's
            return value.tolist()
        raise TypeError(f"{value!r} is no JSON: a {type(value).__name__}")

    return json.dumps(value, default=plain)


@contextmanager
def join() -> Iterator[Processes]:
    """:func:`jspeed.join`."""
    open_closed_streams()
    with exit_codes():  # half of a launcher's variables
        find_rank(os.environ)
    with joined() as processes:
        yield processes
        if processes.count > 1 and (lost := stdout_error()):
            raise BadInput(f"standard output could not be written ({lost.strerror}); free space")


class Joined:
    """The processes of a run (:class:`jspeed.base.processes.Group`)."""

    def __init__(self) -> None:
        self.index, self.count = distributed.process_index(), distributed.process_count()

    gather = staticmethod(distributed.gather)
    first = staticmethod(distributed.first)
    on_failure = staticmethod(failure.on_failure)

    def result(self, record: Mapping[str, Any]) -> None:
        """Leave ``record`` for ``jspeed launch --results``."""
        write_result(json.dumps(record))

    def stop(self) -> Stop:
        """Return what stops all after the same step."""
        return GracefulStop()


@contextmanager
def joined(
    coordinator: str | None = None, processes: int | None = None, process_id: int | None = None
) -> Iterator[Processes]:
    """Join as :func:`distributed.initialise` does and, with several processes, end together;
    process 0 alone prints."""
    end: SystemExit | None = None
    with failure.fail_together():
        if distributed.process_count() > 1:
            raise BadInput(
                "the processes have joined before; a program joins once, around all that it does"
                " with JAX"
            )
        distributed.initialise(coordinator, processes, process_id)
        together = Processes(distributed.process_index(), distributed.process_count())
        if together.count > 1:
            stdout_of_process_0_only(together.index == 0)
        use(Joined())
        failure.watch()
        try:
            yield together
        except SystemExit as asked:
            if asked.code:
                raise
            end = asked
        together._meet([])
    if end:
        raise end
