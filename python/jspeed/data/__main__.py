"""``python -m jspeed.data``: describe a folder of token shards, and verify it against its
manifest."""

import sys

from jspeed.base.standard_streams import end_at_ctrl_c
from jspeed.cli.flags import parse
from jspeed.cli.satellites import SHARDS, load
from jspeed.errors import run_script


def main() -> int | None:
    """Run the command line."""
    command = load(SHARDS, "python -m jspeed.data").COMMAND
    return parse(command, sys.argv[1:], "python -m jspeed.data")()


if __name__ == "__main__":
    end_at_ctrl_c()
    run_script(main)
