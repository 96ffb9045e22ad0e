"""Start and watch this node's processes of one run, with torchrun's flags; needs neither jax nor
torch.

The processes read their rank from torchrun's variables. When one fails, the others get time to
exit, then SIGTERM, then SIGKILL; then all may be restarted (--max-restarts).
"""

import ctypes
import json
import math
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TextIO

from jspeed.base.files import write_whole
from jspeed.base.signals import ENDINGS, WARNINGS, handled
from jspeed.cluster.rank import HOST, valid_host, visible_gpus
from jspeed.cluster.rendezvous import TOKEN, free_port, token
from jspeed.errors import PEER_LOST, BadInput, say
from jspeed.fields import Count, CountOrZero, File, Rule, Wants, integer

SETTLE_SECONDS = 5.0  # an error reaches every process in about a second; process 0 reports it last
RESULT = "JSPEED_RESULT"  # the file where a process leaves its result, for --results
# the most seconds from SIGTERM to SIGKILL after a failure: nothing is left to save
FAILURE_GRACE = 10.0
MOST_PROCESSES = 65_536  # of all nodes; no run has as many, and --dry-run prints a line for each
GRACE = Rule("seconds from 0 to 86400", lambda value: 0 <= value <= 86_400)
# exit codes that a restart would not change: done, target missed, bad input, stopped
ENDED = {0, 1, 2, 130, 143}


@dataclass(frozen=True)
class Launch:
    """What to start, and how: the flags of ``jspeed launch``.

    Args:
        command: The word run and its arguments, as after jspeed run; or a Python script and its
            arguments.
        nnodes: Number of nodes.
        node_rank: Which node this is, from 0.
        nproc_per_node: Processes on each node; gpu: one for each GPU; auto: the same, and 1 without
            GPUs.
        master_addr: Name or address of node 0, IPv6 with or without brackets.
        master_port: A free port on node 0.
        max_restarts: Restart after a failure, at most so many times.
        standalone: One node, with a free port of its own.
        prefix: Begin each line of output with its rank.
        grace: Seconds from SIGTERM to SIGKILL (at most 10 after a failure).
        results: Write each process's result to this JSON file.
    """

    command: Annotated[tuple[str, ...], Wants("run|SCRIPT.py", positional=True)]
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
            raise BadInput(
                f"--nproc-per-node {self.nproc_per_node}; give a number from 1 on, or gpu"
            )
        return int(self.nproc_per_node)


