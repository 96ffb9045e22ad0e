"""Turn exceptions into a one-line error message and an exit code; 2 is bad input."""

import difflib
import gc
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

FAULT = 70  # sysexits.h's EX_SOFTWARE: 1 means that a run ended without reaching its target
# exit code of a process that another's end ends; sysexits.h's EX_TEMPFAIL: a failure that may pass
PEER_LOST = 75


class BadInput(Exception):
    """The user gave something that cannot work.

    Its text is a one-line error message: what and where, what was expected, what was found and what
    to do.
    """


class NoRoom(BadInput):
    """There is too little disk or memory; what was done before is kept."""


class Terminated(SystemExit):
    """SIGTERM, or a scheduler's warning, before there is a state to save: exit code 143."""


# What terminals obey: control characters but newlines and tabs, marks that turn text around, and
# ends of lines of other kinds.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    r"""Return ``text`` with the characters that terminals obey as ``\x1b`` and ``\u202e``; newlines
    and tabs stay."""
    return OBEYED.sub(lambda match: ascii(match[0])[1:-1], text)


def say(line: str) -> None:
    """Print a line on stderr, escaped, in one write: unbuffered, ``print`` makes two, and lines of
    several processes mix."""
    print(f"{escaped(line)}\n", end="", file=sys.stderr, flush=True)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known word closest to ``word``, or an empty
    string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


def first_line(error: BaseException, most: int = 200) -> str:
    """Return the first line of an exception's text, at most ``most`` characters, or its type's name
    without one."""
    lines = str(error).strip().splitlines()
    return lines[0][:most] if lines else type(error).__name__


def type_and_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its text: ``ValueError: not a number``."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


@contextmanager
def exit_codes() -> Iterator[None]:
    """Map exceptions to exit codes: :class:`BadInput` 2 with its message, Ctrl-C 130, all else 70
    with a traceback."""
    try:
        yield
    except BadInput as error:
        say(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        traceback.print_exc()
        sys.exit(FAULT)


def run_script(main: Callable[[], int | None]) -> None:
    """Call a script's ``main`` under :func:`exit_codes` and exit with what it returns.

    When the reader of stdout closes the pipe, printing stops and the work continues. When stdout
    cannot be written, the error is reported at the end and exit code 0 becomes 2.
    """
    from jspeed.base import standard_streams  # which a recipe does not need

    standard_streams.harden_streams()
    try:
        with exit_codes():
            sys.exit(main() or 0)
    except SystemExit as end:
        if lost := standard_streams.stdout_error():
            say(
                f"error: standard output could not be written ({lost.strerror}); free space;"
                " results are in the files"
            )
            end.code = end.code or 2
        gc.freeze()  # else Python looks through all objects again as it ends: 0.2 s of a run
        raise


def writable_folder(path: str | os.PathLike[str], what: str) -> None:
    """Create folder ``path`` if needed and raise :class:`BadInput` when files cannot be made in
    it."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"{what} {os.fspath(path)} cannot be created ({error.strerror}); choose a folder you"
            " can write to"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise BadInput(f"{what} {os.fspath(path)} is read-only; choose a folder you can write to")
