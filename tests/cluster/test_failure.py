"""Time limits, graceful stop and exit codes of failures, in one process with a dictionary as the
shared store."""

import socket
import threading
import time
from contextlib import suppress

import jax
import pytest

from jspeed.base.processes import with_timeout
from jspeed.cluster import distributed, failure, graceful_stop
from jspeed.cluster.timeout import heartbeat_limit, wait_limit
from jspeed.errors import FAULT, BadInput, Terminated

from ..multi_process import said


def test_a_call_with_a_time_limit():
    assert with_timeout(10, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        with_timeout(10, lambda: 1 / 0)
    with pytest.raises(TimeoutError):
        with_timeout(0.05, lambda: threading.Event().wait(10))


@pytest.mark.parametrize(
    ("limit", "name", "bad"),
    [
        (heartbeat_limit, "JSPEED_HEARTBEAT_SECONDS", ["0.5", "nan"]),
        (wait_limit, "JSPEED_WAIT_SECONDS", ["0", "x"]),
    ],
)
def test_a_limit_that_cannot_work_is_refused(monkeypatch, limit, name, bad):
    monkeypatch.setenv(name, "6")
    assert limit() == 6
    for text in bad:
        monkeypatch.setenv(name, text)
        assert name in said(limit) and repr(text) in said(limit)
    monkeypatch.delenv(name)
    assert limit() >= 60


class Store(dict):
    """The store as JAX's client has it; barriers end with JAX's error after their own limit."""

    def key_value_set(self, key, value):
        self[key] = value

    def key_value_dir_get(self, key):
        return [(name, value) for name, value in sorted(self.items()) if name.startswith(key)]

    def wait_at_barrier(self, barrier_id, timeout_in_ms):
        time.sleep(timeout_in_ms / 1000)
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out")


def test_our_limit_for_a_value_expires_before_that_of_jax(monkeypatch):
    monkeypatch.setattr(distributed, "client", Store)
    monkeypatch.setattr(distributed, "LIMIT", 0.1)
    monkeypatch.setattr(distributed, "JAX_LIMIT", 2)
    monkeypatch.setattr(distributed, "process_index", lambda: 1)
    waited = "process 1 waited 0.1 s for the others "
    assert said(lambda: distributed.barrier("here")).startswith(waited + "(here); ")
    assert said(lambda: distributed.gather("there", "")).startswith(waited + "(there); ")
    assert distributed.JAX_LIMIT > distributed.LIMIT


def test_processes_stop_after_the_furthest_step_of_any(monkeypatch):
    """Process 1 has published that it is in step 7 when process 0 is asked to stop in step 5."""
    store = Store({"jspeed/steps/1": "7"})
    monkeypatch.setattr(graceful_stop, "client", lambda: store)
    monkeypatch.setattr(graceful_stop, "process_count", lambda: 2)
    stop = graceful_stop.GracefulStop()
    monkeypatch.setattr(graceful_stop, "publish", lambda name, why: stop._agree(why))
    assert stop.reached(5) is None
    stop.request("terminated")
    stop.request("interrupted")
    assert stop.reached(6) is None and store["jspeed/steps/0"] == "5"
    assert stop.reached(7) is None and stop.reached(8) == "terminated"


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (BadInput("no such file"), "no such file", 2),
        (KeyboardInterrupt(), "interrupted", 130),
        (Terminated(143), "terminated", 143),
        (SystemExit(3), "sys.exit(3)", 3),
        (SystemExit(256), "sys.exit(256)", 1),
        (SystemExit("no such layer"), "no such layer", 1),
        (
            jax.errors.JaxRuntimeError("Gloo: reset\nby peer"),
            "lost the connection to another process (Gloo: reset)",
            75,
        ),
        (jax.errors.JaxRuntimeError("INTERNAL: odd"), "JaxRuntimeError: INTERNAL: odd", FAULT),
        (
            ValueError("UNKNOWN: Gloo reset"),
            "lost the connection to another process (UNKNOWN: Gloo reset)",
            75,
        ),
        (ValueError("no connection"), "ValueError: no connection", FAULT),
        (ValueError(), "ValueError: ValueError", FAULT),
    ],
)
def test_what_an_exception_becomes(monkeypatch, error, text, code):
    monkeypatch.setattr(failure._over, "wait", lambda seconds: None)
    assert failure._message_and_code(error) == (text, code)


@pytest.fixture
def peer(monkeypatch):
    """This is process 1, which listens to process 0: the other end of the connection, and the exits
    of this process."""
    exits = []

    def end(*given):
        exits.append(given)
        raise SystemExit

    for name, value in dict(
        _received={}, _handlers={}, _lost=set(), _threads=[], _exit=end
    ).items():
        monkeypatch.setattr(failure, name, value)
    monkeypatch.setattr(failure, "TICK", 0.05)
    monkeypatch.setattr(failure, "process_index", lambda: 1)
    monkeypatch.setenv("JSPEED_HEARTBEAT_SECONDS", "2")
    near, far = socket.socketpair()
    with near, far:
        yield near, far, exits


def listen(near):
    with suppress(SystemExit):
        failure._listen(0, near)


def test_a_message_in_parts_is_one_also_before_its_call(peer):
    near, far, exits = peer
    far.sendall(b'[]\n["st')
    threading.Timer(
        0.2, lambda: (far.sendall(b'op", "one"]\n["stop", "two"]\n'), far.shutdown(socket.SHUT_WR))
    ).start()
    listen(near)
    assert exits == [
        ("process 0 exited without an error message; see its output or its launcher's", 75)
    ]
    heard = []
    failure.on_message("stop", heard.append)
    failure._threads[0].join(10)
    assert heard == ["one"]


def test_a_failure_that_is_told_ends_a_process_without_a_word(peer):
    near, far, exits = peer
    with suppress(SystemExit):
        failure._exit_as_told('{"text": "no", "code": 3}')
    assert exits == [(None, 3)]


def test_silence_is_a_failure(peer):
    near, far, exits = peer
    listening = threading.Thread(target=listen, args=(near,))
    listening.start()
    for _ in range(8):  # longer than the limit, but never silent
        far.sendall(b"[]\n")
        time.sleep(0.3)
    assert not exits
    listening.join(10)
    assert exits == [
        ("no heartbeat from process 0 for 2 s: it was stopped, hangs, or is unreachable", 75)
    ]
