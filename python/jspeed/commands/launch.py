"""``jspeed launch``: start this node's processes of one run and watch them, with torchrun's flags."""

import os
import sys
from typing import Annotated

from jspeed.cluster.launch import Launch, check, processes_of, run, shown
from jspeed.commands.flags import Command, File, Wants, check_folders
from jspeed.errors import BadInput, nearest

TRAIN = "run"  # the command of jspeed that several processes can make together


def launch(
    command: Annotated[tuple[str, ...], Wants("run|SCRIPT.py ARGUMENTS ...", positional=True)],
    nnodes: int = 1,
    node_rank: Annotated[int, Wants("R")] = 0,
    nproc_per_node: Annotated[str, Wants("K")] = "1",
    master_addr: Annotated[str, Wants("HOST")] = "127.0.0.1",
    master_port: Annotated[int, Wants("PORT")] = 29_500,
    max_restarts: Annotated[int, Wants("M")] = 0,
    standalone: bool = False,
    dry_run: bool = False,
    prefix: bool = False,
    grace: Annotated[float, Wants("SECONDS")] = 30.0,
    results: File | None = None,
) -> int:
    """Start this node's processes of one run and watch them, with torchrun's flags (--node_rank is --node-rank).

    When one fails, the others get time to exit, then SIGTERM, then SIGKILL. Exit code: of the first that failed (128
    and the signal's number when it was killed), or 0.

    Args:
        command: The word run and its arguments, as after jspeed run; or a Python script and its arguments.
        nnodes: Number of nodes.
        node_rank: Which node this is, from 0.
        nproc_per_node: Processes on each node; gpu: one for each GPU.
        master_addr: Host that node 0 is reached at.
        master_port: A free port on node 0.
        max_restarts: Start again after a failure, at most so many times.
        standalone: One node, with a free port of its own.
        dry_run: Print each node's processes and start none.
        prefix: Begin each line of output with its rank.
        grace: Seconds from SIGTERM to SIGKILL.
        results: Write what every process of this node ended with here (JSON).
    """
    count = processes_of(nproc_per_node)
    where = (nnodes, node_rank, count, master_addr, master_port, max_restarts, standalone, prefix, grace, results)
    asked = Launch(program(command), *where)
    check_folders({"--results": results})
    check(asked, dry_run)
    if dry_run:
        print("\n".join(shown(asked)))
        return 0
    return run(asked)


def program(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words as a command of this Python. Raises BadInput where there is no such script."""
    script, *arguments = words
    if os.path.isfile(script):
        return (sys.executable, "-u", script, *arguments)
    if script != TRAIN:
        raise BadInput(
            f"the script {script} does not exist{nearest(script, [TRAIN])}; give the path of a Python file, or the "
            f"word {TRAIN} and what follows jspeed {TRAIN}"
        )
    return (sys.executable, "-u", "-P", "-m", "jspeed", TRAIN, *arguments)


COMMAND = Command(
    launch,
    (
        "--standalone --nproc-per-node gpu run r29  # all GPUs of this machine, one process each",
        "--nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr node0 run r29  # on the first of two nodes",
        "--dry-run --nnodes 2 --nproc-per-node 8 --master-addr node0 run r29  # what each node would start",
    ),
    {
        "placement": ("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port", "standalone"),
        "failure": ("max_restarts", "grace"),
        "output": ("dry_run", "prefix", "results"),
    },
    rest="command",
)
