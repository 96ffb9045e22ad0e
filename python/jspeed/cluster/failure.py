"""When one process fails or stops answering, all exit: one error message from process 0, the exit
code of the cause.

On its connection of the rendezvous every process but process 0 exchanges heartbeats and messages
with process 0, which passes messages on to all; the connection's end is a death. Threads read it
and exit on their own, because the main thread may be blocked in a collective whose peer is dead.

What JAX offers instead, tried with 0.10.2 on two processes of CPUs, one of them killed or stopped:

- By default the survivor ends by SIGABRT after 13 to 32 lines of C++. The process that died is
  among them as a number or not at all: at once where process 0 was killed, else after
  ``heartbeat_timeout_seconds``, also for a killed worker.
- With ``jax_enable_recoverability`` process 0 is not told of a worker's death and waits for it
  without an end; the workers end by SIGABRT as before when process 0 dies.
- The client's ``missed_heartbeat_callback``, which is private, ends in ``std::bad_cast`` and
  SIGABRT when it is called, with 0.12.0 too.
"""

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import jax

from jspeed.cluster.distributed import barrier, client, connections, process_index, single_process
from jspeed.cluster.timeout import heartbeat_limit
from jspeed.errors import FAULT, PEER_LOST, BadInput, Terminated, first_line, say

TICK = 0.3  # seconds between two heartbeats
_FAILURE = "failure"
CONNECTION_ERRORS = (
    "gloo",
    "Gloo",
    "onnection",
    "heartbeat",
    "UNAVAILABLE",
    "another task died",
    "NCCL",
    "barrier",
)
# modules of the frames around a program, which tell it nothing
AROUND = (__name__, "jspeed.cluster.join", "jspeed")

_handlers: dict[str, Callable[[str], None]] = {}
_received: dict[str, str] = {}  # the first value of each message
_lost: set[int] = set()  # processes that have exited or do not answer
_threads: list[threading.Thread] = []
_over = threading.Event()
_cleanups: list[Callable[[], None]] = []
_exiting, _messages, _sending = threading.Lock(), threading.Lock(), threading.Lock()


@contextmanager
def fail_together() -> Iterator[None]:
    """Exit all processes when one raises: one error message from process 0, the exit code of the
    cause.

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
    """Start the threads, once the processes have joined, that exit when another process fails or
    stops answering."""
    if connections and not _threads:
        on_message(_FAILURE, _exit_as_told)
        _start(_send_heartbeats)
        for index, connection in connections.items():
            _start(_listen, index, connection)


def on_message(name: str, handler: Callable[[str], None]) -> None:
    """Run ``handler`` once, in its own thread, on the first value that any process publishes as
    ``name``.

    A name works once in a program.
    """
    with _messages:
        _handlers[name] = handler
        if name in _received:
            _start(handler, _received[name])


def publish(name: str, value: str) -> None:
    """Send ``value`` as ``name`` to all processes, this one included (:func:`on_message`); the
    first value counts."""
    if process_index():
        _send(connections[0], [name, value])
    else:
        _receive(name, value)


def on_failure(cleanup: Callable[[], None]) -> Callable[[], None]:
    """Register ``cleanup`` for an exit that another process causes; returns a function that removes
    it again."""
    _cleanups.append(cleanup)
    return lambda: _cleanups.remove(cleanup)


def sleep_unless_over(seconds: float) -> bool:
    """Sleep in a thread that :func:`on_message` started; return whether the program, and so the
    thread, must end."""
    return _over.wait(seconds)


def _start(function: Callable[..., None], *arguments: Any) -> None:
    def run() -> None:
        with suppress(jax.errors.JaxRuntimeError):  # process 0 has gone, which _listen notices too
            function(*arguments)

    _threads.append(threading.Thread(target=run, daemon=True))
    _threads[-1].start()


def _send(connection: socket.socket, message: list[str]) -> None:
    with _sending, suppress(OSError):  # _listen notices the end of the connection
        connection.sendall(json.dumps(message).encode() + b"\n")


def _send_heartbeats() -> None:
    while not _over.wait(TICK):
        for connection in connections.values():
            _send(connection, [])


def _listen(index: int, connection: socket.socket) -> None:
    """Receive the messages of process ``index``; exit when it has exited or is silent for too long.

    Silence is counted in ticks of this process: while both are suspended none passes.
    """
    silence, quiet, data = heartbeat_limit(), 0, b""
    text = (
        f"no heartbeat from process {index} for {silence:g} s: it was stopped, hangs, or is"
        " unreachable"
    )
    connection.settimeout(TICK)
    while quiet * TICK <= silence and not _over.is_set():
        try:
            part = connection.recv(4096)
        except TimeoutError:
            quiet += 1
            continue
        except OSError:
            part = b""
        if not part:
            text = (
                f"process {index} exited without an error message; see its output or its launcher's"
            )
            break
        quiet = 0
        *lines, data = (data + part).split(b"\n")
        for message in filter(None, map(json.loads, lines)):
            _receive(*message)
    _lost.add(index)
    if not _over.is_set():
        (_report_and_exit if index else _exit)(text, PEER_LOST)


def _receive(name: str, value: str) -> None:
    """Take a message, the first of its name; process 0 passes it on to all."""
    with _messages:
        if name in _received:
            return
        _received[name] = value
        if process_index() == 0:
            for connection in connections.values():
                _send(connection, [name, value])
        if name in _handlers:
            _start(_handlers[name], value)


def _exit_as_told(value: str) -> NoReturn:
    """Exit with the code of the first failure that was sent; process 0 prints its text."""
    failure = json.loads(value)
    _exit(None if process_index() else failure["text"], failure["code"])


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
    # some are a ValueError
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) or re.match("[A-Z_]+: ", first)
    if of_jax and any(word in str(error) for word in CONNECTION_ERRORS):
        _over.wait(2)  # one of the threads may know which process it was
        return f"lost the connection to another process ({first})", PEER_LOST
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_globals.get("__name__") in AROUND:
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace))
    return f"{type(error).__name__}: {first}", FAULT


def _report_and_exit(text: str, code: int) -> NoReturn:
    """Send the failure to all processes, let process 0 report it, and exit without waiting for
    anyone to finish."""
    if _threads:  # else there are no others yet
        publish(_FAILURE, json.dumps({"text": text, "code": code}))
        time.sleep(10)  # _exit_as_told comes first, with this failure or an earlier one
    _exit(text, code)


def _exit(text: str | None, code: int) -> NoReturn:
    """Exit at once, without JAX's shutdown barrier and without destructors of a half-initialised
    service.

    Process 0 serves JAX and so exits last, unless another one takes more than 5 s.
    """
    _exiting.acquire()  # the first thread exits
    for cleanup in _cleanups:
        with suppress(Exception):  # whatever it is, this process must exit
            cleanup()
    if text is not None:
        say(f"error: {text}")
    sys.stdout.flush()
    sys.stderr.flush()
    until = time.monotonic() + 5
    while (
        process_index() == 0
        and _threads
        and len(_lost) < len(connections)
        and time.monotonic() < until
    ):
        time.sleep(0.05)
    os._exit(code)
