"""Statistics of the board: is a mean loss below its target, is a recipe better than its parent, how
much faster.

Losses are nats per token. Tests are one-sided: p is the chance of a result this good were the claim
wrong. sigma is the standard deviation of one run's loss over seeds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, linear_regression, stdev
from typing import NamedTuple

from scipy.special import ndtr, ndtri, stdtr, stdtrit

from jspeed.board.records.preregistration import MOST_RUNS

CONFIDENCE = 0.95  # of every interval
AGAIN = 0.001  # two-sided: below it, runs of a recipe that was run again have other losses


class Test(NamedTuple):
    """A test's statistic and its one-sided p-value."""

    statistic: float
    p: float


class Ratio(NamedTuple):
    """A ratio of times and its 95 % interval, None where there is one observation; ``n``
    observations."""

    ratio: float
    low: float | None
    high: float | None
    n: int


def t_below(mean: float, sd: float, n: int, target: float) -> Test:
    """Student's one-sample t-test that the true mean is below ``target``; raises ValueError for
    fewer than 2 runs.

    Track 1 of the NanoGPT speedrun asks for p < 0.01.
    """
    if n < 2:
        raise ValueError("a t-test needs two runs")
    t = _statistic(mean - target, sd / math.sqrt(n))
    return Test(t, float(stdtr(n - 1, t)))


def z_below(mean: float, n: int, target: float, sigma: float) -> Test:
    """Test that the true mean is below ``target`` when ``sigma`` is known; it takes single runs
    too.

    Track 3 of the NanoGPT speedrun takes sigma = 0.0013 and asks for (target - mean) sqrt(n) >=
    0.004.
    """
    z = _statistic(mean - target, sigma / math.sqrt(n))
    return Test(z, float(ndtr(z)))


def _statistic(difference: float, error: float) -> float:
    """Return ``difference`` in standard errors; infinite where there is no error."""
    if error:
        return difference / error
    return math.copysign(math.inf, difference) if difference else 0.0


def pooled_sigma(groups: Iterable[Sequence[float]]) -> float | None:
    """Return the standard deviation within groups of losses, pooled over them; None where no group
    has two."""
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return None
    squares = sum((len(group) - 1) * stdev(group) ** 2 for group in groups)
    return math.sqrt(squares / freedom_of(groups))


def freedom_of(groups: Iterable[Sequence[float]]) -> int:
    """Return the degrees of freedom of :func:`pooled_sigma`."""
    return sum(max(0, len(group) - 1) for group in groups)


def required_margin(n: int, p: float, sd: float, known: bool) -> float:
    """Return the nats below the target that ``n`` runs' mean needs for a one-sided ``p``;
    ``known``: sd is sigma."""
    if known:
        return float(-ndtri(p)) * sd / math.sqrt(n)
    return math.inf if n < 2 else float(-stdtrit(n - 1, p)) * sd / math.sqrt(n)


def more_runs(mean: float, sd: float, n: int, target: float, p: float, known: bool) -> int | None:
    """Return how many more runs with this mean and sd would reach a one-sided ``p``; None above
    MOST_RUNS."""
    if mean >= target:
        return None
    for total in range(max(n, 1), MOST_RUNS + 1):
        if target - mean >= required_margin(total, p, sd, known):
            return total - n
    return None


def better_than(
    child: Sequence[float],
    parent: Sequence[float],
    sigma: float,
    steps_saved: float = 0.0,
    price: float = 0.0,
    freedom: float = math.inf,
) -> Test:
    """Test that ``child`` would have the lower loss had it as many steps as ``parent``; ``sigma``
    is known, or has the degrees of ``freedom`` of few runs.

    ``price`` is what the parent's loss falls in one more step, so that ``steps_saved`` of them
    count as a gain: (loss difference + price x steps saved) / (sigma sqrt(1/n1 + 1/n2)), track 3's
    pairwise rule. The statistic is positive for a better child.
    """
    gain = fmean(parent) - fmean(child) + price * steps_saved
    z = _statistic(gain, sigma * math.sqrt(1 / len(child) + 1 / len(parent)))
    return Test(z, float(stdtr(freedom, -z)))


def differ(a: Sequence[float], b: Sequence[float], sigma: float) -> float:
    """Return the two-sided p of the difference between the mean losses of ``a`` and ``b``."""
    one_sided = better_than(a, b, sigma).p
    return 2 * min(one_sided, 1 - one_sided)


def price_per_step(lengths: Mapping[int, Sequence[float]]) -> float | None:
    """Return the loss that one more step is worth, from final losses by number of steps; None for
    fewer than two.

    The runs must differ in the length of their schedule only. A single run's curve cannot give
    this: its learning rate decays along it. Least squares over all runs.
    """
    steps = [length for length, losses in lengths.items() for _ in losses]
    if len(set(steps)) < 2:
        return None
    return -linear_regression(steps, [loss for losses in lengths.values() for loss in losses]).slope


def paired_ratio(rounds: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Ratio:
    """Return B's time over A's from one or more rounds of (times of A, times of B), each
    interleaved on one machine.

    A round is one observation, the difference of mean logarithms: linear drift through A B B A
    cancels. The interval is Student's over rounds.
    """
    logs = [fmean(map(math.log, b)) - fmean(map(math.log, a)) for a, b in rounds]
    n = len(logs)
    return _ratio(fmean(logs), stdev(logs) / math.sqrt(n) if n > 1 else None, n - 1, n)


def unpaired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Return B's time over A's from separate runs, with Welch's interval of the mean logarithms."""
    logs = [[math.log(seconds) for seconds in times] for times in (a, b)]
    middle = fmean(logs[1]) - fmean(logs[0])
    n = min(len(a), len(b))
    if n < 2:
        return _ratio(middle, None, 0, n)
    parts = [stdev(group) ** 2 / len(group) for group in logs]
    squares = sum(part**2 / (len(group) - 1) for part, group in zip(parts, logs, strict=True))
    return _ratio(middle, math.sqrt(sum(parts)), sum(parts) ** 2 / squares if squares else 1.0, n)


def _ratio(log: float, error: float | None, freedom: float, n: int) -> Ratio:
    """Return the ratio and its interval from its logarithm, that one's standard error and degrees
    of freedom."""
    if error is None:
        return Ratio(math.exp(log), None, None, n)
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    return Ratio(math.exp(log), math.exp(log - half), math.exp(log + half), n)
