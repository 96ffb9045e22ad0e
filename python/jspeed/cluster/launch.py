"""Start and watch this node's processes of one run, with torchrun's flags; needs neither jax nor torch.

The processes read their rank from torchrun's variables. When one fails, the others get time to exit, then SIGTERM,
then SIGKILL; then all may be restarted (--max-restarts).
"""

import ctypes
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from jspeed.cluster.rank import visible_gpus
from jspeed.cluster.rendezvous import free_port
from jspeed.errors import BadInput, say
from jspeed.files import write_whole

SETTLE_SECONDS = 5.0  # an error reaches every process in about a second; process 0 reports it last
RESULT = "JSPEED_RESULT"  # the file where a process leaves its result, for --results
MOST_PROCESSES = 65_536  # of all nodes
MOST_SECONDS = 86_400
ENDED = {0, 1, 2, 130, 143}  # exit codes that a restart would not change: done, target missed, bad input, stopped


@dataclass(frozen=True)
class Launch:
    """What to start: flags as torchrun names them."""

    command: tuple[str, ...]
    nnodes: int = 1
    node_rank: int = 0
    nproc_per_node: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29_500
    max_restarts: int = 0
    standalone: bool = False
    prefix: bool = False
    grace: float = 30.0
    results: Path | None = None


def check(launch: Launch, dry: bool = False) -> None:
    """Raise :class:`BadInput` for what cannot be launched; a ``dry`` run may name this machine alone."""
    if launch.nnodes < 1 or not 0 <= launch.node_rank < launch.nnodes:
        raise BadInput(f"--node-rank {launch.node_rank} of --nnodes {launch.nnodes}: give a rank from 0 to nnodes - 1")
    if launch.standalone and launch.nnodes > 1:
        raise BadInput(f"--standalone is one node, but --nnodes is {launch.nnodes}; leave one of them out")
    if launch.nnodes * launch.nproc_per_node > MOST_PROCESSES:
        asked = f"--nnodes {launch.nnodes} --nproc-per-node {launch.nproc_per_node}"
        raise BadInput(f"{asked}: at most {MOST_PROCESSES:,} processes can make a run; give fewer")
    if not 0 < launch.master_port < 65_536:
        raise BadInput(f"--master-port {launch.master_port}: expected a port, a whole number from 1 to 65535")
    if launch.nnodes > 1 and launch.master_addr in ("127.0.0.1", "localhost") and not dry:
        say("launch: --master-addr is this machine itself; other machines cannot reach it")
    if launch.max_restarts < 0:
        raise BadInput(f"--max-restarts {launch.max_restarts}: must be 0 or more")
    if not 0 <= launch.grace <= MOST_SECONDS:
        raise BadInput(f"--grace {launch.grace}: expected seconds from 0 to {MOST_SECONDS}")


def processes_of(text: str) -> int:
    """Return how many processes ``--nproc-per-node`` means. Raises :class:`BadInput`."""
    if text in ("gpu", "auto"):
        count = visible_gpus(os.environ)
        if not count and text == "gpu":
            raise BadInput("--nproc-per-node gpu: this machine shows no GPU; give a number")
        return count or 1
    if not re.fullmatch("[1-9][0-9]{0,4}", text):
        raise BadInput(f"--nproc-per-node {text}: give a number from 1 on, or gpu")
    return int(text)


def variables(launch: Launch, node: int, local: int, attempt: int = 0) -> dict[str, str]:
    """torchrun's environment variables for process ``local`` of ``node``.

    Every attempt has its own port, so that no process joins one of the attempt before.
    """
    count = launch.nproc_per_node
    found: dict[str, int | str] = {
        "RANK": node * count + local,
        "WORLD_SIZE": launch.nnodes * count,
        "LOCAL_RANK": local,
    }
    found |= {"LOCAL_WORLD_SIZE": count, "GROUP_RANK": node, "MASTER_ADDR": launch.master_addr}
    found |= {"MASTER_PORT": launch.master_port + attempt, "TORCHELASTIC_RESTART_COUNT": attempt}
    return {name: str(value) for name, value in found.items()}


def shown(launch: Launch) -> list[str]:
    """Every process of every node as a command to paste into a shell."""
    lines = []
    for node in range(launch.nnodes):
        lines.append(f"# node {node} of {launch.nnodes}")
        for local in range(launch.nproc_per_node):
            pairs = [f"{name}={value}" for name, value in variables(launch, node, local).items()]
            lines.append(shlex.join([*pairs, *launch.command]))
    return lines


def run(launch: Launch) -> int:
    """Start, watch, restart; returns the exit code of the first process that failed (128 + signal), or 0."""
    for attempt in range(launch.max_restarts + 1):
        if launch.standalone:
            launch = replace(launch, master_addr="127.0.0.1", master_port=free_port() - attempt)
        code = Node(launch, attempt).results()
        if code in ENDED or attempt == launch.max_restarts:
            break
        say(f"launch: restart {attempt + 1} of {launch.max_restarts}")
    return code


_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux


