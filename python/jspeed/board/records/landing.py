"""When files of the records folder came into its git history, and which of them were changed later.

Whoever writes a record chooses its dates. When it landed is what the repository says.
"""

import functools
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from jspeed.errors import BadInput


def git(folder: Path, *words: str, given: str | None = None) -> str | None:
    """Return the output of git in ``folder``; None where there is no git, no repository, or it
    fails."""
    try:
        done = subprocess.run(
            ("git", "-c", "core.quotepath=off", *words),
            cwd=folder, capture_output=True, text=True, timeout=60, input=given,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@functools.cache
def landings(folder: Path) -> dict[str, int]:
    """Return when each file below ``folder`` was first committed, by its path there: seconds since
    1970.

    Empty outside a repository, and in a shallow clone, which does not know.
    """
    if git(folder, "rev-parse", "--is-shallow-repository") != "false\n":
        return {}
    listed = git(
        folder, "log", "--diff-filter=A", "--format=@%ct", "--name-only", "--relative", "--", "."
    )
    first: dict[str, int] = {}
    moment = 0
    for line in (listed or "").splitlines():
        if line.startswith("@"):
            moment = int(line[1:])
        elif line:
            first[line] = moment  # from the newest commit to the oldest
    return first


def landed(folder: Path, path: Path) -> float:
    """Return when the file ``path`` below ``folder`` landed; infinity before it is committed."""
    return landings(folder.resolve()).get(path.relative_to(folder).as_posix(), float("inf"))


def commit_times(folder: Path, commits: Sequence[str]) -> dict[str, int | None]:
    """Return when each of ``commits`` was made, None for one that the repository around ``folder``
    does not have. Empty outside a repository and in a shallow clone.
    """
    if git(folder, "rev-parse", "--is-shallow-repository") != "false\n":
        return {}
    found: dict[str, int | None] = {}
    for commit in dict.fromkeys(commits):
        shown = git(folder, "show", "-s", "--format=%ct", f"{commit}^{{commit}}")
        found[commit] = int(shown) if shown else None
    return found


def files_at(folder: Path, base: str) -> set[str]:
    """Return the files below ``folder`` at the commit ``base``, by their paths there.

    Raises :class:`BadInput` where git does not know ``base``.
    """
    listed = (
        None if base.startswith("-") else git(folder, "ls-tree", "-r", "--name-only", base, ".")
    )
    if listed is None:
        raise BadInput(f"--base {base}: git knows no such commit here; fetch it, or give another")
    return set(listed.splitlines())


def changed_since(folder: Path, base: str) -> Iterator[tuple[str, str]]:
    """Yield what happened to files below ``folder`` that were there at the commit ``base``: (path,
    "changed" or "removed")."""
    listed = git(folder, "diff", "--no-renames", "--name-status", "--relative", base, "--", ".")
    for line in (listed or "").splitlines():
        letter, _, path = line.partition("\t")
        if letter != "A":
            yield path, "removed" if letter == "D" else "changed"
