"""Recipes beside the records, which no name finds: they are read by their paths and are what they
say they are."""

import ast

import pytest

from jspeed.board.records.remarks import RECORDS
from jspeed.run.find_recipe import find

IDEAS = sorted((RECORDS / "ideas").glob("*.py"))


@pytest.mark.parametrize("path", IDEAS, ids=lambda path: path.stem)
def test_ideas_are_read_by_their_paths(path):
    recipe = find(str(path), trace=False).recipe
    assert recipe.name == path.stem.replace("_", "-") and recipe.steps


def test_jspeed1_is_r89_with_later_cooldown():
    ours, parent = (
        find(str(RECORDS / "ideas" / "jspeed1.py"), trace=False),
        find("r89", trace=False),
    )
    begin, end = "STARTS = ", "RECIPE = "
    codes = [
        found.source[found.source.index(begin) : found.source.index(end)]
        for found in (ours, parent)
    ]
    # whatever the width of their lines
    words = [ast.unparse(ast.parse(code)).split() for code in codes]
    assert words[0] == words[1]
    assert {name for name in parent.fields if ours.fields[name] != parent.fields[name]} == {
        "COOLDOWN"
    }