def _end_with_launcher() -> None:
    """Have the kernel send this process SIGTERM if the launcher is killed, so that none is orphaned."""
    if _prctl:
        _prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG of <linux/prctl.h>


class Node:
    """The processes of one attempt on this node.

    Signals and ends are events in one queue, so that signal handlers do no work.
    """

    def __init__(self, launch: Launch, attempt: int) -> None:
        self._launch = launch
        self._events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._told: int | None = None
        self._timers: list[threading.Timer] = []
        self._writing = threading.Lock()
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self._previous = {number: signal.signal(number, self._note) for number in signals}
        self._first = launch.node_rank * launch.nproc_per_node
        self._said = tempfile.TemporaryDirectory(prefix="jspeed-results-") if launch.results else None
        self._processes: list[subprocess.Popen[str]] = []
        for local in range(launch.nproc_per_node):
            told = {RESULT: str(Path(self._said.name, str(local)))} if self._said else {}
            self._processes.append(self._start(variables(launch, launch.node_rank, local, attempt) | told))
        self._threads = [threading.Thread(target=self._wait, args=(n,)) for n in range(len(self._processes))]
        for thread in self._threads:
            thread.start()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._events.put(("signal", number))

    def _start(self, extra: Mapping[str, str]) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE if self._launch.prefix else None
        # In a session of its own, so that Ctrl-C reaches it once, through here.
        process = subprocess.Popen(
            self._launch.command,
            env={**os.environ, **extra},
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_end_with_launcher,
        )
        return process

    def _wait(self, number: int) -> None:
        process = self._processes[number]
        pumps = []
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                pumps.append(threading.Thread(target=self._pump, args=(source, target, self._first + number)))
                pumps[-1].start()
        process.wait()
        for pump in pumps:
            pump.join(5)  # a child of its own may hold the pipe open
        self._events.put(("end", number))

    def _pump(self, source: TextIO, target: TextIO, rank: int) -> None:
        with source:
            for line in source:
                with self._writing:
                    target.write(f"[rank {rank}] {line.rstrip(chr(10))}\n")
                    target.flush()

    def _send(self, number: int) -> None:
        for process in self._processes:
            with suppress(OSError):
                process.send_signal(number)

    def _alive(self) -> str:
        return ", ".join(str(self._first + n) for n, process in enumerate(self._processes) if process.poll() is None)

    def _end(self, why: str) -> None:
        """Send SIGTERM to all, and SIGKILL after the grace period."""
        if alive := self._alive():
            say(f"launch: {why}; ending rank {alive}")
            self._send(signal.SIGTERM)
            self._later(min(10.0, self._launch.grace), self._kill)

    def _kill(self) -> None:
        if alive := self._alive():
            say(f"launch: rank {alive} did not end; SIGKILL")
            self._send(signal.SIGKILL)

    def _later(self, seconds: float, call: Any, *arguments: Any) -> None:
        self._timers.append(threading.Timer(seconds, call, arguments))
        self._timers[-1].daemon = True
        self._timers[-1].start()

    def watch(self) -> int:
        """Return when all processes have ended: the code of the first that failed, or 0."""
        code, left = 0, len(self._processes)
        while left:
            what, number = self._next()
            if what == "signal":
                self._pass(number)
                continue
            left -= 1
            ended = self._processes[number].returncode
            if ended and not code:
                code = 128 - ended if ended < 0 else ended
                if self._told is None:
                    self._tell(self._first + number, ended)
        for timer in self._timers:
            timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        return 128 + self._told if self._told and code not in (0, 1) else code

    def results(self) -> int:
        """Return what :meth:`watch` does, and write --results: a list of objects, one for each process."""
        code, found = self.watch(), []
        if self._said is None or self._launch.results is None:
            return code
        for local, process in enumerate(self._processes):
            record: dict[str, Any] = {"rank": self._first + local, "exit_code": process.returncode}
            with suppress(OSError):
                record |= json.loads(Path(self._said.name, str(local)).read_text())
            if record["rank"] == 0:
                with suppress(OSError, KeyError):
                    record["samples"] = Path(record["run_dir"], "samples.txt").read_text()
            found.append(record)
        self._said.cleanup()
        write_whole(self._launch.results, json.dumps(found, indent=1) + "\n")
        return code

    def _next(self) -> tuple[str, int]:
        """The next event. A signal that comes just before a wait does not interrupt it, so no wait is long."""
        while True:
            with suppress(queue.Empty):
                return self._events.get(timeout=0.2)

    def _pass(self, number: int) -> None:
        """Forward a signal; the grace period starts with the first one that ends the run."""
        self._send(number)
        if number != signal.SIGUSR1 and self._told is None:
            self._told = number
            self._later(self._launch.grace, self._kill)

    def _tell(self, rank: int, ended: int) -> None:
        """Report a killed process, which could not do so itself, and give the others time to exit."""
        how = f"rank {rank} ended with exit code {ended}"
        if ended < 0:
            how = f"rank {rank} was killed by {signal.Signals(-ended).name}"
            say(f"launch: {how}")
        self._later(SETTLE_SECONDS, self._end, how)
