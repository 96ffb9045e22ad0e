"""Commands of `jspeed leaderboard`, as a user calls them: add, verify, show, page."""

import json
import shutil
from pathlib import Path

import pytest

from jspeed.board import command as board
from jspeed.cli import repository
from jspeed.errors import BadInput

from ..call_script import Done, call
from ..record.synthetic_runs import make_run, make_series, rewrite, source_of
from ..refusals import refused

REPOSITORY = Path(__file__).resolve().parents[2]


def script(*arguments: str | Path) -> Done:
    return call(Path.cwd(), "leaderboard.py", *arguments)


def stopped(done: Done, *words: str) -> None:
    assert done.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1, done
    for word in words:
        assert word in done.err


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return tmp_path / "records"


def test_add_show_verify(records: Path, tmp_path: Path) -> None:
    records.mkdir()
    empty = script("show", "--records", records)
    assert empty.code == 0 and empty.out.count("\n") == 1
    assert "jspeed leaderboard add RUN_DIR" in empty.out

    added = script("add", make_series(tmp_path / "series", [60.0, 62.0]), "--records", records)
    assert added.code == 0 and added.out.count("added ") == 2, added.err
    shown = script("show", "--records", records, "--track", "stdlib/cpu")
    assert shown.code == 0 and "61.0 s" in shown.out and not shown.err
    verified = script("verify", "--records", records)
    assert verified.code == 0
    assert "2 runs, 1 plans, 1 recipes, 0 tracks; all files agree" in verified.out

    path = next(records.rglob("*-s2-*.json"))
    rewrite(path, "timed_seconds", value=50.0)
    wrong = script("verify", "--records", records)
    assert wrong.code == 1 and f"{path}: field 'timed_seconds': expected the sum" in wrong.out
    assert script("verify", path, "--records", records).code == 1
    assert script("verify", next(records.rglob("*-s1-*.json")), "--records", records).code == 0
    stopped(script("verify", tmp_path / "nowhere", "--records", records), "does not exist")
    stopped(script("show", "--records", records), "timed_seconds")


def test_add_says_what_is_still_missing(records: Path, tmp_path: Path) -> None:
    folder = make_series(tmp_path / "series", [60.0, 62.0])
    (folder / "2-stdlib-s2" / "run.json").unlink()
    added = script("add", folder, "--records", records)
    assert added.code == 0 and "a run of stdlib with seed 2" in added.out
    assert script("verify", "--records", records).code == 1


def test_bad_input_is_one_error_message(records: Path, tmp_path: Path) -> None:
    stopped(
        script("add", make_run(tmp_path / "bad", status="stopped"), "--records", records),
        "was stopped early",
    )
    stopped(script("add", tmp_path / "none", "--records", records), "cannot be read")
    script("add", make_run(tmp_path / "good"), "--records", records)
    stopped(script("show", "--records", records, "--track", "stdlib/cpus"), "'stdlib/cpu'?")


