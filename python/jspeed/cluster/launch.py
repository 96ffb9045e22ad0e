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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple, TextIO

from jspeed.cluster import address
from jspeed.cluster.rank import visible_gpus
from jspeed.cluster.rendezvous import free_port
from jspeed.errors import BadInput, say
from jspeed.fields import Count, CountOrZero, File, Rule, Wants, integer
from jspeed.files import write_whole

SETTLE_SECONDS = 5.0  # an error reaches every process in about a second; process 0 reports it last
RESULT = "JSPEED_RESULT"  # the file where a process leaves its result, for --results
FAILURE_GRACE = 10.0  # the most seconds from SIGTERM to SIGKILL after a failure: nothing is left to save
MOST_PROCESSES = 65_536  # of all nodes; no run has as many, and --dry-run prints a line for each
GRACE = Rule("seconds from 0 to 86400", lambda value: 0 <= value <= 86_400)
ENDED = {0, 1, 2, 130, 143}  # exit codes that a restart would not change: done, target missed, bad input, stopped


@dataclass(frozen=True)
class Launch:
    """What to start, and how: the flags of ``jspeed launch``.

    Args:
        command: The word run and its arguments, as after jspeed run; or a Python script and its arguments.
        nnodes: Number of nodes.
        node_rank: Which node this is, from 0.
        nproc_per_node: Processes on each node; gpu: one for each GPU; auto: the same, and 1 without GPUs.
        master_addr: Name or address of node 0, IPv6 with or without brackets.
        master_port: A free port on node 0.
        max_restarts: Restart after a failure, at most so many times.
        standalone: One node, with a free port of its own.
        prefix: Begin each line of output with its rank.
        grace: Seconds from SIGTERM to SIGKILL (at most 10 after a failure).
        results: Write each process's result to this JSON file.
    """

    command: Annotated[tuple[str, ...], Wants("run|SCRIPT.py ARGUMENTS ...", positional=True)]
    nnodes: Count = 1
    node_rank: Annotated[CountOrZero, Wants("R")] = 0
    nproc_per_node: Annotated[str, Wants("K")] = "1"
    master_addr: Annotated[str, Wants("HOST")] = "127.0.0.1"
    master_port: Annotated[int, integer(1, 65_535), Wants("PORT")] = 29_500
    max_restarts: Annotated[CountOrZero, Wants("M")] = 0
    standalone: bool = False
    prefix: bool = False
    grace: Annotated[float, GRACE, Wants("SECONDS")] = 30.0
    results: File | None = None

    @cached_property
    def local_count(self) -> int:
        """How many processes each node has. Raises :class:`BadInput`."""
        if self.nproc_per_node in ("gpu", "auto"):
            count = visible_gpus(os.environ)
            if not count and self.nproc_per_node == "gpu":
                raise BadInput("--nproc-per-node gpu: this machine shows no GPU; give a number")
            return count or 1
        if not re.fullmatch("[1-9][0-9]{0,4}", self.nproc_per_node):
            raise BadInput(f"--nproc-per-node {self.nproc_per_node}: give a number from 1 on, or gpu")
        return int(self.nproc_per_node)


def check(launch: Launch) -> None:
    """Raise :class:`BadInput` for flags that are wrong or do not go together."""
    if launch.node_rank >= launch.nnodes:
        raise BadInput(f"--node-rank {launch.node_rank} of --nnodes {launch.nnodes}: give a rank from 0 to nnodes - 1")
    if address.host(launch.master_addr) is None:
        raise BadInput(
            f"--master-addr {launch.master_addr!r}: expected {address.HOST}; a port is given by --master-port"
        )
    if launch.standalone and launch.nnodes > 1:
        raise BadInput(f"--standalone is one node, but --nnodes is {launch.nnodes}; leave one of them out")
    if launch.nnodes * launch.local_count > MOST_PROCESSES:
        asked = f"--nnodes {launch.nnodes} --nproc-per-node {launch.local_count}"
        raise BadInput(f"{asked}: at most {MOST_PROCESSES:,} processes can make a run; give fewer")
    if launch.master_port + launch.max_restarts > 65_535 and not launch.standalone:
        raise BadInput(
            f"--master-port {launch.master_port} --max-restarts {launch.max_restarts}: each restart uses the next "
            "port, up to 65535; give a smaller port or fewer restarts"
        )


def variables(launch: Launch, node: int, local: int, attempt: int = 0) -> dict[str, str]:
    """torchrun's environment variables for process ``local`` of ``node``.

    Every attempt has its own port, so that no process joins one of the attempt before.
    """
    count = launch.local_count
    values = {
        "RANK": node * count + local,
        "WORLD_SIZE": launch.nnodes * count,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": node,
        "MASTER_ADDR": launch.master_addr.strip("[]"),  # torch too takes IPv6 so
        "MASTER_PORT": launch.master_port + attempt,
        "TORCHELASTIC_RESTART_COUNT": attempt,
    }
    return {name: str(value) for name, value in values.items()}


def write_result(text: str) -> None:
    """Leave this process's result, a JSON object, for the launcher's --results; without --results do nothing."""
    if path := os.environ.get(RESULT):
        write_whole(Path(path), text)


def dry_run_lines(launch: Launch) -> list[str]:
    """Every process of every node as a command to paste into a shell."""
    launch, lines = _addressed(launch), []
    for node in range(launch.nnodes):
        lines.append(f"# node {node} of {launch.nnodes}")
        for local in range(launch.local_count):
            pairs = [f"{name}={value}" for name, value in variables(launch, node, local).items()]
            lines.append(shlex.join([*pairs, *launch.command]))
    return lines


