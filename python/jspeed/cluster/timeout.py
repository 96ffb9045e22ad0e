"""Calls with a time limit."""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def with_timeout(seconds: float, function: Callable[[], Result]) -> Result:
    """Return what ``function`` returns or raise what it raises; :class:`TimeoutError` after ``seconds``.

    It runs in a thread, so that Ctrl-C and SIGTERM are handled even while it waits inside a library; after a timeout
    that thread is left running.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]
