"""Robust standard streams (closed pipes, encodings, C++ logs), printable text, Ctrl-C."""

import errno
import io
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Stream(io.FileIO):
    """Standard output or error. After a write error all output is discarded; ``failure`` keeps the
    error."""

    failure: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Write to the descriptor; discard the data when its reader has gone or its disk is
        full."""
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            self.failure = error
            _discard(self.fileno())
            return len(data)


def _discard(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _nowhere() -> io.TextIOWrapper:
    return open(os.devnull, "w", encoding="utf-8")


_streams: dict[str, Stream] = {}
# As absl and glog write what is for information or a warning: I0000 00:00:1795377060.652110   17481
# cudart_stub.cc:31]
LOGS = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog|[IW]\d{4} \d\d:\d\d:[\d.]+ +\d+"
    rb" \S+:\d+\]"
)


def open_closed_streams() -> None:
    """Let what is printed go nowhere on ``sys.stdout`` and ``sys.stderr`` that the parent process
    has closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, _nowhere())


def harden_streams() -> None:
    """Escape unencodable characters and survive closed pipes on ``sys.stdout`` and ``sys.stderr``.
    Call once."""
    open_closed_streams()
    for name in ("stdout", "stderr"):
        old: io.TextIOWrapper = getattr(sys, name)
        if old is getattr(sys, f"__{name}__"):
            old.flush()
            _streams[name] = stream = Stream(old.fileno(), "w", closefd=False)
            setattr(sys, name, _text(stream, old.encoding, old.line_buffering, old.write_through))


def _text(
    stream: Stream, encoding: str, line_buffering: bool, write_through: bool = False
) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        stream if write_through else io.BufferedWriter(stream),  # type: ignore[type-var]
        encoding=encoding,
        errors="backslashreplace",
        newline="\n",
        line_buffering=line_buffering,
        write_through=write_through,
    )


def stdout_of_process_0_only(first: bool) -> None:
    """Of several processes only process 0, the ``first``, prints to stdout; stderr is unchanged.

    What C++ libraries such as gloo print to stdout is discarded, or goes to stderr with NCCL_DEBUG.
    """
    sys.stdout.flush()
    if first:
        _streams["stdout"] = stream = Stream(os.dup(1), "w")
        sys.stdout = _text(stream, "utf-8", line_buffering=True)
    else:
        sys.stdout = _nowhere()
        _streams.pop("stdout", None)
    if "NCCL_DEBUG" in os.environ:
        os.dup2(2, 1)
    else:
        _discard(1)


def stdout_open() -> bool:
    """Whether standard output can still be written."""
    return "stdout" not in _streams or _streams["stdout"].failure is None


def stdout_error() -> OSError | None:
    """Flush both streams; return the error that made standard output incomplete, unless its reader
    closed the pipe."""
    sys.stdout.flush()
    sys.stderr.flush()
    failure = _streams["stdout"].failure if "stdout" in _streams else None
    return None if failure and failure.errno == errno.EPIPE else failure


def printable(value: object, most: int | None = None) -> str:
    """Return ``value`` without the control characters that XML does not allow, cut after ``most``
    characters."""
    clean = "".join(character if character.isprintable() else " " for character in str(value))
    return (
        clean
        if most is None or len(clean) <= most
        else f"{clean[: most - 1]}\N{HORIZONTAL ELLIPSIS}"
    )


def end_at_ctrl_c() -> None:
    """Let Ctrl-C end this process as it ends any other program, at once and with nothing printed: a
    shell sees 130."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in here, for what has something to finish or to remove;
    the next one ends all.

    Not for imports: an exception would leave modules half made and print a traceback, or crash in
    their C++.
    """
    if (
        signal.getsignal(signal.SIGINT) is not signal.SIG_DFL
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def without_logs() -> Iterator[None]:
    """Hide C++ log lines on a script's standard error, unless JSPEED_DEBUG is set.

    JAX's CUDA plugin writes to the descriptor before its log level can be set. So the descriptor is
    redirected while a plugin is loaded or started. Errors and other lines are printed at the end;
    after an exception, everything is.
    """
    if not _streams or os.environ.get("JSPEED_DEBUG"):
        yield
        return
    try:
        kept, file = os.dup(2), tempfile.TemporaryFile()
    except OSError:  # no standard error, or no room for a file
        yield
        return
    hidden: re.Pattern[bytes] | None = LOGS
    os.dup2(file.fileno(), 2)
    try:
        yield
    except BaseException:
        hidden = None
        raise
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        with file:
            file.seek(0)
            shown = b"".join(line for line in file if hidden is None or not hidden.match(line))
        sys.stderr.write(shown.decode(errors="replace"))
        sys.stderr.flush()
