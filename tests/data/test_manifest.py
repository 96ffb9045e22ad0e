"""Manifests that are none, each with its sentence; the same reader for all who read them."""

import copy
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspeed.corpus.tokenise import prepare_text
from jspeed.data.manifest import complete_manifest, holds, read_manifest
from jspeed.errors import BadInput
from jspeed.files import open_regular


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manifest")
    for index in range(20):
        (folder / f"{index:02}.txt").write_text(f"Once upon a time {index}\n" * 20)
    return prepare_text([folder], folder / "out", "bytes")


def with_change(whole, folder, change):
    manifest = json.loads((whole / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def put(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(manifest):
        for key in keys:
            manifest = manifest[key]
        manifest[last] = value

    return change


BAD = [
    (put("format_version", 99), "format_version should be 1 but is 99"),
    (put("format_version", True), "format_version should be 1 but is true"),
    (put("vocab_size", "x"), 'vocab_size should be a whole number of 1 or more but is "x"'),
    (put("vocab_size", 0), "vocab_size should be a whole number of 1 or more but is 0"),
    (put("vocab_size", 257.0), "vocab_size should be a whole number of 1 or more but is 257.0"),
    (put("vocab_size", 10), "bos_id should be below vocab_size, 10 but is 256"),
    (put("tokenizer", 3), "tokenizer should be a name but is 3"),
    (put("bos_id", True), "bos_id should be a whole number of 0 or more, or null but is true"),
    (put("bos_id", -1), "bos_id should be a whole number of 0 or more, or null but is -1"),
    (put("pad_id", 257), "pad_id should be below vocab_size, 257 but is 257"),
    (put("symbols", "abc"), 'symbols should be a list of different characters but is "abc"'),
    (put("symbols", ["a", "bc"]), "symbols should be a list of different characters"),
    (put("symbols", ["a", "a"]), "symbols should be a list of different characters"),
    (
        put("symbols", [chr(i) for i in range(300)]),
        "the length of symbols should be at most vocab_size, 257 but is 300",
    ),
    (put("mark", "where"), "mark should be before, after, both or none"),
    (put("source", None), "source should be an object but is null"),
    (put("files", []), r"files should be a list of one or more but is \[\]"),
    (put("files", 0, 7), r"files\[0\] should be an object but is 7"),
    (put("files", 0, "name", "../x.bin"), r"files\[0\].name should be the name of a .bin file in the same folder"),
    (put("files", 1, "split", "test"), r'files\[1\].split should be train or val but is "test"'),
    (put("files", 1, "bytes", 1e300), r"files\[1\].bytes should be a whole number"),
    (put("files", 1, "tokens", -5), r"files\[1\].tokens should be a whole number of 1 or more but is -5"),
    (put("files", 1, "sha256", "x" * 64), r"files\[1\].sha256 should be 64 hexadecimal digits"),
    (put("splits", "train", "tokens", 5), "splits should be the sums of files"),
    (lambda manifest: manifest.pop("tokenizer"), "tokenizer is missing, a name was expected"),
    (lambda manifest: manifest["files"][1].pop("documents"), r"files\[1\].documents is missing"),
    (lambda manifest: manifest["files"].append(manifest["files"][0]), "files should be files of different names"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD, ids=[sentence[:60] for _, sentence in BAD])
def test_each_bad_manifest_has_its_sentence(whole, tmp_path, change, sentence):
    with_change(whole, tmp_path, change)
    with pytest.raises(BadInput, match=f"^{tmp_path}/manifest.json is no manifest: {sentence}") as caught:
        read_manifest(tmp_path)
    assert "\n" not in str(caught.value) and str(caught.value).endswith("shards need none")
    assert complete_manifest(tmp_path) is None and not holds(tmp_path, {})


@pytest.mark.parametrize("text", ["{", "", "\xff", "[" * 100_000, "1" * 10_000, '{"a": NaN'])
def test_no_json(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text.encode("latin1"))
    with pytest.raises(BadInput, match="manifest.json should be the manifest of a data folder but is not JSON"):
        read_manifest(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda its: st.lists(its, max_size=3) | st.dictionaries(st.text(max_size=5), its, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_value_anywhere_is_right_or_a_sentence(whole, tmp_path_factory, data):
    manifest = json.loads((whole / "manifest.json").read_text())
    place = manifest
    for _ in range(3):
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    folder = tmp_path_factory.getbasetemp()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    try:
        assert read_manifest(folder) == json.loads(json.dumps(manifest)) or place[key] != place[key]
    except BadInput as error:
        assert "\n" not in str(error)


def test_only_regular_files_are_opened(whole, tmp_path):
    """A pipe that nobody writes to would be waited for for ever."""
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(BadInput, match=r"manifest.json cannot be read \(not a regular file\)"):
        read_manifest(tmp_path)
    for path in (tmp_path / "manifest.json", "/dev/zero", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    assert read_manifest(tmp_path / "none") is None


def test_the_command_says_it(whole, tmp_path):
    for path in whole.iterdir():
        os.link(path, tmp_path / path.name)
    manifest = tmp_path / "manifest.json"
    content = json.loads(manifest.read_text())
    for value, flags, sentence in (("x", [], "vocab_size should be"), ([], ["--verify"], "files should be a list")):
        changed = copy.deepcopy(content) | {"vocab_size" if value else "files": value}
        manifest.unlink()
        manifest.write_text(json.dumps(changed))
        command = [sys.executable, "-m", "jspeed.data", tmp_path, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1
