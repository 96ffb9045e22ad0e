"""When one process fails or stops answering, all exit: one error message from process 0, the exit code of the cause.

Two threads of every process watch the others and exit on their own, because the main thread may be blocked in a
collective whose peer is dead. One polls the connections to the others, which close when a process is killed. The other
sends heartbeats and reads messages. JAX has a heartbeat too, which aborts with a C++ stack trace; ours is sooner.
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

from jspeed.cluster.distributed import (
    barrier,
    client,
    connections,
    is_alone,
    process_count,
    process_index,
    silence_seconds,
)
from jspeed.cluster.rendezvous import is_open
from jspeed.cluster.timeout import with_timeout
from jspeed.errors import FAULT, BadInput, say

PEER_LOST = 75  # sysexits.h's EX_TEMPFAIL: a failure that may pass
TICK = 0.3  # seconds between two heartbeats
_MESSAGES, _ALIVE = "jspeed/told/", "jspeed/alive/"
_FAILURE, _SAID = "failure", "jspeed/failure-said"
LOST_WORDS = ("gloo", "Gloo", "onnection", "heartbeat", "UNAVAILABLE", "another task died", "NCCL", "barrier")

_calls: dict[str, Callable[[str], None]] = {}
_threads: list[threading.Thread] = []
_over = threading.Event()
_cleanups: list[Callable[[], None]] = []
_leaving = threading.Lock()


@contextmanager
def ends_all() -> Iterator[None]:
    """Exit all processes when one raises: one error message from process 0, the exit code of the cause.

    In a single process exceptions propagate as usual.
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
    """Start the two threads, once the processes have joined: exit when another process fails or stops answering."""
    if client() is not None and not _threads:
        when_told(_FAILURE, lambda text: _obey())
        _start(_listen)
        _start(_look)


def when_told(name: str, call: Callable[[str], None]) -> None:
    """Run ``call`` once, in its own thread, on the first value that any process sends by :func:`tell` as ``name``."""
    _calls[name] = call


def tell(name: str, value: str) -> None:
    """Send ``value`` as ``name`` to all processes, this one included (:func:`when_told`); the first value counts."""
    with suppress(jax.errors.JaxRuntimeError):  # another process was first
        client().key_value_set(_MESSAGES + name, value)


def at_failure(cleanup: Callable[[], None]) -> Callable[[], None]:
    """Register ``cleanup`` for an exit that another process causes; returns a function that removes it again."""
    _cleanups.append(cleanup)
    return lambda: _cleanups.remove(cleanup)


def pause(seconds: float) -> bool:
    """Sleep in a thread that :func:`when_told` started; return whether the program, and so the thread, must end."""
    return _over.wait(seconds)


def _start(function: Callable[..., None], *arguments: Any) -> None:
    def run() -> None:
        with suppress(jax.errors.JaxRuntimeError):  # process 0 has gone, which _look notices too
            function(*arguments)

    _threads.append(threading.Thread(target=run, daemon=True))
    _threads[-1].start()


def _listen() -> None:
    """Send heartbeats and poll for messages; a thread blocked inside JAX would abort the interpreter at exit."""
    store, silence, heard = client(), silence_seconds(), set[str]()
    beats = {str(index): ("", 0) for index in range(process_count())}  # last heartbeat of each, and our tick then

    def heartbeat(tick: int) -> None:
        store.key_value_set(f"{_ALIVE}{process_index()}", str(tick), allow_overwrite=True)
        for key, value in store.key_value_dir_get(_MESSAGES):
            name = key.removeprefix(_MESSAGES)
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
            with_timeout(silence, lambda: heartbeat(tick))  # noqa: B023
        except TimeoutError:
            _leave(_silent(0, silence), PEER_LOST)
        except jax.errors.JaxRuntimeError:
            continue  # may pass; if not, the others miss this process's heartbeat
        for index, (_, last) in beats.items():
            if process_index() == 0 and (tick - last) * TICK > silence:
                _fail(_silent(int(index), silence), PEER_LOST)


def _look() -> None:
    """Exit when the process at the far end of a connection has exited."""
    ends = select.poll()
    for connection in connections.values():
        ends.register(connection, select.POLLIN)
    while not _over.is_set():
        ends.poll(1000 * TICK)
        for index, connection in connections.items():
            if not is_open(connection) and not _over.is_set():
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
        _over.wait(2)  # one of the threads may know which process it was
        first = text.splitlines()[0][:200]
        return f"another process has ended, or cannot be reached any more ({first})", PEER_LOST
    traceback.print_exception(error)
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}", FAULT


def _fail(text: str, code: int) -> None:
    """Send the failure to all processes, let process 0 report it, and exit without waiting for anyone to finish."""
    index = process_index()
    message = json.dumps({"text": f"process {index}: {text}" if index else text, "code": code})
    if client() is not None:  # else there are no others yet
        with suppress(TimeoutError, jax.errors.JaxRuntimeError):
            with_timeout(5, lambda: tell(_FAILURE, message))
            with_timeout(10, _obey)
    _leave(text, code)


def _obey() -> None:
    """Exit as the first failure that was sent demands."""
    store = client()
    failure = json.loads(store.blocking_key_value_get(_MESSAGES + _FAILURE, 5_000))
    if process_index():
        # Process 0 reports it; it also serves the store, so it exits last.
        with suppress(jax.errors.JaxRuntimeError):
            store.blocking_key_value_get(_SAID, 5_000)
            _leave(None, failure["code"])
        _leave(failure["text"], failure["code"])
    with _leaving:
        say(f"error: {failure['text']}")
        store.key_value_set(_SAID, "")
        for _ in range(50):
            if not any(map(is_open, connections.values())):
                break
            threading.Event().wait(0.1)
        _leave(None, failure["code"], locked=True)


def _leave(text: str | None, code: int, locked: bool = False) -> None:
    """Exit at once, without JAX's shutdown barrier and without destructors of a half-initialised service."""
    if not locked:
        _leaving.acquire()
    for cleanup in _cleanups:
        with suppress(OSError):
            cleanup()
    if text is not None:
        say(f"error: {text}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