MARKERS = (
    "# A project\n<!-- leaderboard: made by scripts/leaderboard.py page -->\n<!-- /leaderboard"
    " -->\nThe end.\n"
)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with empty records around the script; the package is used from elsewhere."""
    folder = tmp_path / "repository"
    for name in ("scripts/benches", "records"):
        (folder / name).mkdir(parents=True)
    (folder / "README.md").write_text(MARKERS)
    monkeypatch.setattr("sys.argv", [str(folder / "scripts" / "leaderboard.py")])
    return folder


def test_after_add_the_page_is_made_and_verify_passes(checkout, tmp_path, capsys):
    board.add_((make_series(tmp_path / "series", [60.0, 62.0]),))
    assert board.verify_() == 0, capsys.readouterr().out
    assert capsys.readouterr().out.count("wrote ") == 3
    assert (checkout / "README.md").read_text().startswith("# A project") and (
        (checkout / "site") / "index.html"
    ).is_file()


@pytest.mark.parametrize(
    "edit", [lambda text: text.replace("61.0", "50.0"), lambda text: text.replace("\n", "\r\n")]
)
def test_verify_notices_another_number_in_the_readme(checkout, tmp_path, capsys, edit):
    (checkout / "records/stdlib/cpu").mkdir(parents=True)
    rules = (REPOSITORY / "records/stdlib/cpu/track.toml").read_text()
    pins = ("val_sha256", "train_sha256", "kind", "platform")
    kept = [line for line in rules.splitlines() if not line.startswith(pins)]
    (checkout / "records/stdlib/cpu/track.toml").write_text("\n".join(kept))
    board.add_(
        (make_series(tmp_path / "series", [60.0, 62.0, 61.0, 61.0], [1.39, 1.3901, 1.3902, 1.39]),)
    )
    assert board.verify_() == 0, capsys.readouterr().out
    path = checkout / "README.md"
    before = path.read_bytes()
    path.write_bytes(edit(before.decode()).encode())
    assert path.read_bytes() != before and board.verify_() == 1
    assert f"{path}: expected the block that the records make" in capsys.readouterr().out


def test_the_readme_of_this_repository_is_what_its_records_make(capsys):
    """If this fails, the records changed: python scripts/leaderboard.py page."""
    done = script("verify")
    assert done.code == 0, done.out


def test_other_records_leave_the_repositorys_page_alone(checkout, tmp_path, records):
    board.add_((make_series(tmp_path / "series", [60.0, 62.0]),), records=records)
    assert not (checkout / "site").exists() and (checkout / "README.md").read_text() == MARKERS
    refused(r"--records .*README\.md belong to .*--out DIR", board.page_, records=records)
    board.page_(tmp_path / "site", records)
    assert json.loads((tmp_path / "site" / "leaderboard.json").read_text())["tracks"]


def test_an_empty_board_replaces_no_full_one(checkout, tmp_path):
    board.add_((make_series(tmp_path / "series", [60.0, 62.0]),))
    before = [
        path.read_bytes()
        for path in ((checkout / "README.md"), *sorted((checkout / "site").iterdir()))
    ]
    shutil.rmtree(checkout / "records")
    (checkout / "records").mkdir()
    refused("hold no run, and the page in .*site shows 2", board.page_)
    assert [
        path.read_bytes()
        for path in ((checkout / "README.md"), *sorted((checkout / "site").iterdir()))
    ] == before
    shutil.rmtree(checkout / "site")
    board.page_()
    assert (checkout / "site" / "index.html").is_file()


@pytest.mark.parametrize("command", ["verify_", "page_", "show_"])
def test_a_records_folder_that_is_not_there_is_bad_input(checkout, tmp_path, command):
    with pytest.raises(BadInput, match="records folder .*nowhere does not exist"):
        getattr(board, command)(records=tmp_path / "nowhere")
    assert not (checkout / "site").exists() and (checkout / "README.md").read_text() == MARKERS


def test_an_installed_package_needs_no_repository(tmp_path, records, capsys, monkeypatch):
    """Its board is records/ in the current folder; the repository's is asked for where only it will
    do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["/usr/bin/jspeed"])
    monkeypatch.setattr(
        "jspeed.__file__", str(tmp_path / "site-packages" / "jspeed" / "__init__.py")
    )
    assert repository() is None
    board.show_()
    assert "No records yet in records/" in capsys.readouterr().out
    for command in (board.verify_, board.page_):
        refused(r"folder records does not exist; .* --records", command)
    board.add_((make_series(tmp_path / "series", [60.0, 62.0]),))
    assert board.verify_() == 0 and len(list((tmp_path / "records").rglob("*-s*-*.json"))) == 2
    refused("there is no repository here; give --out DIR", board.page_)
    board.page_(tmp_path / "site")
    assert "What is timed" in (tmp_path / "site" / "index.html").read_text()
    assert "The clock" in board.timing_rule()
    refused("recipe 'stdlib' is in jspeed's repository", board.reproduce_, "stdlib")


def test_add_says_that_a_name_is_taken(checkout, tmp_path, capsys):
    series = make_series(tmp_path / "series", [60.0, 62.0], recipe="mine")
    board.add_((series,))
    assert "note: " not in capsys.readouterr().out
    other = make_series(
        tmp_path / "other", [60.0, 61.0], recipe="mine", source=source_of(0.3), fields={"RATE": 0.3}
    )
    board.add_((other,))
    assert "note: another recipe with a different source is named 'mine'" in capsys.readouterr().out


def test_help_says_that_a_record_is_optional():
    shown = script("verify", "--help").out
    assert "[RECORD]" in shown and "optional" in shown


def test_verify_of_one_file_however_its_path_is_written(tmp_path, records, capsys, monkeypatch):
    board.add_((make_series(tmp_path / "series", [60.0, 62.0]),), records=records)
    path = next(records.rglob("*-s2-*.json"))
    rewrite(path, "timed_seconds", value=50.0)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for record, folder in (
        (path, Path("records")),
        (path.relative_to(tmp_path), records),
        (path.parent, Path("records")),
    ):
        assert board.verify_(record, folder) == 1
        assert f"{record}; " in capsys.readouterr().out
    (records / "stdlib/cpu/std").mkdir()
    assert board.verify_(records / "stdlib/cpu/std", Path("records")) == 0, (
        "a folder whose name begins the same"
    )


def test_what_a_record_says_does_not_command_a_terminal(tmp_path, records, capsys):
    evil = "\x1b]0;title\x07\x1b[2J\u202elive\x9b31m"
    records.mkdir()
    changes = {
        "devices": {"kind": f"cpu {evil}", "count": 1, "processes": 1, "platform": "cpu"},
        "overrides": {f"A{evil}": evil},
        "parent": evil,
        "git": {"commit": f"c0{evil}", "dirty": False},
    }
    source = source_of(what=f"What {evil}")
    series = make_series(tmp_path / "s", [60.0] * 3, source=source, **changes)
    board.add_((series,), records)
    rewrite(series / "plan.json", "made", value=evil)
    next(records.rglob("plan-*.json")).write_bytes((series / "plan.json").read_bytes())
    board.verify_(records=records)
    next(records.rglob("plan-*.json")).unlink()
    board.show_(records=records)
    board.compare_("stdlib", "stdlib", records=records)
    said = capsys.readouterr()
    assert r"\x1b]0;title" in said.out and r"\u202e" in said.out
    assert all(character.isprintable() for character in (said.out + said.err).replace("\n", ""))
