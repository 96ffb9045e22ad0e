"""Reproduce a record at its own commit: a clean git worktree, the recipe's stored source, the same
seeds."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import jspeed
from jspeed.base.files import write_whole
from jspeed.board import formatting, stats
from jspeed.board.board import Entry, by_seed, losses, mean_of
from jspeed.board.series.preregistered import SeriesRun, default_folder, make_runs
from jspeed.errors import BadInput
from jspeed.record.schema import Run

NATIVE = ("rust", "Cargo.toml", "Cargo.lock")  # what the extension is made of


def reproduce(
    repository: Path,
    entry: Entry,
    source: str,
    sigma: float | None,
    n: int,
    folder: Path | None,
    flags: list[str],
) -> int:
    """Make ``n`` runs of the board's ``entry``, whose recipe's text is ``source``, at its commit; 0
    if they agree.

    They agree when their mean loss differs from the entry's by no more than chance lets it;
    ``sigma`` is a run's standard deviation. Raises BadInput when the commit is missing, or its
    extension cannot be built.
    """
    recorded = by_seed(entry["runs"])
    if not recorded:
        raise BadInput(f"{entry['recipe']}: no run of this record converged; choose one that did")
    known = sorted(recorded)
    seeds = [*known[:n], *range(known[-1] + 1, known[-1] + 1 + n - len(known[:n]))]
    folder = (folder or default_folder(f"{entry['recipe']}-again")).absolute()
    stopped = next((run["steps"] for run in recorded.values() if run["status"] == "stopped"), None)
    with worktree(repository, entry["git"]["commit"]) as tree:
        # outside, so that the tree stays clean
        recipe = tree.parent / f"{entry['recipe'].replace('-', '_')}.py"
        write_whole(recipe, source)
        sets = [
            f"{name}={value!r}"
            for name, value in sorted(entry["overrides"].items())
            if name.isupper()
        ]
        flags = [
            *flags,
            "--target-loss",
            str(entry["target_loss"]),
            *(["--set", *sets] if sets else []),
        ]
        runs = [
            SeriesRun(str(recipe), entry["recipe"], entry["recipe_hash"], seed) for seed in seeds
        ]
        path = f"{tree / 'python'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
        environment = os.environ | {"PYTHONPATH": path}
        made = make_runs(
            folder, "seeds", stopped, runs, flags, tree / "scripts" / "speedrun.py", environment
        )
    agrees, lines = compare_losses(entry, made, sigma)
    print(
        f"{folder}: plan.json and {len(made)} runs at {formatting.commit(entry['git'])}",
        *lines,
        sep="\n",
    )
    return 0 if agrees else 1


def compare_losses(entry: Entry, made: list[Run], sigma: float | None) -> tuple[bool, list[str]]:
    """Return whether the runs ``made`` agree with those of ``entry``, and the comparison as
    lines."""
    recorded = by_seed(entry["runs"])
    repeated = [run["val_loss"] for run in made if run["val_loss"] is not None]
    if not repeated:
        return False, ["no run converged"]
    seconds = fmean(run["timed_seconds"] for run in made if run["val_loss"] is not None)
    recorded_seconds, recorded_losses = mean_of(entry["seconds"]), losses(entry["runs"])
    equal = sum(
        run["seed"] in recorded and recorded[run["seed"]]["val_loss"] == run["val_loss"]
        for run in made
    )
    lines = [
        (
            f"mean loss {fmean(repeated):.4f} (n = {len(repeated)}); "
            f"record: {fmean(recorded_losses):.4f} (n = {len(recorded_losses)})"
        ),
        f"{equal} of {len(made)} final losses equal the record's exactly",
        (
            f"mean time {formatting.seconds(seconds)}; record:"
            f" {formatting.seconds(recorded_seconds)}, ratio {seconds / recorded_seconds:.3f}"
        ),
    ]
    if not sigma:
        lines.append(
            "the track has no sigma yet (of a run's loss, over seeds), so only equal losses agree"
        )
        return equal == len(made), lines
    p = stats.differ(repeated, recorded_losses, sigma)
    agrees = p > stats.AGAIN and len(repeated) == len(made)
    verdict = "they agree" if agrees else "they do not agree"
    lines.append(
        f"{verdict}: two-sided {formatting.chance(p)} with sigma = {sigma:.4f}, of a run's loss"
        " over seeds"
    )
    return agrees, lines


@contextmanager
def worktree(repository: Path, commit: str | None) -> Iterator[Path]:
    """Check out ``commit`` of ``repository`` into a folder of its own, with the extension, and
    remove it in the end."""
    if commit is None or _git(repository, "cat-file", "-e", f"{commit}^{{commit}}").returncode:
        raise BadInput(
            f"{repository} does not have the record's commit {commit}; git fetch it, then try again"
        )
    holder = Path(tempfile.mkdtemp(prefix="jspeed-reproduce-"))
    tree = holder / "tree"
    try:
        added = _git(repository, "worktree", "add", "--detach", str(tree), commit)
        if added.returncode:
            raise BadInput(
                f"git cannot check out {commit} to {tree}: {_last_line(added.stderr)}; mend that"
                " clone, or make another"
            )
        extension(repository, tree, commit)
        yield tree
    finally:
        _git(repository, "worktree", "remove", "--force", str(tree))
        shutil.rmtree(holder, ignore_errors=True)


def extension(repository: Path, tree: Path, commit: str) -> None:
    """Put the Rust extension into ``tree``: the one built here if its sources are the commit's,
    else a new one."""
    package = Path(jspeed.__file__).parent
    built = list(package.glob("_dataloader*.so")) + list(package.glob("_dataloader*.pyd"))
    if built and not _git(repository, "diff", "--quiet", commit, "--", *NATIVE).returncode:
        for path in built:
            shutil.copy(path, tree / "python" / "jspeed")
        return
    wheels = tree.parent / "wheels"
    build = [sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(wheels)]
    done = subprocess.run(build, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        why = f"cannot be built ({_last_line(done.stderr)})"
        raise BadInput(f"the extension of commit {commit[:8]} {why}; install maturin and Rust")
    for wheel in wheels.glob("*.whl"):
        shutil.unpack_archive(wheel, wheels / "unpacked", "zip")
    for path in (wheels / "unpacked" / "jspeed").glob("_dataloader*"):
        shutil.copy(path, tree / "python" / "jspeed")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _git(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", *words], cwd=repository, capture_output=True, text=True)
    except FileNotFoundError:
        raise BadInput(
            "git is not installed; install it, so that the record's commit can be checked out"
        ) from None
