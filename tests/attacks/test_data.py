"""Shards that are other files, or other text, while a run reads them."""

import os
import shutil

import numpy as np
import pytest

from jspeed.data.errors import ShardTruncatedError
from jspeed.run.metrics_log import History

from ..multi_process import shards
from .attack import attack, failed

SHARD = "toy_train_000001.bin"


@pytest.fixture
def own(tmp_path):
    return shards(tmp_path / "shards")


def other_text(folder):
    """The training shard with the same header and other tokens."""
    content = (folder / SHARD).read_bytes()
    tokens = np.frombuffer(content[1024:], "<u2").copy()
    tokens[1:] = tokens[1:][::-1]
    return content[:1024] + tokens.tobytes()


def at_step_1(monkeypatch, act):
    stepped = History.stepped

    def first(self, *given):
        stepped(self, *given)
        if self.steps == 1:
            act()

    monkeypatch.setattr(History, "stepped", first)


def test_a_shard_that_the_genuine_one_replaces(own, tmp_path, monkeypatch):
    genuine = tmp_path / "genuine.bin"
    shutil.copy(own / SHARD, genuine)
    (own / SHARD).write_bytes(other_text(own))
    at_step_1(monkeypatch, lambda: os.replace(genuine, own / SHARD))
    run = attack(tmp_path, own, {})
    assert failed(run) == {"stream_repeats"}
    assert run["probes"]["stream_repeats"]["changed"] == ["tokens", SHARD]


def test_a_shard_that_is_written_over_and_keeps_its_times(own, tmp_path, monkeypatch):
    genuine = (own / SHARD).read_bytes()
    (own / SHARD).write_bytes(other_text(own))
    before = os.stat(own / SHARD)

    def restore():
        with (own / SHARD).open("r+b") as file:
            file.write(genuine)
        os.utime(own / SHARD, ns=(before.st_atime_ns, before.st_mtime_ns))

    at_step_1(monkeypatch, restore)
    try:
        assert failed(attack(tmp_path, own, {}, set_=("STEPS=4",))) == {"stream_repeats"}
    except ShardTruncatedError as error:  # a reader that met the writing ends the run at once
        assert "was written to" in str(error)


def test_a_folder_whose_name_stands_for_another(own, tmp_path, monkeypatch):
    other = shutil.copytree(own, tmp_path / "other")
    (other / SHARD).write_bytes(other_text(own))
    name = tmp_path / "data"
    name.symlink_to(other)

    def point_to_own():
        name.unlink()
        name.symlink_to(own)

    at_step_1(monkeypatch, point_to_own)
    run = attack(tmp_path, name, {})
    assert failed(run) == {"stream_repeats"}


@pytest.mark.parametrize("swap", [False, True])
def test_a_resumed_run_whose_first_part_read_another_shard(swap, own, tmp_path):
    genuine = (own / SHARD).read_bytes()
    if swap:
        (own / SHARD).write_bytes(other_text(own))
    attack(tmp_path, own, {}, set_=("STEPS=4",), max_minutes=1e-9, checkpoint_every=1)
    if swap:
        (own / SHARD).write_bytes(genuine)
    run = attack(tmp_path, own, {}, set_=("STEPS=4",), resume=True, checkpoint_every=1)
    assert run["resumed"] and failed(run) == ({"stream_repeats"} if swap else set())
