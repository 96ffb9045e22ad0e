"""Downloads from a local server: cut, killed, corrupt, of the wrong size, without a network, on a
full disk."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jspeed.corpus import download
from jspeed.corpus.download import Download
from jspeed.corpus.fineweb import prepare_fineweb
from jspeed.corpus.tokenise import Tokenising, prepare_text
from jspeed.data.manifest import verify
from jspeed.errors import BadInput

from ..data.on_disk import shard_bytes
from ..refusals import refused
from .hub import COMMIT, serving

REPOSITORY = "kjj0/fineweb10B-gpt2"
SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare.py"


def shard(number: int, tokens: int = 200_000) -> bytes:
    ids = np.random.default_rng(number).integers(0, 50257, tokens)
    ids[::100] = 50256
    return shard_bytes(ids)


# The first training shard is larger than the 10 MB in which huggingface_hub writes.
CONTENT = {"fineweb_val_000000.bin": shard(0), "fineweb_train_000001.bin": shard(1, 9_000_000)}
CONTENT |= {f"fineweb_train_{n:06d}.bin": shard(n) for n in (2, 3)}
LARGE = len(CONTENT["fineweb_train_000001.bin"])
WRITTEN = 10 * 1024**2


@pytest.fixture
def hub():
    with serving() as server:
        server.files = {(REPOSITORY, name): content for name, content in CONTENT.items()}
        yield server


def command(hub, tmp_path, shards, **environment):
    words = ["-W", "error", SCRIPT, "fineweb", "--shards", shards, "--out", tmp_path / "set"]
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}
    # Not to look for Xet's own protocol, which this server lacks.
    own |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    return [sys.executable, *map(str, words)], os.environ | own | environment


def fineweb(hub, tmp_path, shards, **environment):
    line, variables = command(hub, tmp_path, shards, **environment)
    done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def check(tmp_path, shards):
    names = list(CONTENT)[: shards + 1]
    folder = tmp_path / "set"
    assert sorted(os.listdir(folder)) == sorted([*names, "manifest.json"])
    assert all((folder / name).read_bytes() == CONTENT[name] for name in names)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert verify(folder) == sum(len(CONTENT[name]) for name in names)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["source"]["commit"] == COMMIT and manifest["source"]["repository"] == REPOSITORY
    totals = manifest["splits"]["train"]
    assert (totals["files"], totals["tokens"]) == (
        shards,
        sum(len(CONTENT[name]) // 2 - 512 for name in names[1:]),
    )


def test_shards_come_whole_and_more_can_be_added(hub, tmp_path):
    code, out, err = fineweb(hub, tmp_path, 1)
    assert (code, err) == (0, "") and "is ready" in out
    check(tmp_path, 1)
    code, out, err = fineweb(hub, tmp_path, 3)
    assert (code, err) == (0, "")
    check(tmp_path, 3)
    assert set(hub.gets.values()) == {1}  # nothing twice
    code, out, err = fineweb(hub, tmp_path, 2, HF_HUB_OFFLINE="1")
    assert (code, err) == (0, "") and "is already there" in out


def test_cut_corrupt_and_short_answers_are_made_good(hub, tmp_path):
    hub.faults = {
        "fineweb_val_000000.bin": [("corrupt",)],
        "fineweb_train_000001.bin": [("cut", WRITTEN + 100_000)],
        "fineweb_train_000002.bin": [("status", 503)],
    }
    code, out, err = fineweb(hub, tmp_path, 2)
    assert (code, err) == (0, ""), err
    check(tmp_path, 2)
    assert hub.sent["fineweb_train_000001.bin"] == LARGE + 100_000
    assert hub.gets["fineweb_val_000000.bin"] == 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (("corrupt",), f"fineweb_train_000001.bin of {REPOSITORY}.* came with SHA-256"),
        pytest.param(
            ("short", 1000),
            "fineweb_train_000001.bin .*should be of size 18001024 but has size 1000",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_stays_wrong_is_said(hub, tmp_path, fault, words):
    hub.faults = {"fineweb_train_000001.bin": [fault] * 20}
    code, out, err = fineweb(hub, tmp_path, 1)
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("error: ")
    assert re.search(words, err), err
    assert not (tmp_path / "set").exists()
    hub.faults = {}
    assert fineweb(hub, tmp_path, 1)[0] == 0
    check(tmp_path, 1)
    assert hub.gets["fineweb_val_000000.bin"] == 1  # what had come is kept


@pytest.mark.parametrize(
    "signal_number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_killed_download_is_gone_on_with(hub, tmp_path, signal_number):
    hub.faults = {"fineweb_train_000001.bin": [("hang", WRITTEN + 100_000)]}
    line, variables = command(hub, tmp_path, 2)
    process = subprocess.Popen(
        line, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert hub.hanging.wait(60)
    val = tmp_path / ".set.download" / "fineweb_val_000000.bin"
    while not val.exists():
        assert process.poll() is None
    process.send_signal(signal_number)
    process.communicate(timeout=5)  # a server that says nothing is not waited for
    hub.released.set()
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[signal_number]
    assert not (tmp_path / "set").exists()
    code, out, err = fineweb(hub, tmp_path, 2)
    assert (code, err) == (0, ""), err
    check(tmp_path, 2)
    assert hub.gets["fineweb_val_000000.bin"] == 1 and hub.gets["fineweb_train_000001.bin"] == 2


def test_no_network_no_room_no_such_shard(hub, tmp_path):
    for environment, words in (
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be asked for its files"),
        ({"HF_HUB_OFFLINE": "1"}, "cannot be asked for its files (OfflineModeIsEnabled"),
    ):
        code, out, err = fineweb(hub, tmp_path, 1, **environment)
        assert (code, out) == (2, "") and err.count("\n") == 1 and words in err
        assert "HF_ENDPOINT" in err
    code, out, err = fineweb(hub, tmp_path, 104)
    assert (code, out) == (2, "") and "FineWeb 10B has 103 training shards" in err
    code, out, err = fineweb(hub, tmp_path, 4)
    assert (code, out) == (2, "") and "has no file fineweb_train_000004.bin" in err
    assert not [name for name in os.listdir(tmp_path) if name != "hf"]


def test_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(BadInput, match="has room for 0.0 GB but needs 200.0 GB"):
        download.fetch_hub(
            "a/b", COMMIT, [download.Remote("x", 200 * 10**9, None)], tmp_path, lambda _: None
        )


# One file from a URL


@pytest.fixture
def url(hub):
    hub.files["a/b", "text.txt"] = TEXT
    return f"{hub.url}/cdn/a/b/text.txt"


TEXT = bytes(range(256)) * 2000
SHA = hashlib.sha256(TEXT).hexdigest()


@pytest.mark.parametrize(
    ("faults", "gets"),
    [
        ([], 1),
        ([("cut", 1000), ("cut", 0), ("cut", 5000)], 4),
        ([("corrupt",)], 2),
        ([("status", 503)] * 3, 4),
    ],
)
def test_fetch(hub, url, tmp_path, faults, gets):
    hub.faults = {"text.txt": list(faults)}
    counted = []
    file = Download("text.txt", url, SHA)
    path = download.fetch(file, tmp_path / "new", lambda count, total: counted.append(count))
    assert path.read_bytes() == TEXT and os.listdir(path.parent) == ["text.txt"]
    assert hub.gets["text.txt"] == gets
    assert download.fetch(file, path.parent) == path and hub.gets["text.txt"] == gets
    assert sum(counted) == len(TEXT)


def test_fetch_refuses(hub, url, tmp_path):
    with pytest.raises(BadInput, match=f"should have SHA-256 {'0' * 64} but has {SHA}"):
        download.fetch(Download("text.txt", url, "0" * 64), tmp_path)
    with pytest.raises(BadInput, match="HTTP Error 404"):
        hub.faults = {"text.txt": [("status", 404)]}
        download.fetch(Download("text.txt", url, SHA), tmp_path)
    with pytest.raises(BadInput, match="cannot be fetched .*refused"):
        download.fetch(Download("text.txt", "http://127.0.0.1:9/x", SHA), tmp_path)
    assert not os.listdir(tmp_path)


def test_fetch_by_several_threads_at_once(url, tmp_path):
    """As several processes that evaluate do: each has its own temporary file."""
    path, file = tmp_path / "text.txt", Download("text.txt", url, SHA)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: download.fetch(file, tmp_path), range(4))) == {path}
    assert path.read_bytes() == TEXT and os.listdir(tmp_path) == ["text.txt"]


def foreign(folder):
    (folder / "mytext_train_000001.bin").write_bytes(shard(7))


def damaged_manifest(folder):
    (folder / "manifest.json").write_text("{")


def other_manifest(folder):
    (folder / "x.txt").write_text("text " * 100)
    prepare_text([folder / "x.txt"], folder / "made", Tokenising("bytes"))
    os.replace(folder / "made" / "manifest.json", folder / "manifest.json")  # without its shards
    shutil.rmtree(folder / "made")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (foreign, "holds other data than FineWeb 10B; choose another --out"),
        (damaged_manifest, "manifest.json is cut short"),
        (other_manifest, "holds other data than FineWeb 10B"),
    ],
)
def test_fineweb_is_not_mixed_into_other_data(tmp_path, change, message):
    """A folder with foreign shards, or a manifest that is not FineWeb's, complete or not; no
    network is asked."""
    (tmp_path / "set").mkdir()
    change(tmp_path / "set")
    before = {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()}
    refused(message, prepare_fineweb, tmp_path / "set", shards=1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()} == before


def test_fineweb_lists_every_shard_of_the_folder(hub, tmp_path):
    """Shards without a manifest, more of them than are asked for: training reads all."""
    (tmp_path / "set").mkdir()
    for name, content in CONTENT.items():
        (tmp_path / "set" / name).write_bytes(content)
    assert fineweb(hub, tmp_path, 1)[0] == 0
    check(tmp_path, 3)
    assert not hub.gets


def test_a_file_as_output_folder_is_refused_before_the_download(tmp_path):
    (tmp_path / "set").write_text("")
    refused("set is a file; expected a folder", prepare_fineweb, tmp_path / "set", shards=1)


def test_a_downloaded_file_that_is_no_shard_is_named(hub, tmp_path):
    hub.files[REPOSITORY, "fineweb_val_000000.bin"] = b"no shard" * 200
    code, out, err = fineweb(hub, tmp_path, 1)
    assert code == 2 and "cannot be written" not in err
    assert "fineweb_val_000000.bin is not a token shard" in err


def test_an_impossible_folder_name_is_an_error_message(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "describe_hub", lambda *_: (COMMIT, []))
    refused("written .File name too long", prepare_fineweb, tmp_path / ("x" * 250), shards=1)
