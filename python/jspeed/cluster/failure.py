"""When one process fails or stops answering, all exit: one error message from process 0, the exit code of the cause.

Two threads of every process watch the others and exit on their own, because the main thread may be blocked in a
collective whose peer is dead. One polls the connections to the others, which close when a process is killed. The other
sends heartbeats and reads messages. JAX has a heartbeat too, which aborts with a C++ stack trace; ours is sooner.
"""

import itertools
import json
import os
import re
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import jax

from jspeed.cluster.distributed import (
    barrier,
    client,
    connections,
    joined_store,
    process_count,
    process_index,
    single_process,
)
from jspeed.cluster.rendezvous import is_open
from jspeed.cluster.timeout import heartbeat_limit, with_timeout
from jspeed.errors import FAULT, BadInput, Terminated, first_line, say

PEER_LOST = 75  # sysexits.h's EX_TEMPFAIL: a failure that may pass
TICK = 0.3  # seconds between two heartbeats
_MESSAGES, _ALIVE = "jspeed/told/", "jspeed/alive/"
_FAILURE, _REPORTED = "failure", "jspeed/failure-said"
CONNECTION_ERRORS = ("gloo", "Gloo", "onnection", "heartbeat", "UNAVAILABLE", "another task died", "NCCL", "barrier")
AROUND = (__name__, "jspeed.cluster.join", "jspeed")  # modules of the frames around a program, which tell it nothing

_calls: dict[str, Callable[[str], None]] = {}
_threads: list[threading.Thread] = []
_over = threading.Event()
_cleanups: list[Callable[[], None]] = []
_exiting = threading.Lock()


@contextmanager
def fail_together() -> Iterator[None]:
    """Exit all processes when one raises: one error message from process 0, the exit code of the cause.

    In a single process exceptions propagate as usual.
    """
    try:
        yield
        if client() is not None:
            barrier("shutdown")  # until here errors of others arrive
            _over.set()
            for thread in _threads:
                thread.join()
            jax.distributed.shutdown()
    except BaseException as error:
        if single_process():
            raise
        text, code = _message_and_code(error)
        # Bad input of process 0 is likely to be everyone's.
        if client() is not None and (process_index() or not isinstance(error, BadInput)):
            text = f"process {process_index()}: {text}"
        _report_and_exit(text, code)


def watch() -> None:
    """Start the two threads, once the processes have joined: exit when another process fails or stops answering."""
    if client() is not None and not _threads:
        on_message(_FAILURE, lambda text: _exit_as_told())
        _start(_heartbeat_loop)
        _start(_watch_connections)


def on_message(name: str, call: Callable[[str], None]) -> None:
    """Run ``call`` once, in its own thread, on the first value that any process sends by :func:`publish` as ``name``.

    A name works once in a program.
    """
    _calls[name] = call


def publish(name: str, value: str) -> None:
    """Send ``value`` as ``name`` to all processes, this one included (:func:`on_message`); the first value counts."""
    with suppress(jax.errors.JaxRuntimeError):  # another process was first
        joined_store().key_value_set(_MESSAGES + name, value)


def on_failure(cleanup: Callable[[], None]) -> Callable[[], None]:
    """Register ``cleanup`` for an exit that another process causes; returns a function that removes it again."""
    _cleanups.append(cleanup)
    return lambda: _cleanups.remove(cleanup)


def sleep_unless_over(seconds: float) -> bool:
    """Sleep in a thread that :func:`on_message` started; return whether the program, and so the thread, must end."""
    return _over.wait(seconds)


def _start(function: Callable[..., None], *arguments: Any) -> None:
    def run() -> None:
        with suppress(jax.errors.JaxRuntimeError):  # process 0 has gone, which _watch_connections notices too
            function(*arguments)

    _threads.append(threading.Thread(target=run, daemon=True))
    _threads[-1].start()


def _heartbeat_loop() -> None:
    """Send heartbeats and poll for messages; a thread blocked inside JAX would abort the interpreter at exit."""
    store, silence, heard = joined_store(), heartbeat_limit(), set[str]()
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
            with_timeout(silence, partial(heartbeat, tick))
        except TimeoutError:
            _exit(_no_heartbeat(0, silence), PEER_LOST)
        except jax.errors.JaxRuntimeError:
            continue  # may pass; if not, the others miss this process's heartbeat
        for index, (_, last) in beats.items():
            if process_index() == 0 and (tick - last) * TICK > silence:
                _report_and_exit(_no_heartbeat(int(index), silence), PEER_LOST)


def _watch_connections() -> None:
    """Exit when the process at the other end of a connection has exited."""
    poller = select.poll()
    for connection in connections.values():
        poller.register(connection, select.POLLIN)
    while not _over.is_set():
        poller.poll(1000 * TICK)
        for index, connection in connections.items():
            if not is_open(connection) and not _over.is_set():
                text = f"process {index} exited without an error message; see its output or its launcher's"
                if process_index():
                    _exit(text, PEER_LOST)
                _report_and_exit(text, PEER_LOST)


def _no_heartbeat(index: int, seconds: float) -> str:
    return f"no heartbeat from process {index} for {seconds:g} s: it was stopped, hangs, or is unreachable"


def _message_and_code(error: BaseException) -> tuple[str, int]:
    if isinstance(error, BadInput):
        return str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, Terminated):
        return "terminated", 143
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return f"sys.exit({error.code})", error.code % 256 or 1
        return str(error.code), 1
    first = first_line(error)
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) or re.match("[A-Z_]+: ", first)  # some are a ValueError
    if of_jax and any(word in str(error) for word in CONNECTION_ERRORS):
        _over.wait(2)  # one of the threads may know which process it was
        return f"lost the connection to another process ({first})", PEER_LOST
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_globals.get("__name__") in AROUND:
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace))
    return f"{type(error).__name__}: {first}", FAULT


def _report_and_exit(text: str, code: int) -> NoReturn:
    """Send the failure to all processes, let process 0 report it, and exit without waiting for anyone to finish."""
    message = json.dumps({"text": text, "code": code})
    if client() is not None:  # else there are no others yet
        with suppress(TimeoutError, jax.errors.JaxRuntimeError):
            with_timeout(5, lambda: publish(_FAILURE, message))
            with_timeout(10, _exit_as_told)
    _exit(text, code)


def _exit_as_told() -> NoReturn:
    """Exit with the code of the first failure that was sent; process 0 prints its text."""
    store = joined_store()
    failure = json.loads(store.blocking_key_value_get(_MESSAGES + _FAILURE, 5_000))
    if process_index():
        # Process 0 reports it; it also serves the store, so it exits last.
        with suppress(jax.errors.JaxRuntimeError):
            store.blocking_key_value_get(_REPORTED, 5_000)
            _exit(None, failure["code"])
        _exit(failure["text"], failure["code"])
    with _exiting:
        say(f"error: {failure['text']}")
        store.key_value_set(_REPORTED, "")
        for _ in range(50):
            if not any(map(is_open, connections.values())):
                break
            threading.Event().wait(0.1)
        _exit(None, failure["code"], locked=True)


def _exit(text: str | None, code: int, locked: bool = False) -> NoReturn:
    """Exit at once, without JAX's shutdown barrier and without destructors of a half-initialised service."""
    if not locked:
        _exiting.acquire()
    for cleanup in _cleanups:
        with suppress(Exception):  # whatever it is, this process must exit
            cleanup()
    if text is not None:
        say(f"error: {text}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
