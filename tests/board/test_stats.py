"""Statistics against SciPy's tests and against published figures."""

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy import stats as scipy_stats

from jspeed.board import stats

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("n", [2, 3, 8, 40])
def test_t_and_z_are_scipys(n):
    losses = RNG.normal(3.279, 0.0014, n)
    found = stats.t_below(fmean(losses), stdev(losses), n, 3.28)
    expected = scipy_stats.ttest_1samp(losses, 3.28, alternative="less")
    np.testing.assert_allclose(found, (expected.statistic, expected.pvalue), rtol=1e-7)
    z = (np.mean(losses) - 3.28) / (0.0013 / math.sqrt(n))
    np.testing.assert_allclose(
        stats.z_below(fmean(losses), n, 3.28, 0.0013), (z, scipy_stats.norm.cdf(z)), rtol=1e-9
    )


# recipe.md 4.8, quoting the speedrun's rules: with s = 0.0012, n runs need this mean, which is this
# t.
@pytest.mark.parametrize(
    ("n", "mean", "t"), [(5, 3.2780, 3.747), (7, 3.2786, 3.143), (10, 3.2789, 2.821)]
)
def test_required_means_of_the_speedruns_rules(n, mean, t):
    assert 3.28 - stats.required_margin(n, 0.01, 0.0012, known=False) == pytest.approx(
        mean, abs=5e-5
    )
    edge = 3.28 - t * 0.0012 / math.sqrt(n)
    assert stats.t_below(edge, 0.0012, n, 3.28).p == pytest.approx(0.01, rel=1e-3)


# users.md 3.2: distance below 3.28 that n runs need: t-test at p < .01 with sd .0014, and .004 /
# sqrt(n).
@pytest.mark.parametrize(
    ("n", "t_margin", "z_margin"),
    [
        (4, 0.0032, 0.0020),
        (5, 0.0024, 0.0018),
        (8, 0.0015, 0.0014),
        (10, 0.0013, 0.0013),
        (20, 0.0008, 0.0009),
    ],
)
def test_table_of_needed_distances(n, t_margin, z_margin):
    # The table is cut to four decimals, not rounded.
    assert stats.required_margin(n, 0.01, 0.0014, known=False) == pytest.approx(t_margin, abs=1e-4)
    assert stats.required_margin(n, 0.001, 0.0013, known=True) == pytest.approx(z_margin, abs=1e-4)


def test_the_softcap_record():
    """users.md 3.2: n = 80, mean 3.2791, sd 0.0019 was accepted at p < 0.01."""
    t, p = stats.t_below(3.2791, 0.0019, 80, 3.28)
    assert t == pytest.approx(-4.237, abs=1e-3) and p < 1e-4


# (steps, mean loss, n, satisfies the rule) of results 1-3, 11, 12, 14, 28, 35, 46 of track 3
# (recipe.md 6.3).
TRACK3 = [
    (3600, 3.2777, 1, False),
    (5625, 3.2790, 1, False),
    (3500, 3.2767, 1, False),
    (3225, 3.2785, 16, True),
    (3325, 3.2790, 20, True),
    (3150, 3.2776, 4, True),
    (3175, 3.2790, 25, True),
    (3375, 3.2767, 2, True),
    (2690, 3.2783, 8, True),
]


@pytest.mark.parametrize(("steps", "mean", "n", "passes"), TRACK3)
def test_track_3s_verdicts(steps, mean, n, passes):
    assert ((3.28 - mean) * math.sqrt(n) >= 0.004) == passes
    # Their margin of .004 is z = 3.077 rounded up from p = .00105.
    assert (stats.z_below(mean, n, 3.28, 0.0013).p <= 0.00105) == passes


def test_how_many_more_runs():
    assert stats.more_runs(3.279, 0.0014, 4, 3.28, 0.01, known=False) == 10
    for n, passes in ((13, False), (14, True)):  # by SciPy's own quantile
        needed = scipy_stats.t.ppf(0.99, n - 1) * 0.0014 / math.sqrt(n)
        assert (0.001 >= needed) == passes
    assert stats.more_runs(3.276, 0.0013, 1, 3.28, 0.00105, known=True) == 0
    assert stats.more_runs(3.279, 0.0013, 1, 3.28, 0.00105, known=True) == 15
    assert stats.more_runs(3.281, 0.0013, 9, 3.28, 0.01, known=True) is None
    assert stats.more_runs(3.27999, 0.0013, 9, 3.28, 0.01, known=True) is None


