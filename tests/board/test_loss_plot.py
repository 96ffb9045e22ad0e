"""Loss plots: valid SVG, deterministic bytes, whatever the run did."""

import math
from pathlib import Path

import pytest

from jspeed.board.views.loss_plot import _averaged, curves_svg, loss_limits, loss_svg

from ..markup import texts_of

TRAIN = [
    (0.05 * i, 1.4 + 4.0 * math.exp(-0.05 * i / 3) + 0.03 * math.sin(40 * i)) for i in range(1400)
]
VAL = [(5.0 * i, 1.38 + 4.1 * math.exp(-5.0 * i / 3)) for i in range(15)]


def test_a_run_is_drawn_with_its_labels(tmp_path: Path) -> None:
    loss_svg(tmp_path / "loss.svg", train=TRAIN, val=VAL, target=1.4, title="stdlib, seed 1")
    texts = texts_of(tmp_path / "loss.svg")
    for expected in ("stdlib, seed 1", "target 1.4", "timed seconds", "loss (nats per token)",
                     "validation, last 1.380", "train, mean of 4 steps"):  # fmt: skip
        assert expected in texts
    assert (tmp_path / "loss.svg").stat().st_size < 200_000


def test_the_same_run_is_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    loss_svg(tmp_path / "a.svg", train=TRAIN, val=VAL, target=1.4, title="run")
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 23)  # the user's own style
    loss_svg(tmp_path / "b.svg", train=TRAIN, val=VAL, target=1.4, title="run")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"<dc:date>" not in (tmp_path / "a.svg").read_bytes()
    assert matplotlib.rcParams["font.size"] == 23


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ([], []),
        (TRAIN[:1], []),
        ([], VAL[:1]),
        ([], [(0.0, None)]),
        ([(0.0, 5.5), (1.0, 90.0), (2.0, None), (3.0, math.nan)], [(0.0, 5.5), (3.0, None)]),
        ([(0.0, 2.0), (1.0, 2.0)], [(0.0, 2.0), (1.0, 2.0)]),
    ],
)
@pytest.mark.parametrize("target", [1.4, pytest.param(None, marks=pytest.mark.slow)])
def test_short_and_diverged_runs_are_drawn(tmp_path, train, val, target):
    loss_svg(tmp_path / "loss.svg", train=train, val=val, target=target, title="run")
    texts = texts_of(tmp_path / "loss.svg")
    assert ("target 1.4" in texts) == (target is not None)
    assert ("validation, diverged" in texts) == any(loss is None for _, loss in val)


def test_stages_and_the_parents_curve(tmp_path: Path) -> None:
    parent = [(2 * seconds, loss + 0.1) for seconds, loss in VAL]  # twice as long: 140 s beside 70
    loss_svg(
        tmp_path / "loss.svg",
        train=TRAIN,
        val=VAL,
        target=1.4,
        title="run",
        stages=[20.0, 45.0],
        parent=("p <1>", parent),
    )
    texts = texts_of(tmp_path / "loss.svg")
    assert texts.count("stage 2") == texts.count("stage 3") == 1 and "stage 1" not in texts
    assert "p <1>" in texts
    # seconds: the parent leaves after one and a half times the run
    assert "100" in texts and "120" not in texts
    loss_svg(tmp_path / "plain.svg", train=TRAIN, val=VAL, target=1.4, title="run")
    assert "60" in (plain := texts_of(tmp_path / "plain.svg")) and "80" not in plain
    assert "stage 2" not in plain
    loss_svg(
        tmp_path / "short.svg", train=[], val=[], target=1.4, title="run", parent=("p", parent)
    )


def test_several_runs_share_a_plot(tmp_path: Path) -> None:
    runs = {f"run {i}": [(t * (1 + i / 10), loss) for t, loss in VAL] for i in range(9)} | {
        "_x $a$ <&>": VAL,
        "no": [],
    }
    curves_svg(tmp_path / "runs.svg", runs, 1.4, "nine and\x00 two $more$")
    texts = texts_of(tmp_path / "runs.svg")
    assert "nine and  two $more$" in texts and "target 1.4" in texts
    assert {f"{label}, last 1.380" for label in runs if label != "no"} | {"no, no points"} <= set(
        texts
    )


def test_the_first_steps_do_not_squash_the_rest(tmp_path: Path) -> None:
    import numpy as np

    seconds, losses = np.array(VAL).T
    low, high = loss_limits([(seconds, losses)], 1.4)
    assert low < losses.min() and losses[2] < high < 3.0 < losses[0]
    assert loss_limits([(np.array([0.0, 1.0]), np.array([2.0, 3.0]))], None) == pytest.approx(
        (1.94, 3.06)
    )
    loss_svg(tmp_path / "loss.svg", train=[], val=VAL, target=1.4, title="run")
    assert "not shown: losses up to 5.48" in texts_of(tmp_path / "loss.svg")


def test_averaging_keeps_the_mean() -> None:
    import numpy as np

    values = np.arange(1001.0)
    seconds, losses, group = _averaged(values, 2 * values)
    assert group == 3 and len(losses) == 334
    assert losses[0] == 2 * (0 + 1 + 2) / 3 and losses[-1] == 2 * (999 + 1000) / 2
    assert np.array_equal(losses, 2 * seconds)
