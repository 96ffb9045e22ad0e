"""The leaderboard: add finished runs, check every number, show it, compare two recipes, make its page."""

from jspeed.terminal import starts

starts(__name__)

import ast
import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text
from tyro.conf import Positional, arg

import jspeed
from jspeed.errors import BadInput, run_script
from jspeed.leaderboard import compare, judge
from jspeed.leaderboard.views import page, terminal
from jspeed.record import store, verify
from jspeed.record.remarks import remarks

REPOSITORY = Path(__file__).resolve().parent.parent
RECORDS = REPOSITORY / "records"
SITE = REPOSITORY / "site"
README = REPOSITORY / "README.md"
PACKAGE = Path(jspeed.__file__).parent  # perhaps an installed one, with no repository around this script
RECIPES = PACKAGE / "recipes"
Folder = Annotated[Path, arg(metavar="DIR")]


def add_(
    run_dir: Annotated[tuple[Path, ...], arg(metavar="RUN_DIR...", help_behavior_hint="(one or more)"), Positional],
    /,
    records: Folder = RECORDS,
) -> None:
    """Copy runs with their recipe and plan into the records folder; all of them, or none.

    The repository's own page and README block are made anew then.

    Args:
        run_dir: directories of runs, or of a whole plan with its runs
        records: the records folder
    """
    if not run_dir:
        raise BadInput("no run directory given; give one or more directories that hold a run.json or a plan.json")
    files = store.admit(run_dir, records)
    runs = [json.loads(content) for path, content in files.items() if store.RUN.fullmatch(path.name)]
    notes = dict.fromkeys(note for run in runs for note in remarks(run, records))
    for path in store.put(files):
        print(f"added {path}")
    for note in notes:
        print(f"note: {note}")
    found = store.read(records)
    for problem in verify.verify(found, now()):
        print(f"`leaderboard.py verify` fails until this is fixed: {problem}")
    if records.resolve() == RECORDS and not found.problems:
        write_page(found, None)


def verify_(
    record: Annotated[Path | None, arg(metavar="[RECORD]", help_behavior_hint="(optional)"), Positional] = None,
    /,
    records: Folder = RECORDS,
) -> int:
    """Recompute every number from the files in the records folder; exit code 1 and the reasons if one differs.

    Of the repository's own records it also says whether the page and README's block are what they make.

    Args:
        record: only what concerns this file, or the files under this folder; without it everything
        records: the records folder
    """
    if record is not None and not record.exists():
        raise BadInput(f"{record} does not exist; give a file or folder of the records, or none for all")
    found = store.read(records)
    problems = verify.verify(found, now())
    if records.resolve() == RECORDS and not problems:
        problems = page.stale(page.contents(found, timing_rule(), SITE, README))
    if record is not None:
        problems = [problem for problem in problems if str(record.resolve()) in problem or str(record) in problem]
    for problem in problems:
        print(problem)
    count = (
        f"{len(found.rows)} runs, {len(found.plans)} plans, {len(found.sources)} recipes, {len(found.tracks)} tracks"
    )
    print(f"{records}: {count}; " + (f"{len(problems)} problems" if problems else "every number follows from its file"))
    return 1 if problems else 0


def show_(track: Annotated[str | None, arg(metavar="T")] = None, records: Folder = RECORDS) -> None:
    """Print the leaderboard.

    Args:
        track: only this track, such as stdlib/cpu
        records: the records folder
    """
    tracks = judge.board(store.load(records))
    console = Console(highlight=False)
    console.print(terminal.board(tracks if track is None else terminal.of_track(tracks, track)), soft_wrap=True)


