"""jspeed: train a small GPT to a target loss as fast as JAX can, and keep an honest record of
it."""

import os
import sys

if sys.argv[:1] == ["-m"] and sys.path[:1] == [os.getcwd()]:
    # as python -P: a jax.py or a numpy/ in the current folder is not the package of that name
    del sys.path[0]

# for type checkers it is true; typing would come from the folder that `python -m` is called in
TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jspeed.base.processes import Processes

__version__ = "0.1.0"


def join() -> "AbstractContextManager[Processes]":
    """Make one program of the processes that a launcher has started; a single process has nothing
    to join.

        with jspeed.join() as processes:
            print(f"{processes.count} processes, {jax.device_count()} devices")

    The block comes before anything that asks JAX for devices. From there on ``sys.stdout`` of
    process 0 alone prints; standard error is every process's. All wait at the end of the block,
    where ``jax.distributed`` ends. An exception on one process, or ``sys.exit`` with a code other
    than 0, ends all with one line that names it. Those inside a collective exit at once too,
    without clean-up, with the same code, which is 70 for an exception.

    The rank is found in the variables of ``jspeed launch``, torchrun, Slurm, Open MPI or
    Kubernetes. When they are incomplete, the others do not come, or JAX is in use already, one line
    says so and the exit code is 2.

    With several processes, what child processes and C++ print to standard output is discarded (gloo
    is talkative); give a child ``stdout=sys.stdout``, and make a logger's handler of ``sys.stdout``
    inside the block.
    """
    from jspeed.cli.satellites import JOIN, load

    joined: AbstractContextManager[Processes] = load(JOIN, "jspeed.join").join()
    return joined
