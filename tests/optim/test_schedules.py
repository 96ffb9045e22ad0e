"""Schedules of a shorter run."""

from itertools import accumulate

import pytest

from jspeed.optim.schedules import shortened
from jspeed.recipes import jspeed3
from jspeed.run.find_recipe import find

from ..refusals import refused


def test_a_shorter_run_keeps_steps_between_their_borders():
    steps, schedules = (8, 16, 24), ({0: 1.0, 8: 0.5, 16: 0.2, 24: 0.0, 48: 0.0}, (24, 36), 30)
    assert shortened(1.0, steps, schedules, 4) == (steps, schedules)
    shorter, moved = shortened(0.5, steps, schedules, 4)
    assert shorter == (4, 8, 12) and moved == (
        {0: 1.0, 4: 0.5, 8: 0.2, 12: 0.0, 24: 0.0},
        (12, 18),
        15,
    )
    shorter, moved = shortened(0.7, (10, 10, 30), ({10: 1.0, 20: 0.0}, 50), 4)
    assert shorter == (8, 8, 20) and moved == ({8: 1.0, 16: 0.0}, 36), "borders are multiples of 4"
    refused(r"0.1 as long leaves \(0, 4, 0\) steps", shortened, 0.1, (8, 24, 8), (), 4)


@pytest.mark.parametrize("share", [0.9, pytest.param(0.7, marks=pytest.mark.slow)])
def test_a_shorter_jspeed3_makes_that_share_of_its_steps(share):
    """Its tables are updated every 4 steps from the third stage on, so that borders must be
    multiples of 4."""
    recipe = find("jspeed3", [f"LENGTH={share}"]).recipe
    assert recipe.steps / jspeed3.TOTAL == pytest.approx(share, abs=0.002)
    assert recipe.tokens / jspeed3.RECIPE.tokens == pytest.approx(share, abs=0.005)
    assert not any(border % 4 for border in accumulate(stage.steps for stage in recipe.stages))