def test_pooled_sigma_is_the_residual_of_one_mean_a_group():
    groups = [RNG.normal(mean, 0.0013, n) for mean, n in ((3.27, 4), (3.28, 9), (3.29, 1))]
    residuals = np.concatenate([group - group.mean() for group in groups])
    assert stats.pooled_sigma(groups) == pytest.approx(np.sqrt(np.sum(residuals**2) / (14 - 3)))
    assert stats.freedom_of([*groups, []]) == 14 - 3
    assert stats.pooled_sigma([[1.0], []]) is None


def test_better_than_parent_by_track_3s_formula():
    """(loss difference + .0045 x steps saved / 100) / sqrt(1/n1 + 1/n2) >= .004, sigma .0013."""
    parent, child = [3.2787] * 10, [3.2790] * 20
    by_hand = (-0.0003 + 0.0045) / math.sqrt(1 / 10 + 1 / 20)
    z, p = stats.better_than(child, parent, 0.0013, steps_saved=100, price=0.0045 / 100)
    assert z == pytest.approx(by_hand / 0.0013) and p == pytest.approx(scipy_stats.norm.sf(z))
    assert stats.better_than(child, parent, 0.0013).p > 0.5
    few = stats.better_than(child, parent, 0.0013, 100, 0.0045 / 100, freedom=2)
    assert few.statistic == z and few.p == pytest.approx(scipy_stats.t.sf(z, 2)) and few.p > p


def test_price_of_a_step():
    """recipe.md 4.8: 1430 -> 1480 steps moves the mean from 3.2867 to 3.2788, 1.6e-4 a step."""
    assert stats.price_per_step({1430: [3.2867], 1480: [3.2788]}) == pytest.approx(1.6e-4, rel=0.02)
    steps, losses = np.array([100, 100, 150, 200]), np.array([3.3, 3.31, 3.29, 3.27])
    by_hand = {100: [3.3, 3.31], 150: [3.29], 200: [3.27]}
    assert stats.price_per_step(by_hand) == pytest.approx(
        -scipy_stats.linregress(steps, losses).slope
    )
    assert stats.price_per_step({100: [3.3, 3.2]}) is None


def test_paired_ratio_is_scipys_paired_interval_and_drops_drift():
    a, b = np.exp(RNG.normal(4, 0.02, 6)), np.exp(RNG.normal(3.9, 0.02, 6))
    found = stats.paired_ratio([([x], [y]) for x, y in zip(a, b, strict=True)])
    interval = scipy_stats.ttest_rel(np.log(b), np.log(a)).confidence_interval(0.95)
    np.testing.assert_allclose(found[1:3], np.exp([interval.low, interval.high]), rtol=1e-9)
    # A machine that slows down by 5 % from run to run, evenly: A B B A shows none of it.
    drifting = [
        ([100 * 1.05**i, 100 * 1.05 ** (i + 3)], [90 * 1.05 ** (i + 1), 90 * 1.05 ** (i + 2)])
        for i in (0, 4)
    ]
    assert stats.paired_ratio(drifting)[:3] == pytest.approx((0.9, 0.9, 0.9))
    assert stats.paired_ratio([([100.0], [90.0])]) == (pytest.approx(0.9), None, None, 1)


def test_unpaired_ratio_is_scipys_welch_interval():
    a, b = np.exp(RNG.normal(4, 0.02, 5)), np.exp(RNG.normal(3.9, 0.05, 8))
    found = stats.unpaired_ratio(a, b)
    interval = scipy_stats.ttest_ind(np.log(b), np.log(a), equal_var=False).confidence_interval(
        0.95
    )
    np.testing.assert_allclose(found[1:3], np.exp([interval.low, interval.high]), rtol=1e-9)
    assert stats.unpaired_ratio([60.0], [30.0]) == (pytest.approx(0.5), None, None, 1)
    assert stats.unpaired_ratio([60.0, 60.0], [30.0, 30.0])[:3] == pytest.approx((0.5, 0.5, 0.5))


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        drift = np.cumsum(rng.normal(0, 0.01, 12)).reshape(3, 4)
        times = 60 * np.exp(drift + rng.normal(0, 0.01, (3, 4))) * np.array([1, 0.9, 0.9, 1])
        found = stats.paired_ratio([(round_[[0, 3]], round_[[1, 2]]) for round_ in times])
        held += found.low <= 0.9 <= found.high
    assert 0.92 <= held / 400 <= 0.98


def test_losses_without_any_spread():
    assert stats.t_below(3.27, 0.0, 3, 3.28) == (-math.inf, 0.0)
    assert stats.t_below(3.29, 0.0, 3, 3.28) == (math.inf, 1.0)
    assert stats.z_below(3.28, 3, 3.28, 0.0) == (0.0, 0.5)
    with pytest.raises(ValueError, match="two runs"):
        stats.t_below(3.27, 0.0, 1, 3.28)
