"""Atomic file writes: a full disk gives an error message and leaves neither half a file nor half a line."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jspeed.files import Lines, read_json, write_whole

from .multi_process import said


@pytest.fixture
def no_room():
    """No file of this process may grow beyond 100 bytes; a disk that is full answers in the same places."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_whole_file_that_does_not_fit_leaves_the_old_one(tmp_path, no_room):
    path = tmp_path / "run.json"
    write_whole(path, "old")
    assert "run.json cannot be written (File too large); make room" in said(lambda: write_whole(path, "x" * 101))
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
    for call in (lambda: Lines(tmp_path / "no" / "file"), lambda: write_whole(tmp_path / "no" / "file", "")):
        assert "no/file cannot be written (No such file or directory)" in said(call)


def test_a_pipe_is_no_file_of_lines(tmp_path):
    """Opened to write, one that nobody reads is waited for; to one that somebody reads the lines would be lost."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert "metrics.jsonl cannot be written (No such device" in said(lambda: Lines(tmp_path / "metrics.jsonl"))
    reader = os.open(tmp_path / "metrics.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    assert "metrics.jsonl cannot be written (not a regular file)" in said(lambda: Lines(tmp_path / "metrics.jsonl"))
    os.close(reader)


def test_json_of_any_depth_is_json_or_not(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ValueError):
        read_json(tmp_path / "deep.json")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(OSError, match="not a regular file"):
        read_json(tmp_path / "pipe.json")


def test_a_written_file_has_the_mode_that_the_umask_allows(tmp_path):
    code = f"from pathlib import Path; from jspeed import files; files.write_whole(Path({str(tmp_path / 'f')!r}), '')"
    for umask, mode in ((0o077, 0o600), (0o022, 0o644)):
        subprocess.run([sys.executable, "-c", code], check=True, umask=umask)
        assert (tmp_path / "f").stat().st_mode & 0o777 == mode
