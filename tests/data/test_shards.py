"""Opening shards: what is valid, one message for each way a file can be bad, and files that go bad
later."""

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspeed.data import (
    ShardError,
    ShardFormatError,
    Shards,
    ShardTruncatedError,
    TokenLoader,
    errors,
    find_split,
    open_shards,
)
from jspeed.data.find_shards import split_of
from jspeed.errors import BadInput

from ..refusals import refused
from .on_disk import shard_bytes


def test_shards_are_sorted_and_described(tmp_path):
    for name, count in [
        ("b_train_000002.bin", 5),
        ("a_train_000001.bin", 7),
        ("a_val_000000.bin", 3),
    ]:
        (tmp_path / name).write_bytes(shard_bytes(range(count)))
    shards = open_shards(str(tmp_path / "*_train_*.bin"))
    assert isinstance(shards, Shards) and len(shards) == 2 and shards.num_tokens == 12
    assert shards.paths == [tmp_path / "a_train_000001.bin", tmp_path / "b_train_000002.bin"]
    assert "\n" not in repr(shards) and "2 files, 12 uint16 tokens" in repr(shards)
    assert open_shards(reversed(shards.paths)).fingerprint == shards.fingerprint
    assert int(shards.fingerprint, 16)
    assert open_shards(shards.paths[:1]).fingerprint != shards.fingerprint
    assert open_shards(tmp_path / "a_val_000000.bin").num_tokens == 3
    odd = tmp_path / "odd[1].bin"
    odd.write_bytes(shard_bytes())
    assert open_shards(odd).paths == [odd]


