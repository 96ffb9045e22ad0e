"""``jspeed launch``: start this node's processes of one run and watch them, with torchrun's flags."""

import os
import sys
from typing import Annotated

from jspeed.cluster.launch import Launch, check, dry_run_lines, parse_nproc, run
from jspeed.commands.flags import Command, check_folders, parse
from jspeed.commands.run import COMMAND as RUN
from jspeed.errors import BadInput, nearest
from jspeed.fields import Count, CountOrZero, File, Rule, Wants, integer

GRACE = Rule("seconds from 0 to 86400", lambda value: 0 <= value <= 86_400)
TRAIN = "run"  # the command of jspeed that several processes can make together


def launch(
    command: Annotated[tuple[str, ...], Wants("run|SCRIPT.py ARGUMENTS ...", positional=True)],
    nnodes: Count = 1,
    node_rank: Annotated[CountOrZero, Wants("R")] = 0,
    nproc_per_node: Annotated[str, Wants("K")] = "1",
    master_addr: Annotated[str, Wants("HOST")] = "127.0.0.1",
    master_port: Annotated[int, integer(1, 65_535), Wants("PORT")] = 29_500,
    max_restarts: Annotated[CountOrZero, Wants("M")] = 0,
    standalone: bool = False,
    dry_run: bool = False,
    prefix: bool = False,
    grace: Annotated[float, GRACE, Wants("SECONDS")] = 30.0,
    results: File | None = None,
) -> int:
    """Start this node's processes of one run and watch them, with torchrun's flags (--node_rank is --node-rank).

    When one fails, the others get time to exit, then SIGTERM, then SIGKILL. Exit code: of the first that failed (128
    and the signal's number when it was killed), or 0.

    Args:
        command: The word run and its arguments, as after jspeed run; or a Python script and its arguments.
        nnodes: Number of nodes.
        node_rank: Which node this is, from 0.
        nproc_per_node: Processes on each node; gpu: one for each GPU; auto: the same, and 1 without GPUs.
        master_addr: Address of node 0.
        master_port: A free port on node 0.
        max_restarts: Restart after a failure, at most so many times.
        standalone: One node, with a free port of its own.
        dry_run: Print each node's processes and start none.
        prefix: Begin each line of output with its rank.
        grace: Seconds from SIGTERM to SIGKILL (at most 10 after a failure).
        results: Write each process's result to this JSON file.
    """
    asked = Launch(
        command=program(command),
        nnodes=nnodes,
        node_rank=node_rank,
        nproc_per_node=parse_nproc(nproc_per_node),
        master_addr=master_addr,
        master_port=master_port,
        max_restarts=max_restarts,
        standalone=standalone,
        prefix=prefix,
        grace=grace,
        results=results,
    )
    check_folders({"--results": results})
    check(asked)
    if dry_run:
        print("\n".join(dry_run_lines(asked)))
        return 0
    return run(asked)


def program(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words as a command of this Python. Raises BadInput where there is no such script, and for wrong flags
    of ``run``, which else every process would report."""
    script, *arguments = words
    if script == TRAIN:  # a script of that name is ./run
        parse(RUN, arguments, f"jspeed {TRAIN}")
        return (sys.executable, "-u", "-P", "-m", "jspeed", TRAIN, *arguments)
    if os.path.isfile(script):
        return (sys.executable, "-u", script, *arguments)
    raise BadInput(
        f"the script {script} does not exist{nearest(script, [TRAIN])}; give the path of a Python file, or the "
        f"word {TRAIN} and what follows jspeed {TRAIN}"
    )


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
