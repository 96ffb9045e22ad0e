"""Several processes as one program: how they find each other, what they share, and how an error on one ends all.

Who a process is says :mod:`jspeed.parallel.place`. For a process alone every function here does nothing.
"""

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import jax

from jspeed.errors import BadInput
from jspeed.parallel.place import Place, find_place, local_devices

WAIT_SECONDS = "JSPEED_WAIT_SECONDS"  # how long processes wait for each other at the start
HEARTBEAT_SECONDS = "JSPEED_HEARTBEAT_SECONDS"  # how long one may be silent before it counts as dead
PEER_LOST, FAULT = 75, 70  # sysexits.h: a failure that may pass (EX_TEMPFAIL), an internal one (EX_SOFTWARE)
_FAILURE, _HEARD = "jspeed/failure", "jspeed/failure-heard"


_place: Place | None = None
_joined = False
_cleanups: list[Callable[[], None]] = []
_leaving = threading.Lock()
_threads: list[threading.Thread] = []
_over = threading.Event()


def initialise(coordinator: str | None = None, processes: int | None = None, process_id: int | None = None) -> None:
    """Join the other processes, once; later calls do nothing. Call before anything asks JAX for devices.

    Raises :class:`BadInput` when they have not all come after ``JSPEED_WAIT_SECONDS`` (120).
    """
    global _place, _joined
    place = find_place(os.environ, coordinator, processes, process_id)
    if _place is not None or place is None:
        return
    _place = place
    _check_port(place)
    # With the service on, SIGTERM would be noted by JAX and then ignored.
    jax.config.update("jax_enable_preemption_service", False)
    wait = float(os.environ.get(WAIT_SECONDS, 120))
    facts: dict[str, Any] = {"local_device_ids": local_devices(place, os.environ)}
    if place.coordinator is not None:
        facts |= {"coordinator_address": place.coordinator, "num_processes": place.count, "process_id": place.index}
        facts |= {"cluster_detection_method": "deactivate"}
    silence = int(os.environ.get(HEARTBEAT_SECONDS, 60))

    def join() -> bool:
        # JAX ends the process when its own wait is over, so that wait is made longer than ours.
        jax.distributed.initialize(
            **facts, initialization_timeout=86_400, heartbeat_timeout_seconds=silence, shutdown_timeout_seconds=silence
        )
        return True

    if not _within(wait, join):
        where = f"at {place.coordinator}" if place.coordinator else "where the cluster's variables say process 0 is"
        raise BadInput(
            f"process {place.index} of {place.count} waited {wait:g} s for the others {where} and they have not all "
            f"come; start them, check address, port and firewall, or wait longer ({WAIT_SECONDS})"
        )
    _joined = True
    when_told(_FAILURE, lambda text: _hear())