def check(launch: Launch) -> None:
    """Raise :class:`BadInput` for flags that are wrong or do not go together."""
    if launch.node_rank >= launch.nnodes:
        raise BadInput(
            f"--node-rank {launch.node_rank} of --nnodes {launch.nnodes}; give a rank from 0 to"
            " nnodes - 1"
        )
    if valid_host(launch.master_addr) is None:
        raise BadInput(
            f"--master-addr {launch.master_addr!r}: expected {HOST}; a port is given by"
            " --master-port"
        )
    if launch.standalone and launch.nnodes > 1:
        raise BadInput(
            f"--standalone is one node, but --nnodes is {launch.nnodes}; leave one of them out"
        )
    if launch.nnodes * launch.local_count > MOST_PROCESSES:
        asked = f"--nnodes {launch.nnodes} --nproc-per-node {launch.local_count}"
        raise BadInput(f"{asked}: at most {MOST_PROCESSES:,} processes can make a run; give fewer")
    if launch.master_port + launch.max_restarts > 65_535 and not launch.standalone:
        raise BadInput(
            f"--master-port {launch.master_port} --max-restarts {launch.max_restarts}: each restart"
            " uses the next port, up to 65535; give a smaller port or fewer restarts"
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
    """Leave this process's result, a JSON object, for the launcher's --results; without --results
    do nothing."""
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
    """Start, watch, restart; returns the exit code of this node's first process that failed (128 +
    signal), or 0."""
    if launch.nnodes > 1 and launch.master_addr.strip("[]") in ("127.0.0.1", "::1", "localhost"):
        say("launch: --master-addr is this machine itself; other machines cannot reach it")
    for attempt in range(launch.max_restarts + 1):
        code, written = _run_once(_addressed(launch, attempt), attempt)
        if code in ENDED or attempt == launch.max_restarts:
            break
        say(f"launch: restart {attempt + 1} of {launch.max_restarts}")
    return code or (0 if written else 2)


def _addressed(launch: Launch, attempt: int = 0) -> Launch:
    """With --standalone: this machine and a free port."""
    if not launch.standalone:
        return launch
    return replace(launch, master_addr="127.0.0.1", master_port=free_port() - attempt)


_writing = threading.Lock()  # one line at a time
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux


def _end_with_launcher() -> None:
    """Have the kernel send this process SIGTERM if the launcher is killed, so that none is
    orphaned."""
    if _prctl:
        _prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG of <linux/prctl.h>


def _run_once(launch: Launch, attempt: int) -> tuple[int, bool]:
    """Start this node's processes and wait for them; return the exit code, and whether --results
    could be written."""
    received: list[int] = []  # signals: handlers do no work
    processes: dict[int, subprocess.Popen[str]] = {}  # by rank
    pumps: list[threading.Thread] = []
    # Of several nodes all must have the same: whoever starts them may set it.
    secret = {TOKEN: secrets.token_hex(16)} if launch.nnodes == 1 and not token() else {}
    with (
        tempfile.TemporaryDirectory(prefix="jspeed-results-") as results,
        handled((*ENDINGS, *WARNINGS, signal.SIGINT), lambda number, _: received.append(number)),
    ):
        for local in range(launch.local_count):
            rank = launch.node_rank * launch.local_count + local
            result = {RESULT: str(Path(results, str(rank)))} if launch.results else {}
            processes[rank] = _start(
                launch, variables(launch, launch.node_rank, local, attempt) | result | secret
            )
            pumps += _prefix(processes[rank], rank)
        code = _watch(launch, processes, received)
        _join(pumps)
        return code, launch.results is None or _write_results(
            launch.results, Path(results), processes
        )


def _start(launch: Launch, extra: Mapping[str, str]) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE if launch.prefix else None
    # In a session of its own, so that Ctrl-C reaches it once, through here.
    return subprocess.Popen(
        launch.command,
        env={**os.environ, **extra},
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_end_with_launcher,
    )


def _prefix(process: "subprocess.Popen[str]", rank: int) -> Iterator[threading.Thread]:
    """Start the threads that pass on the lines of a process, each with its rank; none where it
    writes them itself."""

    def pump(source: TextIO, target: TextIO) -> None:
        with source:
            for line in source:
                with _writing:
                    target.write(f"[rank {rank}] {line.rstrip(chr(10))}\n")
                    target.flush()

    for pipe in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        if pipe[0] is not None:
            thread = threading.Thread(target=pump, args=pipe, daemon=True)
            thread.start()
            yield thread


def _join(pumps: list[threading.Thread]) -> None:
    """Wait for the last lines, at most 5 seconds: a child of a process may hold a pipe open."""
    until = time.monotonic() + 5
    for pump in pumps:
        pump.join(max(0, until - time.monotonic()))


def _watch(
    launch: Launch, processes: "Mapping[int, subprocess.Popen[str]]", received: list[int]
) -> int:
    """Return when all processes have ended: the code of the first that failed, or 0.

    Signals that are ``received`` are sent on; the grace period starts with the first one that ends
    the run. After a failure the others get time to exit, then SIGTERM, then SIGKILL.
    """
    code, stop, why = 0, 0, ""
    end_at = kill_at = math.inf
    alive = dict(processes)

    def send(number: int) -> None:
        for process in alive.values():
            process.send_signal(number)

    while alive:
        time.sleep(0.05)
        now = time.monotonic()
        while received:
            send(number := received.pop(0))
            if number not in WARNINGS and not stop:
                stop, kill_at = number, now + launch.grace
        ended = [rank for rank, process in alive.items() if process.poll() is not None]
        # after the one that was lost
        for rank in sorted(ended, key=lambda rank: alive[rank].returncode == PEER_LOST):
            returned = alive.pop(rank).returncode
            if returned and not code:
                code = 128 - returned if returned < 0 else returned
                if not stop:
                    why, end_at = (
                        f"rank {rank} ended with exit code {returned}",
                        now + SETTLE_SECONDS,
                    )
                    if returned < 0:  # it could not say so itself
                        why = f"rank {rank} was killed by {signal.Signals(-returned).name}"
                        say(f"launch: {why}")
        left = ", ".join(map(str, alive))
        if left and now > end_at:
            say(f"launch: {why}; ending rank {left}")
            send(signal.SIGTERM)
            end_at, kill_at = math.inf, min(kill_at, now + min(FAILURE_GRACE, launch.grace))
        if left and now > kill_at:
            say(f"launch: rank {left} did not end; SIGKILL")
            send(signal.SIGKILL)
            kill_at = math.inf
    return 128 + stop if stop and code not in (0, 1) else code


def _write_results(
    path: Path, folder: Path, processes: "Mapping[int, subprocess.Popen[str]]"
) -> bool:
    """Write --results, a list of objects, one for each process; print why it cannot be written and
    return False."""
    records = []
    for rank, process in processes.items():
        record: dict[str, Any] = {"rank": rank, "exit_code": process.returncode}
        # a process that was killed may have written half of it
        with suppress(OSError, ValueError, TypeError):
            record |= json.loads((folder / str(rank)).read_text()) | record
        if rank == 0:
            # a program's own record may have any run_dir
            with suppress(OSError, ValueError, KeyError, TypeError):
                record["samples"] = Path(record["run_dir"], "samples.txt").read_text()
        records.append(record)
    try:
        write_whole(path, json.dumps(records, indent=1) + "\n")
    except BadInput as error:
        say(f"error: {error}")
        return False
    return True
