"""``jspeed leaderboard``: add finished runs, check every number, show it, compare two recipes, make
its page."""

import ast
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import jspeed
from jspeed.base.standard_streams import interruptible, without_logs
from jspeed.board.records import store, trust, verify
from jspeed.board.records.preregistration import MOST_RUNS, ROUND
from jspeed.board.records.remarks import remarks
from jspeed.cli import repository
from jspeed.cli.flags import Command, group_of
from jspeed.errors import BadInput, escaped
from jspeed.fields import Count, Folder, Wants, integer, shown

PACKAGE = Path(jspeed.__file__).parent
Runs = Annotated[tuple[Path, ...], Wants("RUN_DIR", positional=True)]
Side = Annotated[str, Wants("RECIPE", positional=True)]
RecordsFolder = Annotated[
    Path | None,
    Wants(
        "DIR",
        help="The records folder; default: the repository's, or records/ in the current folder.",
    ),
]
RunFlags = Annotated[
    str,
    Wants(
        "FLAGS", help='More flags for each run, in one string: --flags="--data DIR --no-progress".'
    ),
]


def add_(
    run_dir: Runs,
    records: RecordsFolder = None,
    weights: Annotated[str | None, Wants("WHERE")] = None,
) -> None:
    """Copy runs with their recipe and plan into the records folder; all of them, or none.

    The repository's own page and README block are generated again then.

    Args:
        run_dir: Directories of runs, or of a whole plan with its runs.
        weights: Also say, with its SHA-256, that model.safetensors of each run is kept for whoever
            asks, as WHERE/RUN_DIR/model.safetensors: an address or a path. The file itself is not
            copied.
    """
    folder, own = find_records(records)
    addition = store.check_runs(run_dir, folder, weights)
    notes = dict.fromkeys(note for run in addition.runs.values() for note in remarks(run, folder))
    with interruptible():
        store.write_files(addition.files)
    for path in addition.runs:
        print(f"added {path}")
    for note in notes:
        print(f"note: {escaped(note)}")
    for problem in verify.verify(addition.records, now()):
        print(f"`jspeed leaderboard verify` fails until this is fixed: {escaped(problem.text)}")
    if own:
        write_page(addition.records, own / "site", own / "README.md")


def verify_(
    record: Annotated[Path | None, Wants("RECORD", positional=True)] = None,
    records: RecordsFolder = None,
    base: Annotated[str | None, Wants("COMMIT")] = None,
) -> int:
    """Recompute every number from the files in the records folder; exit code 1 and the reasons if
    one differs.

    Of the repository's own records it also says whether README's block is what they make.

    Args:
        record: Only what concerns this file, or the files under this folder (optional); without it
            everything.
        base: Also compare with the records of this commit, such as origin/main: files are only
            added, and new runs say what their programs carried.
    """
    if record is not None and not record.exists():
        raise BadInput(
            f"{record} does not exist; give a file or folder of the records, or none for all"
        )
    folder, own = find_records(records)
    loaded = store.read(folder)
    problems = verify.verify(loaded, now())
    if base is not None:
        problems += trust.append_only(loaded, base)
    if own and not problems:
        from jspeed.board import judge
        from jspeed.board.views import readme

        path = own / "README.md"
        text, wanted = readme.refreshed(path, judge.board(loaded))
        if text != wanted:
            says = (
                f"{path}: expected the block that the records make, found another; run: jspeed"
                " leaderboard page"
            )
            problems = [store.Problem(path, says)]
    subject = f"{len(loaded.rows)} runs, {len(loaded.plans)} plans, {len(loaded.sources)} recipes"
    subject = f"{folder}: {subject}, {len(loaded.tracks)} tracks"
    if record is not None:
        subject = str(record)
        problems = [
            problem
            for problem in problems
            if problem.path.resolve().is_relative_to(record.resolve())
        ]
    for problem in problems:
        print(escaped(problem.text))
    print(f"{subject}; {len(problems)} problems" if problems else f"{subject}; all files agree")
    return 1 if problems else 0


def show_(
    track: Annotated[str | None, Wants("TRACK")] = None, records: RecordsFolder = None
) -> None:
    """Print the leaderboard.

    Args:
        track: Only this track, such as stdlib/cpu.
    """
    from rich.console import Console

    from jspeed.board import judge
    from jspeed.board.views import terminal

    folder, _ = find_records(records)
    if records is None and not folder.exists():
        print(
            f"No records yet in {folder}/; add a finished run with: jspeed leaderboard add RUN_DIR"
        )
        return
    tracks = judge.board(store.load(folder))
    console = Console(highlight=False)
    console.print(
        terminal.board(tracks if track is None else terminal.of_track(tracks, track)),
        soft_wrap=True,
    )


def compare_(a: Side, b: Side, diff: bool = True, records: RecordsFolder = None) -> None:
    """Say whether A is faster than B, by how much and how significantly, and what in their recipes
    differs.

    Args:
        a: A recipe by name, by NAME@HASH, or by the path of its file.
        b: What it is compared with, usually its parent.
        diff: Print the diff of the two files too.
    """
    from rich.console import Console
    from rich.text import Text

    from jspeed.board import compare, judge

    loaded = store.load(find_records(records)[0])
    tracks, raced = judge.board_and_rounds(loaded)
    one, two = (compare.find_side(text, tracks, loaded.sources) for text in (a, b))
    console = Console(highlight=False)
    changed = compare.changes(one.source, two.source)
    for line in [*compare.speed(one, two, raced), "", *compare.change_lines(changed)]:
        console.print(Text(escaped(line)))
    if diff:
        colours = {"+": "green", "-": "red", "@": "cyan"}
        for line in ["", *changed.diff]:
            console.print(Text(escaped(line), colours.get(line[:1], "")), soft_wrap=True)


