"""An error on one process, or its silence, is the end of all: one sentence from process 0, the exit code of its cause.

Two threads on every process watch the others and end the process from there, because the main thread may be waiting,
deep in a collective, for somebody who will never come. One holds the connections to them, which end when a process is
killed. The other says that this one is alive and hears what others tell. JAX has a heartbeat too, which ends a process
with a stack trace in C++; ours is sooner.
"""

import itertools
import json
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from jspeed.cluster.distributed import barrier, client, is_alone, lines, process_count, process_index, silence_seconds
from jspeed.cluster.rendezvous import is_there
from jspeed.cluster.timeout import with_timeout
from jspeed.errors import FAULT, BadInput, say

PEER_LOST = 75  # sysexits.h's EX_TEMPFAIL: a failure that may pass
TICK = 0.3  # seconds between two looks at what others tell
_TOLD, _ALIVE = "jspeed/told/", "jspeed/alive/"
_FAILURE, _SAID = "failure", "jspeed/failure-said"
LOST_WORDS = ("gloo", "Gloo", "onnection", "heartbeat", "UNAVAILABLE", "another task died", "NCCL", "barrier")

_calls: dict[str, Callable[[str], None]] = {}
_threads: list[threading.Thread] = []
_over = threading.Event()
_cleanups: list[Callable[[], None]] = []
_leaving = threading.Lock()


@contextmanager
def ends_all() -> Iterator[None]:
    """Make an exception on any process the end of all: one sentence from process 0, the exit code of its cause.

    A process alone is left alone: its exceptions go on.
    """
    try:
        yield
        if client() is not None:
            barrier("farewell")  # until here errors of others are heard
            _over.set()
            for thread in _threads:
                thread.join()
            jax.distributed.shutdown()
    except BaseException as error:
        if is_alone():
            raise
        _fail(*_described(error))


def watch() -> None:
    """From now on hear what the others tell, and end when one of them fails or falls silent; once they have joined."""
    if client() is not None and not _threads:
        when_told(_FAILURE, lambda text: _obey())
        _start(_listen)
        _start(_look)


def when_told(name: str, call: Callable[[str], None]) -> None:
    """Have ``call`` run, once, in a thread of its own, on the value that any process has :func:`tell` for ``name``."""
    _calls[name] = call


def tell(name: str, value: str) -> None:
    """Give ``value`` to what each process, this one too, calls :func:`when_told` ``name``; the first value counts."""
    with suppress(jax.errors.JaxRuntimeError):  # another process was first
        client().key_value_set(_TOLD + name, value)


def at_failure(cleanup: Callable[[], None]) -> Callable[[], None]:
    """Have ``cleanup`` called should another process's error end this one; returns what takes that back."""
    _cleanups.append(cleanup)
    return lambda: _cleanups.remove(cleanup)


def pause(seconds: float) -> bool:
    """Wait in a thread that :func:`when_told` made; returns whether the program is over, and the thread must end."""
    return _over.wait(seconds)


def _start(function: Callable[..., None], *arguments: Any) -> None:
    def run() -> None:
        with suppress(jax.errors.JaxRuntimeError):  # process 0 has gone, which _look notices too
            function(*arguments)

    _threads.append(threading.Thread(target=run, daemon=True))
    _threads[-1].start()


def _listen() -> None:
    """Ask again and again: a thread that waits inside JAX would abort the interpreter's exit."""
    store, silence, heard = client(), silence_seconds(), set[str]()
    beats = {str(index): ("", 0) for index in range(process_count())}  # what each said last, and our tick then

    def exchange(tick: int) -> None:
        store.key_value_set(f"{_ALIVE}{process_index()}", str(tick), allow_overwrite=True)
        for key, value in store.key_value_dir_get(_TOLD):
            name = key.removeprefix(_TOLD)
            if name in _calls and name not in heard:
                heard.add(name)
                _start(_calls[name], value)
        if process_index() == 0:
            for key, value in store.key_value_dir_get(_ALIVE):
                index = key.removeprefix(_ALIVE)
                if beats[index][0] != value:
                    beats[index] = value, tick

    for tick in itertools.count(1):
        if _over.wait(TICK):
            return
        try:
            with_timeout(silence, lambda: exchange(tick))  # noqa: B023
        except TimeoutError:
            _leave(_silent(0, silence), PEER_LOST)
        except jax.errors.JaxRuntimeError:
            continue  # a moment's trouble; if it stays, others call this process silent
        for index, (_, last) in beats.items():
            if process_index() == 0 and (tick - last) * TICK > silence:
                _fail(_silent(int(index), silence), PEER_LOST)


def _look() -> None:
    """Wait for the end of a process that this one is connected with, and end with it."""
    ends = select.poll()
    for line in lines.values():
        ends.register(line, select.POLLIN)
    while not _over.is_set():
        ends.poll(1000 * TICK)
        for index, line in lines.items():
            if not is_there(line) and not _over.is_set():
                text = f"process {index} has ended and did not say why; its own output, or its launcher's, may"
                if process_index():
                    _leave(text, PEER_LOST)
                _fail(text, PEER_LOST)


def _silent(index: int, seconds: float) -> str:
    why = "it was stopped, hangs, or its machine cannot be reached"
    return f"process {index} has not been heard of for {seconds:g} s; {why}"


def _described(error: BaseException) -> tuple[str, int]:
    if isinstance(error, BadInput):
        return str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, SystemExit):
        return "ended before it began", error.code if isinstance(error.code, int) else 1
    text = str(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and any(word in text for word in LOST_WORDS):
        _over.wait(2)  # a thread above knows better who it was
        first = text.splitlines()[0][:200]
        return f"another process has ended, or cannot be reached any more ({first})", PEER_LOST
    traceback.print_exception(error)
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}", FAULT


def _fail(text: str, code: int) -> None:
    """Tell the other processes, have process 0 say it, and exit without waiting for anyone to finish."""
    index = process_index()
    told = json.dumps({"text": f"process {index}: {text}" if index else text, "code": code})
    if client() is not None:  # else the others have never been met
        with suppress(TimeoutError, jax.errors.JaxRuntimeError):
            with_timeout(5, lambda: tell(_FAILURE, told))
            with_timeout(10, _obey)
    _leave(text, code)


def _obey() -> None:
    """End as the first failure that was told says."""
    store = client()
    failure = json.loads(store.blocking_key_value_get(_TOLD + _FAILURE, 5_000))
    if process_index():
        # Process 0 says it; it is also the store, so it leaves last.
        with suppress(jax.errors.JaxRuntimeError):
            store.blocking_key_value_get(_SAID, 5_000)
            _leave(None, failure["code"])
        _leave(failure["text"], failure["code"])
    with _leaving:
        say(f"error: {failure['text']}")
        store.key_value_set(_SAID, "")
        for _ in range(50):
            if not any(map(is_there, lines.values())):
                break
            threading.Event().wait(0.1)
        _leave(None, failure["code"], held=True)


def _leave(text: str | None, code: int, held: bool = False) -> None:
    """Exit now: neither JAX's own farewell, which waits for every process, nor destructors of a half-made service."""
    if not held:
        _leaving.acquire()
    for cleanup in _cleanups:
        with suppress(OSError):
            cleanup()
    if text is not None:
        say(f"error: {text}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
