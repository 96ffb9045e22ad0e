"""Recipes found by name or path, and fields set from the command line."""

import re
from pathlib import Path

import pytest

from jspeed.errors import BadInput
from jspeed.run.find import FOLDER, find


def test_a_copied_and_edited_file_runs_from_anywhere(tmp_path: Path):
    source = (FOLDER / "stdlib.py").read_text()
    copy = tmp_path / "mine.py"
    copy.write_text(re.sub(r"^WIDTH = .*$", "WIDTH = 96", source, flags=re.MULTILINE))
    mine, original = find(str(copy)), find("stdlib")
    assert mine.recipe.parameters["up"].shape[1] == 96
    assert mine.hash != original.hash
    copy.write_text(source)
    assert find(str(copy)).hash == original.hash


def test_set_reaches_everything_derived():
    found = find("stdlib", ["width=64", "HEADS=2", "MUON_LR=1"])
    assert found.recipe.parameters["query"].shape[1:] == (64, 64)
    assert found.overrides == {"WIDTH": 64, "HEADS": 2, "MUON_LR": 1.0}
    assert found.fields["WIDTH"] == 64 and found.fields["HEADS"] == 2


@pytest.mark.parametrize(
    ("name", "sets", "words"),
    [
        ("stdlb", (), "did you mean 'stdlib'"),
        ("fineweb_cpu", (), "did you mean 'fineweb-cpu'"),
        ("none.py", (), "does not exist"),
        ("stdlib", ("WIDHT=3",), "did you mean 'WIDTH'"),
        ("stdlib", ("WIDTH",), "write FIELD=VALUE"),
        ("stdlib", ("WIDTH=wide",), "of type int"),
        ("stdlib", ("WIDTH=1.5",), "is float"),
        ("stdlib", ("HEADS=0",), "fails at line"),
    ],
)
def test_refuses(name, sets, words):
    with pytest.raises(BadInput, match=words):
        find(name, sets)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "defines no RECIPE"),
        ("RECIPE = 1\n", "defines no RECIPE"),
        ("def\n", "cannot be read as Python"),
        ("import nothing_like_this\n", "fails at line 1 with ModuleNotFoundError"),
    ],
)
def test_refuses_files(tmp_path: Path, text, words):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        find(str(path))
