"""Start this node's processes of one run and watch them, with torchrun's flags: launch.py [FLAGS] SCRIPT ARGS."""

from jspeed.terminal import starts

starts(__name__)

import sys

from jspeed.cluster.launch import read_arguments, run, shown
from jspeed.errors import run_script


def main() -> int:
    launch, dry = read_arguments(sys.argv[1:])
    if dry:
        print("\n".join(shown(launch)))
        return 0
    return run(launch)


if __name__ == "__main__":
    run_script(main)
