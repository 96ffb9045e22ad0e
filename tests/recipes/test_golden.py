"""Small r21, r29, track3 against losses, gradients and updates of the original scripts."""

import json
from typing import Any

import pytest

from .golden import NUMBERS, measure

# Printed by make test-parity MODDED=CLONE ARGS='-k golden -s --print-golden', which executes the
# scripts themselves: r21 in the log of modded-nanogpt's records/track_1_short/2025-01-26_BatchSize,
# r29 in 2025-09-03_FA3, track3 in records/track_3_optimization/results/20260610_tuned_baseline_3250
# (tests/parity/cases.py says which file). Losses are of four tokens, gradients and updates norms;
# golden.py draws parameters and tokens.
GOLDEN = {name: NUMBERS[name] for name in ("r21", "r29", "track3")}


def paste(name: str, found: dict[str, Any]) -> str:
    """Return an entry of golden.json as text, to seven digits."""
    rounded = json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.7g}"))
    return json.dumps({name: rounded}, indent=2)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two summaries agree to what fp32 leaves of them."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=2e-5), key


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("r21", "track3") else n for n in GOLDEN],
)
def test_recipes_give_the_numbers_of_the_records(name):
    same(measure(name), GOLDEN[name])
