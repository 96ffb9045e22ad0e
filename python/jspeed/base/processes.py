"""The processes of a program: what a run asks of them, and the one process that most runs are.

:mod:`jspeed.cluster` makes a group of several. Whoever joins them says so by :func:`use`.
"""

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from jspeed.errors import BadInput

Result = TypeVar("Result")


class Stop:
    """Lets a signal, or another process, end the loop between two steps."""

    def __init__(self) -> None:
        self._why: str | None = None

    def request(self, why: str) -> None:
        """Request a stop; ``why`` is the status to record. Safe in a signal handler; the first
        request counts."""
        self._why = self._why or why

    def reached(self, step: int) -> str | None:
        """Report that ``step`` is about to begin; return why to stop instead, on all processes at
        the same step."""
        return self._why


class Group(Protocol):
    """The processes of one program: this one is ``index`` of ``count``, from 0."""

    index: int
    count: int

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return the ``value``, any JSON, of every process, by index; all call this as often with a
        ``name``."""
        ...

    def first(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Return what ``make`` returns on process 0, which alone calls it; all call this as often
        with a ``name``."""
        ...

    def result(self, record: Mapping[str, Any]) -> None:
        """Leave this process's ``record`` for whoever launched it."""
        ...

    def stop(self) -> Stop:
        """Return what ends a loop on all processes after the same step."""
        ...

    def on_failure(self, cleanup: Callable[[], None]) -> Callable[[], None]:
        """Register ``cleanup`` for an exit that another process causes; returns a function that
        removes it again."""
        ...


class Processes(Protocol):
    """The processes that :func:`jspeed.join` has made one: this one is ``index`` of ``count``."""

    index: int
    count: int

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every process, by index."""
        ...

    def result(self, record: Mapping[str, Any]) -> None:
        """Leave this process's ``record`` for whoever launched it."""
        ...


class Alone:
    """A single process, which meets nobody."""

    index = 0
    count = 1

    def gather(self, name: str, value: Any) -> list[Any]:
        """:meth:`Group.gather`: its own."""
        return [value]

    def first(self, name: str, make: Callable[[], bytes]) -> bytes:
        """:meth:`Group.first`: its own."""
        return make()

    def result(self, record: Mapping[str, Any]) -> None:
        """:meth:`Group.result`: nobody asks."""

    def stop(self) -> Stop:
        """:meth:`Group.stop`."""
        return Stop()

    def on_failure(self, cleanup: Callable[[], None]) -> Callable[[], None]:
        """:meth:`Group.on_failure`: there is no other."""
        return lambda: None


_group: Group = Alone()


def use(group: Group) -> None:
    """Let this program be one of the processes of ``group``."""
    global _group
    _group = group


def group() -> Group:
    """Return the processes of this program."""
    return _group


def index() -> int:
    """Index of this process, without asking JAX for devices."""
    return _group.index


def count() -> int:
    """Number of processes, without asking JAX for devices."""
    return _group.count


def gather(name: str, value: Any) -> list[Any]:
    """:meth:`Group.gather`."""
    return _group.gather(name, value)


def broadcast(name: str, value: Any) -> Any:
    """Return process 0's ``value``, any JSON, on every process: of a :func:`gather`, the first."""
    return gather(name, value)[0]


def first(name: str, make: Callable[[], bytes]) -> bytes:
    """:meth:`Group.first`."""
    return _group.first(name, make)


def on_failure(cleanup: Callable[[], None]) -> Callable[[], None]:
    """:meth:`Group.on_failure`."""
    return _group.on_failure(cleanup)


def require_equal(facts: Mapping[str, Any]) -> None:
    """Check that ``facts`` are equal on all processes, and wait for all; BadInput names the first
    that differs."""
    if count() == 1:
        return
    mine = json.loads(json.dumps(facts, default=str))
    first = broadcast("facts", mine)
    for name, value in mine.items():
        if first.get(name) != value:
            raise BadInput(
                f"{name} is {value} here but {first.get(name)} on process 0; start all processes"
                " with the same command, code and data"
            )
    gather("facts agree", True)


def with_timeout(seconds: float, function: Callable[[], Result]) -> Result:
    """Return what ``function`` returns or raise what it raises; :class:`TimeoutError` after
    ``seconds``.

    It runs in a thread, so that Ctrl-C and SIGTERM are handled even while it waits inside a
    library; after a timeout that thread is left running.
    """
    ended: Future[Result] = Future()

    def call() -> None:
        try:
            ended.set_result(function())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return ended.result(seconds)
