"""track.toml: each invalid key gives an error message that names it; the hardware rule as text."""

from pathlib import Path

import pytest

from jspeed.board.records.track import read_track

from ..refusals import refused

TRACK = Path(__file__).parents[2] / "records/stdlib/cpu/track.toml"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('rank = "timed_seconds"', "", "field 'rank': expected 'timed_seconds' or 'steps'"),
        ('rank = "timed_seconds"', 'rank = "luck"', "field 'rank': expected 'timed_seconds' or"),
        ("[significance]", "[significance]\nsigma = -1", "field 'significance.sigma'"),
        ("[hardware]", "[hardware]\ncount = 0", "field 'hardware.count'"),
        ("[hardware]", "[hardware]\ncolour = 1", "field 'hardware.colour': expected one of title"),
        ("[hardware]", "[model]\nmost_parameters = 2e8\n[hardware]", "'model.most_parameters'"),
        ("[hardware]", "[hardware", "cannot be read as TOML"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = TRACK.read_text()
    assert old in text
    path = tmp_path / "track.toml"
    path.write_text(text.replace(old, new))
    said = refused("", read_track, path, "stdlib/cpu")
    assert said.startswith(str(path)) and says in said
    assert said.endswith("; correct the track's file")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("", "any hardware"),
        ("count = 8", "8 x device"),
        ('platform = "cpu"', "any CPU"),
        ('kind = "H100"\ncount = 8', "8 x H100"),
    ],
)
def test_the_hardware_rule_in_words(tmp_path: Path, rule: str, text: str) -> None:
    path = tmp_path / "track.toml"
    path.write_text(
        TRACK.read_text().replace('[hardware]\nplatform = "cpu"', f"[hardware]\n{rule}")
    )
    assert read_track(path, "x").hardware() == text
