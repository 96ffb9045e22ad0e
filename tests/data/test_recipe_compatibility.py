"""Data that do not fit the recipe are refused before anything is compiled or written."""

import json
import os
import re

import numpy as np
import pytest

from jspeed.base.files import sha256_of
from jspeed.data.manifest import manifest_of
from jspeed.errors import BadInput
from jspeed.run import setup
from jspeed.run.find_recipe import find
from jspeed.run.options import Options
from jspeed.run.train import train

from ..multi_process import shards, toy

SETS = tuple(toy()[2:])
FACTS = {"tokenizer": "bytes", "vocab_size": 257, "bos_id": 256, "source": {}}


class Compiled(Exception):
    """All checks were passed."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    def compiled(*_):
        raise Compiled

    monkeypatch.setattr(setup, "compile_and_warm_up", compiled)
    return shards(tmp_path / "shards")


def describe(folder, **changes):
    files = []
    for path in sorted(folder.glob("*.bin")):
        size = path.stat().st_size
        record = dict(
            name=path.name, split=path.name.split("_")[1], bytes=size, sha256=sha256_of(path)
        )
        files.append(record | {"tokens": (size - 1024) // 2, "documents": 1})
    (folder / "manifest.json").write_text(json.dumps(manifest_of(files, FACTS) | changes))


def outcome(folder, recipe="stdlib", *sets):
    run_dir = folder.parent / "run"
    with pytest.raises((BadInput, Compiled)) as caught:
        train(
            Options(str(recipe), data=folder, set_=(*SETS, *sets), run_dir=run_dir, progress=False)
        )
    assert not run_dir.exists() and "\n" not in str(caught.value)
    return "fits" if caught.type is Compiled else str(caught.value)


def test_data_that_fit(folder):
    assert outcome(folder) == "fits"  # nothing is known but the ids
    describe(folder)
    assert outcome(folder) == "fits"
    describe(folder, bos_id=None)
    assert outcome(folder) == "fits"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 10, "bos_id": None}, "at token position .* but its manifest.json says 10"),
        ({"tokenizer": 3}, "'tokenizer': expected a name, found 3"),
    ],
)
def test_a_manifest_that_does_not(folder, changes, message):
    describe(folder, **changes)
    assert re.search(message, outcome(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 300}, "holds tokens of bytes with 300 ids but recipe stdlib has room for"),
        ({"tokenizer": "gpt2"}, "holds tokens of gpt2 but recipe stdlib expects bytes tokens; "),
    ],
)
def test_a_recipe_without_a_vocabulary_to_change(folder, tmp_path, changes, message):
    (tmp_path / "fixed.py").write_text(
        find("stdlib").source.replace("VOCAB = 272", "VOCAB = 16 * 17")
    )
    describe(folder, **changes)
    assert message in outcome(folder, tmp_path / "fixed.py")
    assert outcome(folder) == "fits"  # stdlib takes theirs: tests/run/test_other_tokens.py


def test_no_manifest_but_something_of_its_name(folder):
    (folder / "manifest.json").write_text("{")
    assert "is cut short" in outcome(folder)
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    assert "manifest.json cannot be read (not a regular file)" in outcome(folder)


@pytest.mark.parametrize("split", ["train", "val"])
def test_ids_that_the_recipe_has_no_room_for(folder, split):
    (path,) = folder.glob(f"*_{split}_*.bin")
    tokens = np.memmap(path, "<u2", "r+", 1024)
    tokens[7] = 257
    tokens.flush()
    assert (
        f"{path} holds token id 257 at token position 7 but recipe stdlib has room for 257 ids; "
        in outcome(folder)
    )


def test_lanes_that_start_at_documents_need_separators(folder, tmp_path):
    source = (find("stdlib").path).read_text()
    recipe = tmp_path / "aligned.py"
    recipe.write_text(
        source.replace("bos_id=256, shuffle_block=LANE_LEN", 'bos_id=256, align="bos"')
    )
    describe(folder, bos_id=None)
    assert "without a document separator but the lanes of recipe" in outcome(folder, recipe)
    describe(folder, bos_id=10)
    assert outcome(folder, recipe) == "fits"
    recipe.write_text(recipe.read_text().replace("VOCAB = 272", "VOCAB = 16 * 17"))
    assert "whose document separator is 10, but recipe" in outcome(folder, recipe)