def _check_port(place: Place) -> None:
    """Raise :class:`BadInput` when process 0 cannot listen; JAX's own service would crash."""
    if place.index or place.coordinator is None:
        return
    port = int(place.coordinator.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise BadInput(
                f"process 0 cannot listen on port {port} ({error.strerror}); another program, or another run, has it: "
                "choose another port"
            ) from None


def process_count() -> int:
    """Number of processes, without asking for devices."""
    return _place.count if _place else 1


def process_index() -> int:
    """Index of this process, without asking for devices."""
    return _place.index if _place else 0


def client() -> Any:
    """The key-value store that all processes share, or None for a process alone. JAX keeps it in a private module."""
    from jax._src import distributed

    return distributed.global_state.client if _joined else None


def share(name: str, value: str, seconds: float = 600) -> str:
    """Return process 0's ``value`` on every process. Use each ``name`` once."""
    store = client()
    if store is None:
        return value
    if process_index() == 0:
        store.key_value_set(f"jspeed/{name}", value)
        return value
    return store.blocking_key_value_get(f"jspeed/{name}", int(1000 * seconds))


def same_everywhere(facts: Mapping[str, Any]) -> None:
    """Return when all processes have given the ``facts`` of process 0; raises :class:`BadInput` with the first other.

    It also is a barrier: no process passes before all have come.
    """
    store = client()
    if store is None:
        return
    mine = json.loads(json.dumps(facts, default=str))
    first = json.loads(share("facts", json.dumps(mine)))
    for name, value in mine.items():
        if first.get(name) != value:
            raise BadInput(
                f"{name} is {value} here but {first.get(name)} on process 0; start all processes with the same "
                "command, code and data"
            )
    store.wait_at_barrier("jspeed/facts-agree", 600_000)


def when_told(name: str, call: Callable[[str], None]) -> None:
    """Have ``call`` run, in a thread of its own, on the value that any process gives the key ``name``."""

    def listen() -> None:
        # It asks again and again: a thread that waits inside JAX would abort the interpreter's exit.
        while not _over.wait(0.3):
            try:
                value = client().key_value_try_get(name)
            except jax.errors.JaxRuntimeError as error:
                if "NOT_FOUND" in str(error):
                    continue
                return  # process 0 is gone; the next collective, or JAX's heartbeat, ends this process
            return call(value)

    thread = threading.Thread(target=listen, daemon=True, name=name)
    _threads.append(thread)
    thread.start()


def _farewell() -> None:
    """Stop listening, and leave when all do."""
    _over.set()
    for thread in _threads:
        thread.join()
    jax.distributed.shutdown()


def at_failure(cleanup: Callable[[], None]) -> Callable[[], None]:
    """Have ``cleanup`` called should another process's error end this one; returns what takes that back."""
    _cleanups.append(cleanup)
    return lambda: _cleanups.remove(cleanup)


@contextmanager
def ends_all() -> Iterator[None]:
    """Make an exception on any process the end of all: one sentence from process 0, the exit code of its cause.

    A process alone is left alone: its exceptions go on.
    """
    try:
        yield
        if _joined:
            _farewell()
    except BaseException as error:
        if _place is None:
            raise
        _fail(*_described(error))


def _described(error: BaseException) -> tuple[str, int]:
    if isinstance(error, BadInput):
        return str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, SystemExit):
        return "ended before it began", error.code if isinstance(error.code, int) else 1
    text = str(error)
    lost = ("gloo", "Gloo", "onnection", "heartbeat", "UNAVAILABLE", "another task died", "NCCL", "barrier")
    if isinstance(error, jax.errors.JaxRuntimeError) and any(word in text for word in lost):
        first = text.splitlines()[0][:200]
        return f"another process has ended, or cannot be reached any more ({first})", PEER_LOST
    traceback.print_exception(error)
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}", FAULT


def _fail(text: str, code: int) -> None:
    """Tell the other processes, have process 0 say it, and exit without waiting for anyone to finish."""
    store, index = client(), process_index()
    if store is None:  # the others have never been met
        _leave(text, code)
    told = json.dumps({"text": f"process {index}: {text}" if index else text, "code": code})

    def tell() -> bool:
        with suppress(jax.errors.JaxRuntimeError):  # another process was first
            store.key_value_set(_FAILURE, told)
        return True

    if not _within(5, tell):
        _leave(text, code)
    _within(10, _hear)
    _leave(text, code)


def _hear() -> None:
    store = client()
    failure = json.loads(store.blocking_key_value_get(_FAILURE, 5_000))
    if process_index():
        # Process 0 says it; it is also the store, so it leaves last.
        with suppress(jax.errors.JaxRuntimeError):
            store.blocking_key_value_get(_HEARD, 5_000)
            _leave(None, failure["code"])
        _leave(failure["text"], failure["code"])
    with _leaving:
        print(f"error: {failure['text']}", file=sys.stderr, flush=True)
        store.key_value_set(_HEARD, "")
        threading.Event().wait(1)
        _leave(None, failure["code"], held=True)


def _leave(text: str | None, code: int, held: bool = False) -> None:
    """Exit now: neither JAX's own farewell, which waits for every process, nor destructors of a half-made service."""
    if not held:
        _leaving.acquire()
    for cleanup in _cleanups:
        with suppress(OSError):
            cleanup()
    if text is not None:
        print(f"error: {text}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return what ``function`` returns, or None if it takes longer or fails as unreachable; Ctrl-C ends the wait."""
    results: list[Any] = []

    def call() -> None:
        with suppress(jax.errors.JaxRuntimeError):
            results.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
