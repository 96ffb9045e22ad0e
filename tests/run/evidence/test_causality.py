"""The causality probe on rows that are mostly padding, whose targets have no weight."""

import numpy as np
import pytest

from jspeed.run.evidence.causality import Text, causality

BOS, PAD, LENGTH = 13, 14, 32


def rows_of(words: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = np.full((words, LENGTH + 1), PAD, np.uint16)
    for row in rows:
        row[1 : rng.integers(4, 7)] = rng.integers(0, BOS, 1)
    rows[:, 0] = rows[:, -1] = BOS
    return rows


@pytest.mark.parametrize("ahead", [0, 1])
def test_padding_raises_no_alarm_and_hides_no_leak(ahead):
    """A model whose losses depend on all inputs up to their own, or up to the next one."""
    rows = rows_of(8)
    weights = (rows[:, :-1] != PAD).astype(np.float32)

    def losses(inputs):
        sums = np.cumsum(inputs[:, :-1] ** 2.0, axis=1)
        return weights * (1 + 1e-4 * np.roll(sums, -ahead, axis=1)).astype(np.float32)

    text = Text(rows, PAD + 1, BOS, None)
    verdicts = [
        causality(text, losses(rows), losses(rows), losses, f"{seed:032x}") for seed in range(200)
    ]
    assert {verdict["passed"] for verdict in verdicts} == {not ahead}
