"""Recipes beside the records, which no name finds: they are read by their paths and are what they
say they are."""

import re

import pytest

from jspeed.board.records.remarks import RECORDS
from jspeed.run.find_recipe import find

IDEAS = sorted((RECORDS / "ideas").glob("*.py"))


@pytest.mark.parametrize("path", IDEAS, ids=lambda path: path.stem)
def test_ideas_are_read_by_their_paths(path):
    recipe = find(str(path), trace=False).recipe
    assert recipe.name == path.stem.replace("_", "-") and recipe.steps


def test_jspeed1_is_r89_with_later_cooldown():
    """By the line that stands in the ideas' README for it."""
    text = (RECORDS / "ideas" / "README.md").read_text()
    [(name, change)] = re.findall(r'`(\w+) --set "([^"]*)"`', text)
    ours, parent = find(name, [change], trace=False), find("r89", trace=False)
    assert ours.source == parent.source
    assert {name for name in parent.fields if ours.fields[name] != parent.fields[name]} == {
        "COOLDOWN"
    }
