"""Statistics of the board: is a mean loss below its target, is a recipe better than its parent, how much faster.

Losses are nats per token. Tests are one-sided: p is the chance of a result this good were the claim wrong. sigma is
the standard deviation of one run's loss over seeds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.special import ndtr, ndtri, stdtr, stdtrit

MOST_RUNS = 1000  # more would not be made; a mean that needs them is as good as above the target


class Test(NamedTuple):
    """A statistic and the chance of one this good by luck."""

    statistic: float
    p: float


class Ratio(NamedTuple):
    """A ratio of times and its interval; the interval is absent where there is one observation."""

    ratio: float
    low: float | None
    high: float | None
    n: int


def t_below(mean: float, sd: float, n: int, target: float) -> Test:
    """Student's one-sample t-test that the true mean is below ``target``; raises ValueError for fewer than 2 runs.

    Track 1 of the NanoGPT speedrun asks for p < 0.01.
    """
    if n < 2:
        raise ValueError("a t-test needs two runs")
    if sd == 0:
        return Test(math.copysign(math.inf, mean - target) if mean != target else 0.0, _certain(target - mean))
    t = (mean - target) / (sd / math.sqrt(n))
    return Test(t, float(stdtr(n - 1, t)))


def z_below(mean: float, n: int, target: float, sigma: float) -> Test:
    """Test that the true mean is below ``target`` when ``sigma`` is known; it takes single runs too.

    Track 3 of the NanoGPT speedrun takes sigma = 0.0013 and asks for (target - mean) sqrt(n) >= 0.004.
    """
    if sigma == 0:
        return Test(math.copysign(math.inf, mean - target) if mean != target else 0.0, _certain(target - mean))
    z = (mean - target) / (sigma / math.sqrt(n))
    return Test(z, float(ndtr(z)))


def _certain(gain: float) -> float:
    return 0.0 if gain > 0 else 0.5 if gain == 0 else 1.0


def pooled_sigma(groups: Iterable[Sequence[float]]) -> float | None:
    """Return the standard deviation within groups of losses, pooled over them; None where no group has two."""
    groups = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return None
    return math.sqrt(sum((len(group) - 1) * stdev(group) ** 2 for group in groups) / freedom)


def required_margin(n: int, p: float, sd: float, known: bool) -> float:
    """Return how far below the target the mean of ``n`` runs must be for p; ``known`` means sd is sigma."""
    if known:
        return float(-ndtri(p)) * sd / math.sqrt(n)
    return math.inf if n < 2 else float(-stdtrit(n - 1, p)) * sd / math.sqrt(n)


def more_runs(mean: float, sd: float, n: int, target: float, p: float, known: bool) -> int | None:
    """Return how many more runs with this mean and sd would reach p; None where no number of runs is likely to."""
    if mean >= target:
        return None
    for total in range(max(n, 1), MOST_RUNS + 1):
        if target - mean >= required_margin(total, p, sd, known):
            return total - n
    return None


def better_than(
    child: Sequence[float], parent: Sequence[float], sigma: float, steps_saved: float = 0.0, price: float = 0.0
) -> Test:
    """Test that ``child`` would have the lower loss had it as many steps as ``parent``.

    ``price`` is what the parent's loss falls in one more step, so that ``steps_saved`` of them count as a gain:
    (loss difference + price x steps saved) / (sigma sqrt(1/n1 + 1/n2)), track 3's pairwise rule. The statistic is
    positive for a better child.
    """
    gain = fmean(parent) - fmean(child) + price * steps_saved
    error = sigma * math.sqrt(1 / len(child) + 1 / len(parent))
    if error == 0:
        return Test(math.copysign(math.inf, gain) if gain else 0.0, _certain(gain))
    return Test(gain / error, float(ndtr(-gain / error)))


def price_per_step(lengths: Mapping[int, Sequence[float]]) -> float | None:
    """Return the loss that one more step is worth, from final losses by number of steps; None for fewer than two.

    The runs must differ in the length of their schedule only: how a loss falls within one run says nothing of this,
    because its learning rate is falling too. Least squares over all runs.
    """
    points = [(float(steps), loss) for steps, losses in lengths.items() for loss in losses]
    if len({steps for steps, _ in points}) < 2:
        return None
    middle, level = fmean(steps for steps, _ in points), fmean(loss for _, loss in points)
    spread = sum((steps - middle) ** 2 for steps, _ in points)
    return -sum((steps - middle) * (loss - level) for steps, loss in points) / spread


def paired_ratio(rounds: Sequence[tuple[Sequence[float], Sequence[float]]], confidence: float = 0.95) -> Ratio:
    """Return how long B takes over A from rounds of (times of A, times of B), each made in turn on one machine.

    A round is one observation, the difference of mean logarithms: what drifts evenly through A B B A falls out. The
    interval is Student's over rounds.
    """
    logs = [fmean(map(math.log, b)) - fmean(map(math.log, a)) for a, b in rounds]
    if len(logs) < 2:
        return Ratio(math.exp(logs[0]), None, None, 1)
    middle, n = fmean(logs), len(logs)
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * stdev(logs) / math.sqrt(n)
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half), n)


def unpaired_ratio(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Ratio:
    """Return how long B takes over A from times that were not made in turn: Welch's interval of the mean logarithms."""
    logs = [[math.log(seconds) for seconds in times] for times in (a, b)]
    middle = fmean(logs[1]) - fmean(logs[0])
    n = min(len(a), len(b))
    if n < 2:
        return Ratio(math.exp(middle), None, None, n)
    parts = [stdev(group) ** 2 / len(group) for group in logs]
    if not sum(parts):
        return Ratio(math.exp(middle), math.exp(middle), math.exp(middle), n)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(g) - 1) for part, g in zip(parts, logs, strict=True))
    half = float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(sum(parts))
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half), n)
