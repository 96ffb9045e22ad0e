"""Output folders: complete or absent, never mixed with what another process made."""

import errno
import os

import pytest

from jspeed.corpus.shards.output_folder import atomic_folder
from jspeed.errors import BadInput


def fill(folder):
    folder.mkdir()
    (folder / "other").write_text("")


def test_what_another_process_made_is_not_taken_for_ours(tmp_path):
    """Neither folder has a manifest, as of two exports; without a comparison none is equal."""
    out = tmp_path / "new" / "out"
    with (
        pytest.raises(BadInput, match="was filled by something else"),
        atomic_folder(out) as folder,
    ):
        (folder / "file").write_text("ours")
        fill(out)
    assert os.listdir(out.parent) == ["out"] and os.listdir(out) == ["other"]


def test_an_equal_folder_of_another_process_stands(tmp_path):
    with atomic_folder(
        tmp_path / "out", lambda ours, theirs: ours.is_dir() and theirs == tmp_path / "out"
    ):
        fill(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_a_failure_removes_the_parents_it_made(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "a" / "b" / "out"):
        1 / 0  # noqa: B018
    assert not os.listdir(tmp_path)


def test_a_file_system_that_renames_no_folders_is_named(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(BadInput, match=r"\(rename: Function not implemented, ENOSYS\); choose"):
        with atomic_folder(tmp_path / "out"):
            pass
    assert not any(tmp_path.iterdir())
