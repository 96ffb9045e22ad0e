"""The table of layouts in docs/reference/layouts.md is the one that check_layout makes."""

import pytest

from jspeed.errors import BadInput


@pytest.mark.slow  # steps of all recipes at their own sizes are traced
def test_the_table_in_the_docs_is_what_recipes_take(monkeypatch):
    from benches import layouts

    before, written = layouts.PAGE.read_text(), {}
    monkeypatch.setattr(layouts, "write_whole", written.__setitem__)
    layouts.layouts(write=True)
    assert written == {layouts.PAGE: before}, (
        "python scripts/bench.py layouts --write makes it anew"
    )
    with pytest.raises(BadInput, match="lacks the markers"):
        layouts.with_table("no table", "")
