"""Signals that end a program early: which ones, that handlers are put back, and other threads."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jspeed.base.signals import ENDINGS, WARNINGS, handled
from jspeed.cluster.launch import _watch
from jspeed.run.train import sigterm_is

NAMES = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGPWR")


@pytest.mark.parametrize("name", NAMES)
def test_what_schedulers_and_terminals_send_ends_a_run_in_order(name):
    number, called = getattr(signal, name), []
    before = signal.getsignal(number)
    with sigterm_is(lambda: called.append(name)):
        os.kill(os.getpid(), number)
    assert called == [name] and signal.getsignal(number) is before
    assert number in (*ENDINGS, *WARNINGS)


def test_handlers_are_put_back_whatever_happens():
    def mine(number, frame):
        raise AssertionError

    usual = signal.signal(signal.SIGUSR2, mine)
    try:
        with pytest.raises(KeyError), handled((signal.SIGUSR2,), lambda *_: None):
            assert signal.getsignal(signal.SIGUSR2) is not mine
            raise KeyError
        assert signal.getsignal(signal.SIGUSR2) is mine
    finally:
        signal.signal(signal.SIGUSR2, usual)


def test_nohup_is_respected():
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handled((signal.SIGHUP,), lambda *_: pytest.fail("it was ignored")):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, usual)


def test_another_thread_leaves_handlers_alone():
    found = []

    def work():
        with sigterm_is(lambda: None):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.parametrize("number", WARNINGS)
def test_a_launcher_passes_warnings_on_without_killing(number, tmp_path):
    """The child has time to save: no grace period begins."""
    ready = tmp_path / "ready"
    program = f"""
import pathlib, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [{number}])
pathlib.Path({str(ready)!r}).touch()
signal.sigwait([{number}])
time.sleep(0.4)
"""
    child = subprocess.Popen([sys.executable, "-c", program], text=True)
    while not ready.exists():
        time.sleep(0.01)

    class Asked:
        grace = 0.0

    assert _watch(Asked, {0: child}, [int(number)]) == 0
