"""The plan beside what others measured: the figures in benchmarks/plan.json, the bounds that they
keep, and that a wrong table breaks them."""

import copy
import json

import pytest

from jspeed.plan import predict
from jspeed.plan.target import parse_target


@pytest.fixture
def plans(benches):
    from benches import plans

    return plans


@pytest.fixture
def figures(plans):
    return json.loads(plans.FIGURES.read_text())


def wrong(plans, figures):
    """The checks that do not hold: our programs within 15 %, one lever's worth within 25 %."""
    found = {one.what: one.error for one in plans.checks(figures)}
    levers = ("FP8 down projection (PR 342)",)
    ours = [one.what for one in plans.checks(figures) if one.ours]
    return {what for what in ours if abs(found[what]) > 0.15} | {
        what for what in levers if abs(found[what]) > 0.25
    }


def test_the_range_stands_on_the_planned_programs(plans, figures):
    for one in predict.MEASURED:
        tables, flat = plans.without_empty(figures, one.recipe)
        assert (one.tables_ms, one.flat_ms) == pytest.approx((tables, flat), rel=1e-3), one.recipe


def test_checks_hold(plans, figures):
    assert wrong(plans, figures) == set()
    assert plans.median_error(plans.checks(figures)) < 0.10
    assert plans.seconds(figures, "r92").guessed < 0.15


def test_fp8_as_fast_as_xla_prints_is_caught(plans, figures):
    """XLA's table for Hopper: the mean of a matmul and a transpose, up to 2,620 TFLOP/s where 1,430
    are possible."""
    mutated = copy.deepcopy(figures)
    for program in mutated.values():
        for stage in program["stages"].values():
            pair = stage["terms_s"].get("FP8 matmuls", [0.0, 0.0])
            stage["terms_s"]["FP8 matmuls"] = [pair[0] * 1430 / 2620, pair[1]]
    assert wrong(plans, mutated)


def test_the_page_says_what_the_figures_say(plans, figures):
    assert plans.PAGE.read_text() == "\n".join(plans.page(figures)) + "\n"


def test_a_run_on_one_card_by_hand(plans):
    """3,600 seconds, a quarter of which waits for the host, at the price of an hour; and a card
    that is too small."""
    terms = {"attention": [2700.0, 0.0], "table on the host": [900.0, 900.0]}
    one = {"stages": {"1": {"steps": 9, "flat_s": 0.0, "terms_s": terms}}, "limit_gb": 60.5}
    name, price = "r92 on one H100", parse_target("h100x1").target.data_sheet.dollars_per_hour
    for peak, said in ((29.7, "29.7 of 60.5 |"), (61.0, "61.0 of 60.5, **does not fit** |")):
        made = plans.cards({name: one | {"peak_gb": peak, "reduced": ["a", "b"]}})
        *_, row = made
        assert row.startswith(f"| {name} | 3,600 (") and row.endswith(f"{said} a; b |")
        assert f" | {price:.2f} | 25.0% | " in row
