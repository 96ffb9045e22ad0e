"""Small r62 and r89 against stored losses, gradients and updates of the original scripts."""

from typing import Any

import pytest

from .golden import NUMBERS
from .r62_r89_golden import measure

# Records 62 and 89, executed on a CPU in fp32 by tests/parity, which computes these anew: losses of
# lane 0 at tokens 0, 1, 23 and 47; norms of gradients of the sum over a lane in step 0; norms of
# what has changed after steps 0 and 2.
GOLDEN = {name: NUMBERS[name] for name in ("r62", "r89")}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two summaries agree to what fp32 leaves of them."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # The gradient of one scale is a sum of thousands of numbers that cancel.
        assert found[key] == pytest.approx(value, rel=1e-4 if isinstance(value, dict) else 1e-5), (
            key
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_recipes_give_the_numbers_of_the_records(name):
    same(measure(name), GOLDEN[name])