def compare_(
    a: Annotated[str, arg(metavar="A"), Positional],
    b: Annotated[str, arg(metavar="B"), Positional],
    /,
    diff: bool = True,
    records: Folder = RECORDS,
) -> None:
    """Say whether A is faster than B, by how much and how surely, and what in their recipes differs.

    Args:
        a: a recipe by name, by NAME@HASH, or by the path of its file
        b: what it is compared with, usually its parent
        diff: print the diff of the two files too
        records: the records folder
    """
    found = store.load(records)
    tracks = judge.board(found)
    one, two = (compare.find_side(text, tracks, found.sources, RECIPES) for text in (a, b))
    console = Console(highlight=False)
    raced = judge.raced(found)
    changed = compare.changes(one.source, two.source)
    for line in [*compare.speed(one, two, raced), "", *compare.change_lines(changed)]:
        console.print(Text(line))
    if diff:
        colours = {"+": "green", "-": "red", "@": "cyan"}
        for line in ["", *changed["diff"]]:
            console.print(Text(line, colours.get(line[:1], "")), soft_wrap=True)


def page_(out: Annotated[Path | None, arg(metavar="DIR")] = None, records: Folder = RECORDS) -> None:
    """Write the leaderboard as one static page, index.html, and as leaderboard.json.

    Args:
        out: folder to write; default: the repository's own, site/, and the block in README.md
        records: the records folder; one that is not the repository's own needs --out
    """
    found = store.load(records)
    if out is None and records.resolve() != RECORDS:
        raise BadInput(f"--records {records}: {SITE} and README.md show {RECORDS}; give --out DIR for a page of others")
    write_page(found, out)


def write_page(found: store.Records, out: Path | None) -> None:
    """Write the page to ``out``, or the repository's own and the block in README.md, and say so."""
    made = page.contents(found, timing_rule(), out or SITE, None if out else README)
    page.write(made)
    for path in made:
        print(f"wrote {path}")


def timing_rule() -> str:
    """The docstring of run/clock.py, read without importing it and jax."""
    return ast.get_docstring(ast.parse((PACKAGE / "run" / "clock.py").read_text())) or ""


def race_(
    a: Annotated[str, arg(metavar="A"), Positional],
    b: Annotated[str, arg(metavar="B"), Positional],
    /,
    rounds: int = 2,
    run_dir: Path | None = None,
    steps: int | None = None,
    flags: str = "",
) -> int:
    """Run two recipes in turn on this machine, A B B A in each round, and say how their times compare.

    What drifts evenly through a round falls out of the ratio, so that B's time anywhere can be stated as A's official
    time x the ratio. Add the folder to the records to do so.

    Args:
        a: the recipe to compare with, by name or path
        b: the recipe in question
        rounds: rounds of four runs; two or more give an interval
        run_dir: folder to write; the same command goes on with it
        steps: stop every run after this many steps
        flags: more flags for each speedrun.py, in one string: --flags="--data DIR --no-progress"
    """
    from jspeed.series.announced import race

    return race(a, b, rounds, run_dir, steps, flags)


def reproduce_(
    recipe: Annotated[str, arg(metavar="RECIPE"), Positional],
    /,
    n: int = 1,
    run_dir: Path | None = None,
    flags: str = "",
    records: Folder = RECORDS,
) -> int:
    """Run a record again: a clean worktree at its commit, the recipe's stored source, its seeds; 0 if they agree.

    Args:
        recipe: a recipe with runs among the records, by name or NAME@HASH
        n: how many of its seeds, and new ones after them
        run_dir: folder to write
        flags: more flags for each speedrun.py, in one string: --flags="--data DIR --no-progress"
        records: the records folder
    """
    from jspeed.series.reproduce import reproduce

    found = store.load(records)
    side = compare.find_side(recipe, judge.board(found), found.sources, RECIPES)
    if side.entry is None or side.track is None or side.entry["recipe_sha256"] not in found.sources:
        raise BadInput(f"recipe '{recipe}' has no runs with a stored source among {records}; choose one that does")
    return reproduce(REPOSITORY, side.entry, side.source, side.track["sigma"], n, run_dir, shlex.split(flags))


def now() -> datetime:
    """The present, which is no business of the package: there only run/clock.py reads the time."""
    return datetime.now(UTC)


def main() -> int | None:
    commands: dict[str, Any] = {
        "add": add_,
        "verify": verify_,
        "show": show_,
        "compare": compare_,
        "page": page_,
        "race": race_,
        "reproduce": reproduce_,
    }
    return tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)


if __name__ == "__main__":
    run_script(main)
