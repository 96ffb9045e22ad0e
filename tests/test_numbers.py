"""SI prefixes: figures, rounding over a thousand, and numbers too small or large for a prefix."""

import pytest

from jspeed.base.numbers import si


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (999, "999"), (1000, "1.00k"), (512_000, "512k"), (999_999, "1.00M"),
    (13_126_000, "13.1M"),
     (5.9e12, "5.90T"), (3e27, "3.00e+03Y"), (0.25, "0.25")],
)  # fmt: skip
def test_three_figures_with_zeros(value: float, text: str) -> None:
    assert si(value, 3, zeros=True) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(7.27e8, "727 M"), (999_999, "1 M"), (1234.5, "1.234 k"), (1.5e15, "1.5 P"), (12, "12")],
)
def test_four_figures_with_a_gap(value: float, text: str) -> None:
    assert si(value, 4, gap=" ") == text