def page_(out: Folder | None = None, records: Folder | None = None) -> None:
    """Write the leaderboard as one static page, index.html, and as leaderboard.json.

    Args:
        out: Folder to write; default: the repository's own, site/, and the block in README.md.
        records: The records folder; one that is not the repository's own needs --out.
    """
    folder, own = find_records(records)
    loaded = store.load(folder)
    if out is not None:
        write_page(loaded, out)
    elif own is not None:
        write_page(loaded, own / "site", own / "README.md")
    else:
        around, why = repository(), "there is no repository here"
        if around:
            why = f"{around / 'site'} and README.md belong to {around / 'records'}"
        raise BadInput(f"--records {folder}: {why}; give --out DIR for other records")


def race_(
    a: Side,
    b: Side,
    rounds: Annotated[int, integer(1, MOST_RUNS // ROUND)] = 2,
    run_dir: Folder | None = None,
    steps: Count | None = None,
    flags: RunFlags = "",
) -> int:
    """Run two recipes in turn on this machine, A B B A in each round, and say how their times
    compare.

    Linear drift of the machine cancels in the ratio, so B's time anywhere can be estimated as A's
    official time x the ratio. Add the folder to the records to do so.

    Args:
        a: The recipe to compare with, by name or path
        b: The recipe in question
        rounds: Rounds of four runs; two or more give an interval.
        run_dir: Folder to write; the same command continues it.
        steps: Stop every run after this many steps.
    """
    with without_logs():
        from jspeed.board.series.preregistered import race

    return race(a, b, rounds, run_dir, steps, split_words("--flags", flags))


def reproduce_(
    recipe: Side,
    n: Annotated[int, integer(1, MOST_RUNS)] = 1,
    run_dir: Folder | None = None,
    flags: RunFlags = "",
    records: RecordsFolder = None,
) -> int:
    """Run a record again: a clean worktree at its commit, the recipe's stored source, its seeds; 0
    if they agree.

    Args:
        recipe: A recipe with runs among the records, by name or NAME@HASH.
        n: How many of its seeds, and new ones after them.
        run_dir: Folder to write.
    """
    with without_logs():
        from jspeed.board import compare, judge
        from jspeed.board.series.reproduce import reproduce

    words = split_words("--flags", flags)
    folder, _ = find_records(records)
    loaded, around = store.load(folder), repository()
    side = compare.find_side(recipe, judge.board(loaded), loaded.sources)
    if (
        side.entry is None
        or side.track is None
        or side.entry["recipe_sha256"] not in loaded.sources
    ):
        raise BadInput(
            f"recipe '{recipe}' has no runs with a stored source among {folder}; choose one that"
            " does"
        )
    if around is None:
        raise BadInput(
            f"the commit of recipe '{recipe}' is in jspeed's repository; clone it, and try again"
            " there"
        )
    with interruptible():
        return reproduce(around, side.entry, side.source, side.track["sigma"], n, run_dir, words)


def split_words(flag: str, text: str) -> list[str]:
    """Return the words of ``text`` as a shell splits them. Raises :class:`BadInput` for a quotation
    without its end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadInput(f"{flag} {shown(text)}: {str(error).lower()}; quote as in a shell") from None


def find_records(records: Path | None) -> tuple[Path, Path | None]:
    """Return the records folder, and the repository that it belongs to, or None."""
    around = repository()
    folder = records or (around / "records" if around else Path("records"))
    return folder, around if around and folder.resolve() == (around / "records").resolve() else None


def write_page(records: store.Records, folder: Path, readme: Path | None = None) -> None:
    """Write the page to ``folder``, and the block in ``readme``; print their paths."""
    from jspeed.board.views import page

    made = page.contents(records, timing_rule(), folder, readme)
    page.write(made)
    for path in made:
        print(f"wrote {path}")


def timing_rule() -> str:
    """The docstring of run/clock.py, read without importing it and jax."""
    return (
        ast.get_docstring(ast.parse((PACKAGE / "run" / "clock.py").read_text(encoding="utf-8")))
        or ""
    )


def now() -> datetime:
    """The present: no record may be later. In the trainer only run/clock.py reads the time."""
    return datetime.now(UTC)


COMMAND = group_of(
    "The leaderboard: add finished runs, check every number, show it, compare two recipes, make its"
    " page.",
    {
        "add": Command(add_, ("runs/stdlib-...-plan  # all runs of a plan, whatever came out",)),
        "verify": Command(verify_, ("  # every number, and README's block made of them",)),
        "show": Command(show_, ("--track stdlib/cpu  # one track",)),
        "compare": Command(
            compare_,
            ("stdlib stdlib-adamw  # faster? by how much? how significant? what was changed?",),
        ),
        "page": Command(page_, ("--out page  # open page/index.html",)),
        "race": Command(
            race_, ("stdlib mine.py --rounds 3  # in turn on this machine: their ratio",)
        ),
        "reproduce": Command(
            reproduce_, ("stdlib --n 1  # again, from a clean tree at the record's commit",)
        ),
    },
    ("show  # the board", "compare stdlib stdlib-adamw  # is one faster than the other?"),
)
