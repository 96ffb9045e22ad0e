"""Atomic file writes: a full disk gives an error message and leaves neither half a file nor half a
line."""

import errno
import os
import pwd
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jspeed.base.files import Lines, cache_folder, read_json, write_whole
from jspeed.cli import main
from jspeed.run.options import Options

from .multi_process import said


@pytest.fixture
def no_room():
    """No file of this process may grow beyond 100 bytes; a disk that is full answers in the same
    places."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_whole_file_that_does_not_fit_leaves_the_old_one(tmp_path, no_room):
    path = tmp_path / "run.json"
    write_whole(path, "old")
    assert "run.json cannot be written" in said(lambda: write_whole(path, "x" * 101))
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_a_line_that_does_not_fit_is_not_begun(tmp_path, no_room):
    path = tmp_path / "metrics.jsonl"
    with Lines(path) as lines:
        lines.write("a" * 59)
        assert "metrics.jsonl cannot be written" in said(lambda: lines.write("b" * 59))
        lines.write("c" * 39)
    assert path.read_text() == "a" * 59 + "\n" + "c" * 39 + "\n"
    with Lines(path) as again:
        again.clear()
        again.write("d")
    assert path.read_text() == "d\n"


def test_a_folder_that_is_not_there(tmp_path: Path):
    for call in (
        lambda: Lines(tmp_path / "no" / "file"),
        lambda: write_whole(tmp_path / "no" / "file", ""),
    ):
        assert "no/file cannot be written (" in said(call)


def test_a_pipe_is_no_file_of_lines(tmp_path):
    """Opened to write, one that nobody reads is waited for; to one that somebody reads the lines
    would be lost."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert "metrics.jsonl cannot be written" in said(lambda: Lines(tmp_path / "metrics.jsonl"))
    reader = os.open(tmp_path / "metrics.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    assert "metrics.jsonl cannot be written" in said(lambda: Lines(tmp_path / "metrics.jsonl"))
    os.close(reader)


@pytest.fixture
def no_passwd(monkeypatch):
    """A user id without an entry in passwd, as ``docker run --user 12345`` gives."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("JSPEED_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HOME": "{}"}, "{}/.cache/jspeed"),
        ({"HOME": "{}/missing"}, "{}/missing/.cache/jspeed"),
        ({"XDG_CACHE_HOME": "{}/x"}, "{}/x/jspeed"),
        ({"XDG_CACHE_HOME": "", "HOME": "{}"}, "{}/.cache/jspeed"),
        ({"JSPEED_CACHE": "{}/own"}, "{}/own"),
        ({"JSPEED_CACHE": "", "HOME": "{}"}, "{}/.cache/jspeed"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the names are Linux's")
def test_the_cache_folder(tmp_path, no_passwd, monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert cache_folder() == Path(expected.format(tmp_path)) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("home", [None, "relative", "."])
def test_without_a_home_the_variable_is_named_that_helps(no_passwd, monkeypatch, home):
    if home is not None:
        monkeypatch.setenv("HOME", home)
    sentence = said(cache_folder)
    assert (
        f"no home folder is known to keep data and compiled programs in (HOME is {home!r})"
        in sentence
    )
    assert sentence.endswith("set JSPEED_CACHE to a folder you can write to")


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HOME", ".cache/jspeed"), ("XDG_CACHE_HOME", "jspeed"), ("JSPEED_CACHE", "")],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the names are Linux's")
def test_a_cache_folder_that_cannot_be_made(tmp_path, no_passwd, monkeypatch, variable, below):
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir()
    for place in ("file", "read-only"):
        folder = tmp_path / place / "x" / below
        monkeypatch.setenv(variable, str(tmp_path / place / "x"))
        wanted = (
            f"the cache folder {folder} is missing and cannot be made in {tmp_path / place}; set"
            " JSPEED_CACHE to"
        )
        assert wanted in said(cache_folder)
        monkeypatch.setattr(os, "access", lambda *_: False)
    folder.mkdir(parents=True)
    assert cache_folder() == folder  # what is in it can be read


def test_what_needs_no_cache_folder_does_without(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert Options().recipe_or_default == "stdlib"
    (tmp_path / "names.txt").write_text("anna\nemma\n" * 50)
    main.call(
        ["prepare", "names", "--input", str(tmp_path / "names.txt"), "--out", str(tmp_path / "out")]
    )
    assert f"jspeed run microgpt-names --data {tmp_path}/out" in capsys.readouterr().out
    for words in (["prepare", "names"], ["run", "stdlib"], ["run", "r29"]):
        assert "set JSPEED_CACHE to a folder you can" in said(lambda words=words: main.call(words))
    capsys.readouterr()
    main.call(["doctor"])
    assert "is missing and cannot be made in" in " ".join(capsys.readouterr().out.split())


def test_json_of_any_depth_is_json_or_not(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ValueError):
        read_json(tmp_path / "deep.json")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(OSError, match="not a regular file"):
        read_json(tmp_path / "pipe.json")


def test_a_written_file_has_the_mode_that_the_umask_allows(tmp_path):
    code = (
        "from pathlib import Path; from jspeed.base import files;"
        f" files.write_whole(Path({str(tmp_path / 'f')!r}), '')"
    )
    for umask, mode in ((0o077, 0o600), (0o022, 0o644)):
        subprocess.run([sys.executable, "-c", code], check=True, umask=umask)
        assert (tmp_path / "f").stat().st_mode & 0o777 == mode


def refuse(monkeypatch, call, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)


@pytest.mark.parametrize("call", ["fsync", "fchmod"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_what_a_file_system_need_not_have_is_left(tmp_path, monkeypatch, call, number):
    """As CIFS without POSIX extensions, s3fs, mountpoint-s3."""
    refuse(monkeypatch, call, number)
    write_whole(tmp_path / "run.json", "{}")
    with Lines(tmp_path / "lines") as lines:
        lines.append(b"1", to_disk=True)
    assert (tmp_path / "run.json").read_text() == "{}" and (tmp_path / "lines").read_text() == "1"


def test_a_disk_that_fails_is_no_file_system_without_a_call(tmp_path, monkeypatch):
    refuse(monkeypatch, "fsync", errno.EIO)
    told = said(lambda: write_whole(tmp_path / "run.json", "{}"))
    assert "(fsync: Input/output error, EIO); choose another folder" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EEXIST, errno.EOPNOTSUPP])
def test_where_nothing_can_be_renamed_the_content_is_written(tmp_path, monkeypatch, number):
    refuse(monkeypatch, "replace", number)
    for content in ("first, a longer one", "second"):
        write_whole(tmp_path / "run.json", content)
        assert (tmp_path / "run.json").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_what_cannot_be_written_over_is_not_lost(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("old")
    refuse(monkeypatch, "replace", errno.ENOSYS)
    monkeypatch.setattr("shutil.copyfileobj", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O")))
    told = said(lambda: write_whole(tmp_path / "run.json", "new"))
    (kept,) = [path for path in tmp_path.iterdir() if path.name != "run.json"]
    assert kept.read_text() == "new" and str(kept) in told and "EIO" in told
    told = said(lambda: write_whole(tmp_path / "more.json", "new"))
    assert not (tmp_path / "more.json").exists() and "see" not in told


def test_a_call_that_is_refused_is_named_with_its_number(tmp_path, monkeypatch):
    refuse(monkeypatch, "replace", errno.EIO)
    told = said(lambda: write_whole(tmp_path / "run.json", "{}"))
    assert "(rename: Input/output error, EIO)" in told and "make room" not in told
    with Lines(tmp_path / "lines") as lines:
        lines.clear()  # of nothing, no call
        lines.write("1")
        refuse(monkeypatch, "fstat", errno.ESTALE)
        assert "Stale file handle, ESTALE" in said(lines.clear)
        monkeypatch.undo()