BAD = {
    "has 1023 bytes, fewer than the 1024 bytes of a shard header": shard_bytes()[:1023],
    "has 0 bytes, fewer than the 1024 bytes": b"",
    r"the magic number 20240520 \(uint16\) or 20240801 \(uint32\) but is 20240521": shard_bytes(
        magic=20240521
    ),
    "should be version 7 .* but its header says version 1": shard_bytes(magic=20240801),
    "should be version 1 .* but its header says version 7": shard_bytes(version=7),
    "should hold at least one token but its header counts 0": shard_bytes([]),
    "should hold at least one token but its header counts -5": shard_bytes(count=-5),
    "is too short: its header counts 4 uint16 tokens, .* 1032 bytes, but the file has 1030": (
        shard_bytes(count=4)
    ),
    "is too short: .* but the file has 1029": shard_bytes()[:-1],
    "has trailing bytes: its header counts 2 uint16 tokens, which take 1028 bytes, but": (
        shard_bytes(count=2)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_each_bad_file_has_its_error_message(message, tmp_path):
    path = tmp_path / "x_train_000001.bin"
    path.write_bytes(BAD[message])
    with pytest.raises(ShardFormatError, match=message) as caught:
        open_shards([path])
    text = str(caught.value)
    assert text.startswith(f"shard {path} ") and "\n" not in text and "prepare" in text
    assert all(isinstance(caught.value, kind) for kind in (BadInput, OSError, ValueError))


def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "iterdir", denied)
    with pytest.raises(ShardError, match=f"{tmp_path} cannot be read .Permission denied"):
        find_split(tmp_path, "train")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ShardError, match=r"no shard matches the pattern .*\*\.bin"):
        open_shards(str(tmp_path / "*.bin"))
    with pytest.raises(ShardError, match=r"gone\.bin cannot be read .*No such file or directory"):
        open_shards(tmp_path / "gone.bin")
    with pytest.raises(ShardError, match="not a regular file"):
        open_shards(tmp_path)
    os.mkfifo(tmp_path / "pipe.bin")
    with pytest.raises(ShardError, match="not a regular file"):
        open_shards(tmp_path / "pipe.bin")
    refused("no shard was given", open_shards, [])


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=1100), st.integers(-(2**31), 2**31 - 1), st.booleans())
def test_no_bytes_make_it_panic(tmp_path_factory, junk, count, plausible):
    path = tmp_path_factory.getbasetemp() / "junk.bin"
    path.write_bytes(shard_bytes(np.zeros(len(junk) // 2), count=count) if plausible else junk)
    try:
        assert open_shards([path]).num_tokens == count
    except ShardFormatError:
        pass


def test_errors_are_messages_that_pickle():
    for kind in (each for each in vars(errors).values() if isinstance(each, type)):
        error = kind("one message")
        copy = pickle.loads(pickle.dumps(error))
        assert str(copy) == "one message" and type(copy) is type(error)
        assert isinstance(error, BadInput)
    assert issubclass(ShardTruncatedError, ShardError) and issubclass(ShardFormatError, ValueError)


def test_the_split_of_a_folder(tmp_path):
    def expect(message, split="train", folder=tmp_path):
        refused(message, find_split, folder, split)

    expect("does not exist.*jspeed prepare text FILES --out DIR", folder=tmp_path / "none")
    expect("has no .bin shard in it.*jspeed prepare text FILES --out DIR")
    (tmp_path / "fineweb_val_000000.bin").write_bytes(shard_bytes())
    expect("has 1 .bin file.* but no training shards.*jspeed prepare text FILES --out DIR")
    assert find_split(tmp_path, "val").num_tokens == 3
    os.rename(tmp_path / "fineweb_val_000000.bin", tmp_path / "fineweb_train_000001.bin")
    expect("no validation shards.*jspeed prepare text FILES --out DIR", "val")
    assert len(find_split(tmp_path, "train")) == 1
    expect('split should be "train" or "val"', "test")
    expect("is not a folder", folder=tmp_path / "fineweb_train_000001.bin")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("fineweb_train_000001", "train"),
        ("fineweb_val_000000", "val"),
        ("my_train_val_000001", "val"),  # counted for both, it trained on what it validated on
        ("my_val_train_000001", "train"),
        ("train_val_000000", "val"),
        ("tiny_shakespeare_train", "train"),  # llm.c's
        ("TinyStories_val", "val"),
        ("train", "train"),
        ("val_000000", "val"),
        ("x_train_000001_b", "train"),
        ("trained_values", None),
        ("interval_000001", None),
        ("x_training_1", None),
    ],
)
def test_a_file_is_of_one_split(tmp_path, name, split):
    assert split_of(tmp_path / f"{name}.bin") == split
    for other in ("train", "val"):  # of the folder's name nothing is read
        assert split_of(tmp_path / "a_train_val_x" / f"{name}.{other}") == split


def test_files_of_llm_c_are_a_data_folder(tmp_path):
    for name, count in (("tiny_shakespeare_train", 5), ("tiny_shakespeare_val", 3)):
        (tmp_path / f"{name}.bin").write_bytes(shard_bytes(range(count)))
    assert [find_split(tmp_path, split).num_tokens for split in ("train", "val")] == [5, 3]
    (tmp_path / "hellaswag_val.bin").write_bytes(shard_bytes(magic=20240522))
    with pytest.raises(ShardFormatError, match=r"hellaswag_val.bin .* but is 20240522"):
        find_split(tmp_path, "val")


def test_files_without_a_header_are_named(tmp_path):
    convert = f"convert them with `jspeed prepare tokens {tmp_path} --out DIR`"
    np.save(tmp_path / "edufineweb_train_000001.npy", np.arange(9, dtype="<u2"))
    refused(f"no .bin shard in it; .*.npy .* are none; {convert}", find_split, tmp_path, "train")
    for name in ("train.bin", "val.bin"):
        np.arange(1000, dtype="<u2").tofile(tmp_path / name)
        with pytest.raises(
            ShardFormatError, match=f"{name} is not .*; nanoGPT's .* have no header: {convert}"
        ) as caught:
            find_split(tmp_path, name[:-4])
        assert "\n" not in str(caught.value)


GOES_BAD = """
    import os, sys, time
    from pathlib import Path
    from jspeed.data import ShardTruncatedError, TokenLoader, open_shards
    path, action = Path(sys.argv[1]), sys.argv[2]
    shards, (align, cut) = open_shards(path), ("bos", 500) if sys.argv[3] else (None, None)
    loader = TokenLoader(
        shards, lanes=2, lane_len=1000, align=align, bos_id=3, epochs=None, max_doc_len=cut, \
prefetch=1,
        backend=sys.argv[4],
    )
    next(loader)
    time.sleep(0.05)
    content = path.read_bytes()
    if action == "truncate":
        os.truncate(path, 2000)
    elif action == "shave":
        os.truncate(path, len(content) - 2)
    elif action == "overwrite":
        path.write_bytes(content)
    elif action == "unlink":
        path.unlink()
    elif action == "rename":
        path.with_suffix(".new").write_bytes(content)
        os.replace(path.with_suffix(".new"), path)
    try:
        for _ in range(20):
            next(loader)
    except ShardTruncatedError as error:
        print("truncated", error)
    else:
        print("fine")
"""


WAYS = [("bos", "mmap"), ("", "mmap"), ("bos", "pread")]
ACTIONS = "truncate shave overwrite unlink rename".split()


@pytest.mark.parametrize(
    ("action", "align", "backend"),
    [
        pytest.param(
            action, *way, marks=[pytest.mark.slow] * (way != WAYS[0] and action != "truncate")
        )
        for action in ACTIONS
        for way in WAYS
    ],
)
def test_files_that_change_while_they_are_read(action, align, backend, tmp_path):
    path = tmp_path / "x_train_000001.bin"
    path.write_bytes(shard_bytes(np.resize([3, 4, 5, 6], 50_000)))
    command = [sys.executable, "-c", textwrap.dedent(GOES_BAD), str(path), action, align, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    expected = "fine" if action in ("unlink", "rename") else f"truncated shard {path} "
    assert done.stdout.startswith(expected)


def test_shards_may_outlive_their_files_until_they_are_mapped(tmp_path):
    path = Path(tmp_path, "x.bin")
    path.write_bytes(shard_bytes(range(100)))
    shards = open_shards(path)
    path.write_bytes(shard_bytes(range(90)))
    with pytest.raises(ShardTruncatedError, match="had 1224 bytes .* and has 1204 now"):
        next(TokenLoader(shards, lanes=1, lane_len=5, align=None))


@pytest.mark.parametrize("second", [False, True])
def test_a_pipe_in_place_of_a_shard_is_not_waited_for(tmp_path, second):
    """Neither when it is read, nor while the shard before it is."""
    for number in (1, 2):
        (tmp_path / f"x_{number}.bin").write_bytes(shard_bytes(range(100)))
    loader = TokenLoader(open_shards(f"{tmp_path}/*.bin"), lanes=1, lane_len=30, align=None)
    path = tmp_path / f"x_{2 if second else 1}.bin"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ShardError, match=f"{path} cannot be read at byte 0 .not a regular"):
        for _ in range(6):
            next(loader)
