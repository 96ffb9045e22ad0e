"""Measure what jspeed promises, on the machine at hand."""

import tyro

from benches.cpu import cpu
from benches.loader import loader
from jspeed.errors import run_script

if __name__ == "__main__":
    run_script(lambda: tyro.extras.subcommand_cli_from_dict({"cpu": cpu, "loader": loader}, description=__doc__))
