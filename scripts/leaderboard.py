"""Add finished runs to the records folder, and show the leaderboard made of them."""

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from jspeed.errors import BadInput, run_script
from jspeed.record import board

RECORDS = Path(__file__).resolve().parent.parent / "records"


def add(
    run_dir: Annotated[
        tuple[Path, ...],
        tyro.conf.arg(metavar="RUN_DIR...", help_behavior_hint="(one or more)"),
        tyro.conf.Positional,
    ],
    /,
    records: Annotated[Path, tyro.conf.arg(metavar="DIR")] = RECORDS,
) -> None:
    """Copy the run.json of each run directory into the records folder; all of them, or none.

    Args:
        run_dir: directories of runs that finished and reached their target
        records: the records folder
    """
    if not run_dir:
        raise BadInput("no run directory given; give one or more directories that hold a run.json")
    # All are checked before the first is copied; a run that is named twice is added once.
    folders = {board.admit(folder, records)[0]: folder for folder in run_dir}
    for folder in folders.values():
        print(f"added {board.add(folder, records)}")


def show(
    track: Annotated[str | None, tyro.conf.arg(metavar="T")] = None,
    records: Annotated[Path, tyro.conf.arg(metavar="DIR")] = RECORDS,
) -> None:
    """Print the leaderboard.

    Args:
        track: only this track, such as stdlib/cpu
        records: the records folder
    """
    rows = board.load(records)
    Console().print(board.table(rows if track is None else board.of_track(rows, track)))


def main() -> None:
    tyro.extras.subcommand_cli_from_dict({"add": add, "show": show}, description=__doc__)


if __name__ == "__main__":
    run_script(main)
