"""Each invalid manifest is refused with its own error message, by all who read manifests."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspeed.base.files import open_regular
from jspeed.corpus.tokenise import Tokenising, prepare_text
from jspeed.data.manifest import complete_manifest, matches, read_manifest
from jspeed.errors import BadInput

from ..refusals import refused


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manifest")
    for index in range(20):
        (folder / f"{index:02}.txt").write_text(f"Once upon a time {index}\n" * 20)
    return prepare_text([folder], folder / "out", Tokenising("bytes"))


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
    (put("format_version", 99), r"'format_version': expected 1, found 99 \(int\)"),
    (put("format_version", True), "'format_version': expected 1, found True"),
    (put("vocab_size", "x"), "'vocab_size': expected a whole number of 1 or more, found 'x'"),
    (put("vocab_size", 0), "'vocab_size': expected a whole number of 1 or more, found 0"),
    (put("vocab_size", 257.0), "'vocab_size': expected a whole number of 1 or more, found 257.0"),
    (put("vocab_size", 10), "'bos_id': expected a number below vocab_size, 10, found 256"),
    (put("tokenizer", 3), "'tokenizer': expected a name, found 3"),
    (put("bos_id", True), "'bos_id': expected a whole number of 0 or more or null, found True"),
    (put("bos_id", -1), "'bos_id': expected a whole number of 0 or more or null, found -1"),
    (put("pad_id", 257), "'pad_id': expected a number below vocab_size, 257, found 257"),
    (put("symbols", "abc"), "'symbols': expected a list of different characters, found 'abc'"),
    (put("symbols", ["a", "bc"]), "'symbols': expected a list of different characters"),
    (put("symbols", ["a", "a"]), "'symbols': expected a list of different characters"),
    (put("symbols", [chr(i) for i in range(300)]), "'symbols': expected at most vocab_size, 257"),
    (put("mark", "where"), "'mark': expected 'before' or 'after' or 'both' or 'none'"),
    (put("source", None), "'source': expected an object, found null"),
    (put("files", []), r"'files': expected a list of one or more, found \[\]"),
    (put("files", 0, 7), r"'files\[0\]': expected an object, found 7"),
    (put("files", 0, "name", "../x.bin"), r"'files\[0\].name': expected the name of a .bin file"),
    (put("files", 1, "split", "test"), r"'files\[1\].split': expected 'train' or 'val'"),
    (put("files", 1, "bytes", 1e300), r"'files\[1\].bytes': expected a whole number"),
    (put("files", 1, "tokens", -5), r"'files\[1\].tokens': expected a whole number of 1 or more"),
    (put("files", 1, "sha256", "x" * 64), r"'files\[1\].sha256': expected 64 hexadecimal digits"),
    (put("splits", "train", "tokens", 5), "'splits': expected the totals of files"),
    (put("splits", None), "'splits': expected an object, found null"),
    (lambda manifest: manifest.pop("tokenizer"), "'tokenizer': expected a name"),
    (lambda manifest: manifest["files"][1].pop("documents"), r"'files\[1\].documents'"),
    (lambda manifest: manifest["files"].append(manifest["files"][0]), "'files': expected"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:60] for _, message in BAD])
def test_each_bad_manifest_has_its_error_message(whole, tmp_path, change, message):
    with_change(whole, tmp_path, change)
    said = refused(f"^{tmp_path}/manifest.json: field {message}", read_manifest, tmp_path)
    assert said.endswith("shards need none")
    assert complete_manifest(tmp_path) is None and not matches(tmp_path, {})


def test_a_manifest_without_splits_has_them_once_read(whole, tmp_path):
    """``jspeed doctor`` and ``jspeed prepare`` print them."""
    with_change(whole, tmp_path, lambda manifest: manifest.pop("splits"))
    assert read_manifest(tmp_path) == read_manifest(whole)


@pytest.mark.parametrize("text", ["{", "", "\xff", "[" * 100_000, "1" * 10_000, '{"a": NaN'])
def test_no_json(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text.encode("latin1"))
    refused("manifest.json is (not JSON|cut short)", read_manifest, tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda its: st.lists(its, max_size=3) | st.dictionaries(st.text(max_size=5), its, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_value_anywhere_is_accepted_or_has_an_error_message(whole, tmp_path_factory, data):
    manifest = json.loads((whole / "manifest.json").read_text())
    place = manifest
    for _ in range(3):
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
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
    refused(r"manifest.json cannot be read \(not a regular file\)", read_manifest, tmp_path)
    for path in (tmp_path / "manifest.json", "/dev/zero", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    assert read_manifest(tmp_path / "none") is None
