"""``jspeed launch``: start this node's processes of one run and watch them, with torchrun's
flags."""

import os
import sys
from dataclasses import replace

from jspeed.cli.flags import Command, check_folders, parse
from jspeed.cli.run import COMMAND as RUN
from jspeed.cluster.launch import Launch, check, dry_run_lines, run
from jspeed.errors import BadInput, nearest

TRAIN = "run"  # the command of jspeed that several processes can make together


def launch(options: Launch, dry_run: bool = False) -> int:
    """Start this node's processes of one run and watch them, with torchrun's flags (--node_rank is
    --node-rank).

    When one fails, the others get time to exit, then SIGTERM, then SIGKILL. Exit code: of the first
    that failed (128 and the signal's number when it was killed), or 0.

    Args:
        dry_run: Print each node's processes and start none.
    """
    asked = replace(options, command=program(options.command))
    check_folders({"--results": asked.results})
    check(asked)
    if dry_run:
        print("\n".join(dry_run_lines(asked)))
        return 0
    return run(asked)


def program(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words as a command of this Python. Raises BadInput where there is no such script,
    and for wrong flags of ``run``: they are parsed here once, so that not every process reports
    them."""
    script, *arguments = words
    if script == TRAIN:  # a script of that name is ./run
        parse(RUN, arguments, f"jspeed {TRAIN}")
        return (sys.executable, "-u", "-P", "-m", "jspeed", TRAIN, *arguments)
    if os.path.isfile(script):
        return (sys.executable, "-u", script, *arguments)
    raise BadInput(
        f"the script {script} does not exist{nearest(script, [TRAIN])}; give the path of a Python"
        f" file, or the word {TRAIN} and what follows jspeed {TRAIN}"
    )


COMMAND = Command(
    launch,
    (
        "--standalone --nproc-per-node gpu run r29  # all GPUs of this machine, one process each",
        (
            "--nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr node0 run r29  # on the"
            " first of two nodes"
        ),
        (
            "--dry-run --nnodes 2 --nproc-per-node 8 --master-addr node0 run r29  # what each node"
            " would start"
        ),
    ),
    {
        "placement": "nnodes node_rank nproc_per_node master_addr master_port standalone",
        "failure": "max_restarts grace",
        "output": "dry_run prefix results",
    },
    rest="command",
)
