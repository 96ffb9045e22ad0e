"""The signals that end a program early, and handlers for them that are put back."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

# A scheduler sends these some time before it kills: Slurm USR1 (--signal), SGE USR1 and USR2
# (-notify), LSF USR2 and XCPU (its limits of time). Each is also what a kernel sends at a limit.
WARNINGS = tuple(
    getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2", "SIGXCPU") if hasattr(signal, name)
)
# Of who kills, a terminal that is closed, and a machine that loses its power.
ENDINGS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGPWR") if hasattr(signal, name)
)


def may_be_handled() -> bool:
    """Whether this thread may set handlers: a library in somebody's thread leaves theirs alone."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def handled(
    numbers: Sequence[int], call: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Let the signals of these ``numbers`` ``call``, and put what they did before back; outside the
    main thread nothing changes.

    SIGHUP that is ignored stays so: that is what nohup asks for.
    """
    previous = {}
    for number in numbers if may_be_handled() else ():
        before = signal.getsignal(number)
        if number == signal.SIGHUP and before == signal.SIG_IGN:
            continue
        previous[number] = before
        signal.signal(number, call)
    try:
        yield
    finally:
        for number, before in previous.items():
            # of a handler that is not Python's nothing is known
            signal.signal(number, signal.SIG_DFL if before is None else before)
