"""Reproducing a record at its commit in a git worktree, with a fake trainer."""

import subprocess
import textwrap
from pathlib import Path
from statistics import fmean

import pytest
from scipy import stats as scipy_stats

from jspeed.board import judge
from jspeed.board.records import store
from jspeed.board.series import reproduce

from ..multi_process import REPOSITORY
from ..record.synthetic_runs import make_series, source_of
from ..refusals import refused

# What lies in the repository at the record's commit.
TRAINER = """
    import subprocess, sys
    from pathlib import Path
    sys.path[:0] = [{tests!r}, {python!r}]
    from record.synthetic_runs import make_run
    from jspeed.board.records.preregistration import announcement_of, read_preregistration
    recipe, folder = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--run-dir") + 1])
    seed = int(sys.argv[sys.argv.index("--seed") + 1])
    runs = read_preregistration(folder.parent / "plan.json")["runs"]
    planned = next(run for run in runs if run["folder"] == folder.name)
    plan = announcement_of(folder, planned["recipe_hash"], seed, None)
    tree = Path(__file__).parents[1]
    def git(*words):
        return subprocess.run(["git", *words], cwd=tree, capture_output=True, \
text=True).stdout.strip()
    status = git("status", "--porcelain")
    facts = {{"commit": git("rev-parse", "HEAD"), "dirty": bool(status)}}
    assert (tree / "python" / "jspeed").is_dir() and list((tree / "python" / \
"jspeed").glob("_dataloader*"))
    make_run(folder, 50.0, seed, {loss} + 0.001 * seed, source=recipe.read_text(), plan=plan, \
git=facts)
"""


def git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *settings, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "scripts").mkdir(parents=True)
    (folder / "python" / "jspeed").mkdir(parents=True)
    (folder / "python" / "jspeed" / "x.py").write_text("")
    (folder / ".gitignore").write_text("*.so\n")
    (folder / "Cargo.toml").write_text("")
    places = {"tests": str(REPOSITORY / "tests"), "python": str(REPOSITORY / "python")}
    (folder / "scripts" / "speedrun.py").write_text(
        textwrap.dedent(TRAINER).format(loss=1.389, **places)
    )
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "the record's")
    return folder


def entry_of(tmp_path: Path, repository: Path, losses=(1.39, 1.391, 1.392)) -> dict:
    commit = git(repository, "rev-parse", "HEAD")
    series = make_series(
        tmp_path / "s", [60.0] * 3, list(losses), git={"commit": commit, "dirty": False}
    )
    store.add([series], tmp_path / "records")
    return judge.board(store.load(tmp_path / "records"))[0]["entries"][0]


def test_a_record_is_run_again_at_its_commit(tmp_path, repository, capfd):
    entry = entry_of(tmp_path, repository)
    (repository / "scripts" / "speedrun.py").write_text("broken since")
    git(repository, "commit", "-qam", "later")
    again = tmp_path / "again"
    assert reproduce.reproduce(repository, entry, source_of(), 0.001, 4, again, []) == 0
    out = capfd.readouterr().out
    assert "mean loss 1.3915 (n = 4); record: 1.3910 (n = 3)" in out and "they agree" in out
    assert "3 of 4 final losses equal the record's exactly" in out and "ratio 0.833" in out
    assert git(repository, "worktree", "list").count("\n") == 0, "the tree is gone"
    # a reproduction is evidence as any other
    paths = store.add([again], tmp_path / "records")
    runs = [row.run for row in store.load(tmp_path / "records").rows if row.path in paths]
    assert {(run["git"]["commit"], run["git"]["dirty"]) for run in runs} == {
        (entry["git"]["commit"], False)
    }


def test_another_result_does_not_agree(tmp_path, repository, capfd):
    entry = entry_of(tmp_path, repository, (1.35, 1.351, 1.352))
    again = tmp_path / "again"
    assert reproduce.reproduce(repository, entry, source_of(), 0.001, 2, again, []) == 1
    assert "they do not agree" in capfd.readouterr().out


def test_agreement_is_a_two_sided_z_test():
    runs = [{"seed": 1, "val_loss": 1.390}, {"seed": 2, "val_loss": 1.392}]
    entry = {"seconds": {"mean": 60.0}, "runs": runs}
    made = [
        {"seed": seed, "val_loss": loss, "timed_seconds": 60.0}
        for seed, loss in ((1, 1.390), (2, 1.395), (3, 1.394))
    ]
    z = (fmean([1.390, 1.395, 1.394]) - 1.391) / (0.001 * (1 / 2 + 1 / 3) ** 0.5)
    agrees, lines = reproduce.compare_losses(entry, made, 0.001)
    p = 2 * scipy_stats.norm.sf(abs(z))
    assert agrees == (p > 0.001) and f"two-sided p = {p:.2g}" in lines[-1]
    assert reproduce.compare_losses(entry, made[:1], None)[0]
    assert not reproduce.compare_losses(entry, made, None)[0]
    assert not reproduce.compare_losses(entry, [made[0] | {"val_loss": None}], 0.001)[0]


def not_reproduced(words, repository, entry):
    again = repository.parent / "again"
    refused(words, reproduce.reproduce, repository, entry, "", None, 1, again, [])


def test_a_commit_that_is_not_there(tmp_path, repository):
    entry = entry_of(tmp_path, repository)
    for commit in ("0" * 40, None):
        elsewhere = entry | {"git": {"commit": commit}}
        not_reproduced("does not have the record's commit", repository, elsewhere)


def test_an_extension_that_cannot_be_built_is_an_error_message(tmp_path, repository):
    entry = entry_of(tmp_path, repository)
    (repository / "Cargo.toml").write_text("[another]")
    git(repository, "commit", "-qam", "other sources")
    not_reproduced("the extension of commit .* cannot be built", repository, entry)
    assert git(repository, "worktree", "list").count("\n") == 0


def test_git_that_fails_silently_or_is_not_there_is_a_message(tmp_path, repository, monkeypatch):
    entry = entry_of(tmp_path, repository)

    def run(command, **_):
        return subprocess.CompletedProcess(command, int("add" in command), "", "")

    monkeypatch.setattr(subprocess, "run", run)
    not_reproduced("git cannot check out .*: no message", repository, entry)

    def absent(command, **_):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", absent)
    not_reproduced("git is not installed", repository, entry)
