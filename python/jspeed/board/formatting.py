"""Format the board's numbers, devices and comparisons as text."""

from jspeed.base.numbers import NONE, si
from jspeed.board.board import Better, Entry
from jspeed.record.schema import Devices, Git


def seconds(value: float | None) -> str:
    """Return seconds with two decimals, one from 10 and none from 1,000; from ten hours as hours
    with one decimal."""
    if value is None:
        return NONE
    if value >= 36_000:
        return f"{value / 3600:.1f} h"
    return (
        f"{value:,.0f} s"
        if value >= 1000
        else f"{value:.1f} s"
        if value >= 10
        else f"{value:.2f} s"
    )


def dollars(value: float | None) -> str:
    """Return dollars with two decimals, none from 100."""
    return NONE if value is None else f"${value:,.0f}" if value >= 100 else f"${value:.2f}"


def loss(value: float | None) -> str:
    """Return a loss with four decimals."""
    return NONE if value is None else f"{value:.4f}"


def holdout(entry: Entry) -> str | None:
    """Return an entry's mean loss on the track's second validation range as a phrase, or None."""
    second = entry["holdout"]
    return (
        second
        and f"on the second validation range, which chose nothing: mean loss \
{loss(second['mean'])} (n = {second['n']})"
    )


def trust(entry: Entry) -> str:
    """Return how far the numbers of an entry were checked, as a phrase."""
    ended = [run for run in entry["runs"] if run["val_loss"] is not None]
    audited, others = sum(run["audited"] for run in ended), entry["others"]
    says = [f"{entry['level']}: the files of its runs agree with each other"]
    if not all(run["carried"] for run in ended):
        says.append("the recipe computed its own score, as before the trainer did")
    elif audited:
        says.append(f"the parameters of {audited} of {len(ended)} runs were scored again")
    for count, what in ((others["agree"], "agree"), (others["differ"], "do not agree")):
        if count:
            says.append(f"runs on {count} other machine{'s' if count > 1 else ''} {what}")
    return "; ".join(says)


def with_prefix(count: float) -> str:
    """Return ``count`` with three figures and an SI prefix: 13.1M."""
    return si(count, 3, zeros=True)


def parameters(entry: Entry) -> str:
    """Return the parameters of an entry as ``65.3G parameters, 285M active``; equal, or not known:
    only the first."""
    total, active = entry["parameters"], entry["active_parameters"]
    beside = f", {with_prefix(active)} active" if active and active != total else ""
    return f"{with_prefix(total)} parameters{beside}"


def devices(ran_on: Devices) -> str:
    """Return devices as ``8 x NVIDIA H100 in 8 processes``."""
    among = f" in {ran_on['processes']} processes" if ran_on["processes"] > 1 else ""
    return f"{ran_on['count']} x {ran_on['kind']}{among}"


def commit(git: Git) -> str:
    """Return the short commit, with "+" when files differed from it, or "no commit"."""
    return f"{git['commit'][:8]}{'+' if git['dirty'] else ''}" if git["commit"] else "no commit"


def chance(p: float | None) -> str:
    """Return a p-value with two figures: ``p = 0.0035``."""
    if p is None:
        return "no p"
    return "p < 1e-9" if p < 1e-9 else f"p = {p:.2g}"


def ratio(ratio: float, low: float | None, high: float | None) -> str:
    """Return a ratio of times with its interval: ``0.91 (0.88 to 0.94)``."""
    return f"{ratio:.3f}" if low is None else f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def against(better: Better) -> str:
    """Return the comparison with the parent as a phrase."""
    rounds = f"{better['n']} round{'s' if better['n'] > 1 else ''}"
    how = (
        f"interleaved on one machine, {rounds} of A B B A"
        if better["how"] == "in turn"
        else "separate runs"
    )
    return (
        f"{ratio(better['ratio'], better['low'], better['high'])} x the time of {better['parent']}"
        f" ({how})"
    )
