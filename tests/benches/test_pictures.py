"""The pictures that a command makes are what it makes, and show the rooms that there are."""

from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "jspeed"


def test_the_house_has_every_room():
    from benches import pictures

    shown = {room for floor in (*pictures.CORE, *pictures.SATELLITES) for room in floor}
    assert shown == {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {"recipe"}


def test_pictures_are_what_the_command_draws(monkeypatch):
    from benches import pictures

    written = {}
    monkeypatch.setattr(pictures, "write_whole", written.__setitem__)
    pictures.pictures()
    assert len(written) == 2
    for path, text in written.items():
        words = [part.split("<")[0] for part in text.split(">")]
        there = [part.split("<")[0] for part in path.read_text().split(">")]
        # positions differ with the release of Matplotlib
        assert sorted(filter(str.strip, words)) == sorted(filter(str.strip, there)), path.name


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.parents[1].glob("[bl]*/*.svg")), ids=lambda p: p.name
)
def test_each_stored_picture_follows_light_and_dark(path):
    from jspeed.base import plots

    text = path.read_text()
    assert "@media (prefers-color-scheme: dark)" in text
    assert all(f'fill: {colour.lower()}"]' in text for colour in plots.DARK)
