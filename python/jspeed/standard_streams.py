"""Robust standard streams (closed pipes, encodings, C++ logs), escaped control characters, Ctrl-C during imports."""

import atexit
import errno
import io
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


class Stream(io.FileIO):
    """Standard output or error. What cannot be written goes nowhere from then on; ``failure`` says why."""

    failure: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Write to the descriptor, or to nowhere when its reader has gone or its disk is full."""
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            self.failure = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


_streams: dict[str, Stream] = {}
# As absl and glog write what is for information or a warning: I0000 00:00:1795377060.652110   17481 cudart_stub.cc:31]
LOGS = re.compile(rb"WARNING: All log messages before absl::InitializeLog|[IW]\d{4} \d\d:\d\d:[\d.]+ +\d+ \S+:\d+\]")


def guard() -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` take any character and outlive whoever reads them; once, in a script."""
    # While Python itself ends it gives SIGINT back to the system, and a second Ctrl-C then would decide the exit code.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    for name in ("stdout", "stderr"):
        old: io.TextIOWrapper | None = getattr(sys, name)
        if old is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))
        elif old is getattr(sys, f"__{name}__"):
            old.flush()
            raw = _streams[name] = Stream(old.fileno(), "w", closefd=False)
            new = io.TextIOWrapper(
                raw if old.write_through else io.BufferedWriter(raw),  # type: ignore[type-var]
                encoding=old.encoding,
                errors="backslashreplace",
                newline="\n",
                line_buffering=old.line_buffering,
                write_through=old.write_through,
            )
            setattr(sys, name, new)


def only_first_prints(first: bool) -> None:
    """Of several processes let the first alone print to standard output; standard error stays everybody's.

    What libraries in C++ write there, as gloo does of its connections, goes nowhere; with NCCL_DEBUG to standard error.
    """
    sys.stdout.flush()
    if first:
        stream = Stream(os.dup(1), "w")
        raw = io.BufferedWriter(stream)  # type: ignore[type-var]
        sys.stdout = io.TextIOWrapper(
            raw, encoding="utf-8", errors="backslashreplace", newline="\n", line_buffering=True
        )
        _streams["stdout"] = stream
    else:
        sys.stdout = open(os.devnull, "w")
        _streams.pop("stdout", None)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(2 if "NCCL_DEBUG" in os.environ else nowhere, 1)
    os.close(nowhere)


def has_reader() -> bool:
    """Whether somebody still takes what is printed on standard output."""
    return "stdout" not in _streams or _streams["stdout"].failure is None


def lost_output() -> OSError | None:
    """Flush both streams; return why standard output is not complete, unless its reader has just gone away."""
    sys.stdout.flush()
    sys.stderr.flush()
    failure = _streams["stdout"].failure if "stdout" in _streams else None
    return None if failure and failure.errno == errno.EPIPE else failure


def printable(value: object, most: int | None = None) -> str:
    """Return ``value`` without the control characters that XML does not allow, cut after ``most`` characters."""
    clean = "".join(character if character.isprintable() else " " for character in str(value))
    return clean if most is None or len(clean) <= most else f"{clean[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def escaped(text: str) -> str:
    r"""Return ``text`` with its control characters, which terminals obey, as ``\x1b``; newlines and tabs stay."""
    return "".join(f"\\x{ord(c):02x}" if _controls(c) else c for c in text)


def _controls(character: str) -> bool:
    return (character < " " and character not in "\n\t") or "\x7f" <= character <= "\x9f"


def starts(name: str) -> None:
    """Let Ctrl-C end a script (module ``name`` is ``__main__``) at once while it imports: first call of the file.

    In the middle of an import an exception is a traceback, and an exit that cleans up can be a segmentation fault.
    """
    if name == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def started() -> None:
    """From here on Ctrl-C is KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def without_logs() -> Iterator[None]:
    """Keep what C++ libraries log off a script's standard error, unless JSPEED_DEBUG is set.

    JAX's CUDA plugin writes to the descriptor before its log level can be set, so that is what is redirected: for as
    long as a plugin is loaded or started, no longer. Errors and all that is no log come out in the end; where an
    exception does, everything.
    """
    try:
        if not _streams or os.environ.get("JSPEED_DEBUG"):
            raise OSError
        kept, file = os.dup(2), tempfile.TemporaryFile()
    except OSError:  # nothing to hide, no standard error, or no room for a file
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


@contextmanager
def importing() -> Iterator[None]:
    """Let Ctrl-C end a script at once while it imports, as :func:`starts` does, but once it has begun; no C++ logs."""
    ours = bool(_streams) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, leave)
    try:
        with without_logs():
            yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(*_: object) -> None:
    """End with Ctrl-C's exit code and without cleaning up; a handler of SIGINT."""
    os._exit(130)