def run(launch: Launch) -> int:
    """Start, watch, restart; returns the exit code of this node's first process that failed (128 + signal), or 0."""
    if launch.nnodes > 1 and launch.master_addr.strip("[]") in ("127.0.0.1", "::1", "localhost"):
        say("launch: --master-addr is this machine itself; other machines cannot reach it")
    for attempt in range(launch.max_restarts + 1):
        node = Node(_addressed(launch, attempt), attempt)
        code = node.watch()
        written = node.write_results()
        if code in ENDED or attempt == launch.max_restarts:
            break
        say(f"launch: restart {attempt + 1} of {launch.max_restarts}")
    return code or (0 if written else 2)


def _addressed(launch: Launch, attempt: int = 0) -> Launch:
    """With --standalone: this machine and a free port."""
    if not launch.standalone:
        return launch
    return replace(launch, master_addr="127.0.0.1", master_port=free_port() - attempt)


_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux


def _end_with_launcher() -> None:
    """Have the kernel send this process SIGTERM if the launcher is killed, so that none is orphaned."""
    if _prctl:
        _prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG of <linux/prctl.h>


class Signalled(NamedTuple):
    """The launcher got signal ``number``."""

    number: int


class Exited(NamedTuple):
    """Process ``local`` of this node has exited."""

    local: int


class Node:
    """The processes of one attempt on this node.

    Signals and exits are events in one queue, so that signal handlers do no work.
    """

    def __init__(self, launch: Launch, attempt: int) -> None:
        self._launch = launch
        self._events: queue.SimpleQueue[Signalled | Exited] = queue.SimpleQueue()
        self._forwarded: int | None = None
        self._timers: list[threading.Timer] = []
        self._writing = threading.Lock()
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self._previous = {number: signal.signal(number, self._on_signal) for number in signals}
        self._first = launch.node_rank * launch.local_count
        self._results_dir = tempfile.TemporaryDirectory(prefix="jspeed-results-") if launch.results else None
        self._processes: list[subprocess.Popen[str]] = []
        for local in range(launch.local_count):
            result = {RESULT: str(Path(self._results_dir.name, str(local)))} if self._results_dir else {}
            self._processes.append(self._start(variables(launch, launch.node_rank, local, attempt) | result))
        self._threads = [threading.Thread(target=self._wait_for, args=(n,)) for n in range(len(self._processes))]
        for thread in self._threads:
            thread.start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(Signalled(number))

    def _start(self, extra: Mapping[str, str]) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE if self._launch.prefix else None
        # In a session of its own, so that Ctrl-C reaches it once, through here.
        return subprocess.Popen(
            self._launch.command,
            env={**os.environ, **extra},
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_end_with_launcher,
        )

    def _wait_for(self, number: int) -> None:
        process = self._processes[number]
        pumps = []
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                pumps.append(threading.Thread(target=self._pump, args=(source, target, self._first + number)))
                pumps[-1].start()
        process.wait()
        for pump in pumps:
            pump.join(5)  # a child of its own may hold the pipe open
        self._events.put(Exited(number))

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
            self._later(min(FAILURE_GRACE, self._launch.grace), self._kill)

    def _kill(self) -> None:
        if alive := self._alive():
            say(f"launch: rank {alive} did not end; SIGKILL")
            self._send(signal.SIGKILL)

    def _later(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        self._timers.append(threading.Timer(seconds, call, arguments))
        self._timers[-1].daemon = True
        self._timers[-1].start()

    def watch(self) -> int:
        """Return when all processes have ended: the code of the first that failed, or 0."""
        code, left = 0, len(self._processes)
        while left:
            event = self._next_event()
            if isinstance(event, Signalled):
                self._forward(event.number)
                continue
            left -= 1
            returned = self._processes[event.local].returncode
            if returned and not code:
                code = 128 - returned if returned < 0 else returned
                if self._forwarded is None:
                    self._report_killed(self._first + event.local, returned)
        for timer in self._timers:
            timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        return 128 + self._forwarded if self._forwarded and code not in (0, 1) else code

    def write_results(self) -> bool:
        """Write --results, a list of objects, one for each process; print why it cannot be written and return False."""
        if self._results_dir is None or self._launch.results is None:
            return True
        records = []
        for local, process in enumerate(self._processes):
            record: dict[str, Any] = {"rank": self._first + local, "exit_code": process.returncode}
            with suppress(OSError, ValueError, TypeError):  # a process that was killed may have written half of it
                record |= json.loads(Path(self._results_dir.name, str(local)).read_text()) | record
            if record["rank"] == 0:
                with suppress(OSError, ValueError, KeyError, TypeError):  # a program's own record may have any run_dir
                    record["samples"] = Path(record["run_dir"], "samples.txt").read_text()
            records.append(record)
        self._results_dir.cleanup()
        try:
            write_whole(self._launch.results, json.dumps(records, indent=1) + "\n")
        except BadInput as error:
            say(f"error: {error}")
            return False
        return True

    def _next_event(self) -> Signalled | Exited:
        """The next event. A signal that comes just before a wait does not interrupt it, so no wait is long."""
        while True:
            with suppress(queue.Empty):
                return self._events.get(timeout=0.2)

    def _forward(self, number: int) -> None:
        """Forward a signal; the grace period starts with the first one that ends the run."""
        self._send(number)
        if number != signal.SIGUSR1 and self._forwarded is None:
            self._forwarded = number
            self._later(self._launch.grace, self._kill)

    def _report_killed(self, rank: int, returned: int) -> None:
        """Report a killed process, which could not do so itself, and give the others time to exit."""
        how = f"rank {rank} ended with exit code {returned}"
        if returned < 0:
            how = f"rank {rank} was killed by {signal.Signals(-returned).name}"
            say(f"launch: {how}")
        self._later(SETTLE_SECONDS, self._end, how)
