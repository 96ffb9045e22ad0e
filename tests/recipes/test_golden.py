"""Small recipes of records against losses, gradients and updates of the original scripts."""

import json
from typing import Any

import pytest

from . import golden, r62_r89_golden

# Printed by make test-parity MODDED=CLONE ARGS='-k golden -s --print-golden', which executes the
# scripts themselves in fp32: r21 in the log of modded-nanogpt's
# records/track_1_short/2025-01-26_BatchSize, r29 in 2025-09-03_FA3, track3 in
# records/track_3_optimization/results/20260610_tuned_baseline_3250 (tests/parity/cases.py says
# which file), r62 and r89 in what tests/parity/r62_r89_scripts.py makes of theirs. Losses are of
# four tokens, gradients and updates norms; golden.py and r62_r89_golden.py draw parameters and
# tokens.
MEASURE = dict.fromkeys(("r21", "r29", "track3"), golden.measure)
MEASURE |= dict.fromkeys(("r62", "r89"), r62_r89_golden.measure)
GOLDEN = {name: golden.NUMBERS[name] for name in MEASURE}


def paste(name: str, found: dict[str, Any]) -> str:
    """Return an entry of golden.json as text, to seven digits."""
    rounded = json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.7g}"))
    return json.dumps({name: rounded}, indent=2)


def same(name: str, found: dict[str, Any]) -> None:
    """Assert that numbers are the golden ones, to what fp32 leaves of them: the gradient of one
    scale of r62 and r89 is a sum of thousands of numbers that cancel."""
    losses, norms = (1e-5, 1e-4) if name in ("r62", "r89") else (2e-5, 2e-5)
    assert found.keys() == GOLDEN[name].keys()
    for key, value in GOLDEN[name].items():
        near = norms if isinstance(value, dict) else losses
        assert found[key] == pytest.approx(value, rel=near), key


@pytest.mark.parametrize(
    "name",
    [name if name == "r29" else pytest.param(name, marks=pytest.mark.slow) for name in GOLDEN],
)
def test_recipes_give_the_numbers_of_the_records(name):
    same(name, MEASURE[name](name))
