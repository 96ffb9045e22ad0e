"""Judging: which entries are valid, which beat their parent, and the stated reasons."""

import re
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy import stats as scipy_stats

from jspeed.board import judge
from jspeed.board.records import store
from jspeed.board.views import terminal
from jspeed.board.views.page import html

from ..record.synthetic_runs import as_run, make_run, make_series, source_of
from .races import CHILD, PARENT, ROUNDS, entries, make_race, rules


def test_a_planned_series_below_the_target_is_valid(records, add):
    losses, seconds = [1.39, 1.3912, 1.3891, 1.3887], [60.0, 63.0, 61.0, 62.0]
    add(seconds, losses)
    entry = entries(records)["stdlib"]
    assert entry["valid"] and entry["why_not"] == [] and entry["rank"] == 1
    assert entry["more_runs"] is None
    expected = scipy_stats.ttest_1samp(losses, 1.4, alternative="less")
    assert entry["tests"]["t"]["p"] == pytest.approx(expected.pvalue)
    sigma = stdev(losses)  # pooled over one group
    z = (fmean(losses) - 1.4) / (sigma / 2)
    assert entry["tests"]["z"] == {
        "statistic": pytest.approx(z),
        "p": pytest.approx(scipy_stats.norm.cdf(z)),
    }
    assert entry["seconds"] == dict(
        n=4, mean=61.5, sd=pytest.approx(stdev(seconds)), least=60, most=63
    )
    assert entry["planned"] == 4 and not entry["missing"] and not entry["extra"]
    assert entry["better"] is None
    assert entry["card"] == dict(
        title="stdlib: a recipe in a test.", what="What it does.", parent="none"
    )


def test_too_few_runs_say_how_many_more_are_needed(records, add):
    losses = [1.3990, 1.3980, 1.3995]
    add([60.0] * 3, losses)
    entry = entries(records)["stdlib"]
    p = scipy_stats.ttest_1samp(losses, 1.4, alternative="less").pvalue
    assert not entry["valid"] and p > 0.01
    needed = next(
        n
        for n in range(3, 99)
        if 1.4 - fmean(losses) >= scipy_stats.t.ppf(0.99, n - 1) * stdev(losses) / n**0.5
    )
    assert entry["more_runs"] == needed - 3
    assert entry["why_not"] == [
        f"not yet significant (p = {p:.2g}, needs about {needed - 3} more runs)"
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"losses": [1.41, 1.42, 1.43]}, "missed the target: mean loss 1.4200"),
        ({"losses": [1.39, None, None]}, "2 runs did not converge"),
        ({"git": {"commit": "c0ffee00", "dirty": True}}, "the code was not a clean commit"),
        ({"resumed": [100]}, "a run was resumed; its time is incomplete"),
        ({"target_loss": 1.5}, "had a different target loss, 1.5"),
        (
            {"devices": {"kind": "H100", "count": 1, "processes": 1, "platform": "gpu"}},
            "the track asks for any CPU",
        ),
        ({"data": as_run()["data"] | {"val_tokens": 99}}, "not validated on 65,536 tokens"),
    ],
)
def test_why_a_series_is_not_valid(records, changes, reason, add):
    add([60.0, 60.0, 61.0], **changes)
    entry = entries(records)["stdlib"]
    assert not entry["valid"] and reason in entry["why_not"] and entry["rank"] is None


def test_one_run_may_fail_to_converge_and_is_shown(records, add):
    add([60.0, 20.0, 61.0, 62.0], [1.39, None, 1.391, 1.389])
    entry = entries(records)["stdlib"]
    assert entry["valid"] and entry["seconds"]["n"] == 3 and entry["seconds"]["mean"] == 61.0
    assert [run["status"] for run in entry["runs"]].count("diverged") == 1


def test_runs_without_a_plan_and_on_other_tokens_do_not_count(records, tmp_path, add):
    store.add([make_run(tmp_path / str(seed), 60.0, seed) for seed in (1, 2, 3)], records)
    assert entries(records)["stdlib"]["why_not"] == ["not all runs were planned"]
    add([60.0, 60.0, 61.0])
    data = as_run()["data"] | {"val_sha256": "ab" * 32, "fingerprint": "cc" * 8}
    add([50.0, 50.0, 51.0], days=1, data=data, **CHILD)
    found = entries(records)
    assert found["child"]["why_not"] == ["validated on other tokens than the track's"], (
        "those of the earliest plan stand for it"
    )
    assert found["track"]["val_sha256"] == "dd" * 32


def test_a_track_without_rules_has_no_valid_runs(tmp_path):
    store.add([make_series(tmp_path / "s", [60.0, 60.5])], tmp_path / "records")
    assert entries(tmp_path / "records")["stdlib"]["why_not"] == ["the track has no rules"]


def test_better_than_the_parent_by_welch_when_not_raced(records, add):
    parent, child = [60.0, 61.0, 62.0], [50.0, 51.0, 49.0]
    add(parent)
    add(child, **CHILD)
    found = entries(records)
    better = found["child"]["better"]
    interval = scipy_stats.ttest_ind(
        np.log(child), np.log(parent), equal_var=False
    ).confidence_interval(0.95)
    assert (better["low"], better["high"]) == pytest.approx(
        (np.exp(interval.low), np.exp(interval.high))
    )
    assert better["verdict"] == "yes" and better["how"] == "apart"
    assert better["seconds_saved"] == pytest.approx(11.0)
    assert [found[name]["rank"] for name in ("child", "stdlib")] == [1, 2]
    assert found["stdlib"]["better"] is None


def test_valid_and_not_yet_better_is_a_state_of_its_own(records, add):
    add([60.0, 61.0, 62.0])
    add([60.5, 58.0, 62.0], **CHILD)
    entry = entries(records)["child"]
    assert entry["valid"] and entry["better"]["verdict"] == "not shown"
    assert entry["better"]["high"] > 1


def test_slower_than_the_parent_or_above_the_target_is_no(records, add):
    add([60.0, 61.0, 62.0])
    add([80.0, 81.0, 82.0], **CHILD)
    miss = CHILD | {"recipe": "miss", "source": source_of(0.9), "fields": {"RATE": 0.9}}
    add([30.0, 31.0, 30.5], [1.42, 1.43, 1.42], **miss)
    found = entries(records)
    assert found["child"]["valid"] and found["child"]["better"]["verdict"] == "no"
    assert not found["miss"]["valid"] and found["miss"]["better"]["verdict"] == "no"


def test_a_race_gives_the_ratio_and_the_official_time(records, tmp_path, add):
    """Raced on another machine, whose times are double: the child's official time is the parent's x
    the ratio."""
    add([60.0, 61.0, 62.0])
    other = {"devices": {"kind": "H100", "count": 1, "processes": 1, "platform": "gpu"}}
    a, b = [120.0, 122.0, 118.0, 121.0], [100.0, 101.0, 99.0, 100.0]
    store.add([make_race(tmp_path / "race", PARENT, CHILD, a, b, **other)], records)
    entry = entries(records)["child"]
    logs = [np.mean(np.log(b[i : i + 2])) - np.mean(np.log(a[i : i + 2])) for i in (0, 2)]
    interval = scipy_stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert entry["better"]["ratio"] == pytest.approx(np.exp(np.mean(logs)))
    assert entry["better"]["how"] == "in turn"
    assert entry["better"]["high"] == pytest.approx(np.exp(interval.high))
    assert entry["better"]["n"] == 2
    assert entry["anchored"]["seconds"] == pytest.approx(61.0 * np.exp(np.mean(logs)))
    assert entry["better"]["seconds_saved"] == pytest.approx(61.0 * (1 - np.exp(np.mean(logs))))
    assert "the track asks for any CPU" in entry["why_not"], (
        "anchored, and still not a time of the track's own"
    )


def test_a_round_that_is_not_whole_is_no_observation(records, tmp_path):
    folder = make_race(tmp_path / "race", PARENT, CHILD, *ROUNDS)
    (folder / "7-child-s4" / "run.json").unlink()
    store.add([folder], records)
    assert entries(records)["child"]["better"]["n"] == 1


def test_steps_are_ranked_by_track_3s_rules(records, add):
    """Wherever and however long they ran; z and the pairwise test with the price of a step."""
    more = {
        "more": "tokens_per_step = 8192",
        "significance": "sigma = 0.0013\nprice_per_step = 0.000045",
    }
    rules(records, "steps", "z", resumed="true", **more)
    slow = {"steps": 400, "tokens": 400 * 8192}
    add([60.0], [1.3955], **slow)
    fewer = {"steps": 300, "tokens": 300 * 8192, "resumed": [7]}
    add([900.0] * 4, [1.397, 1.398, 1.397, 1.398], **fewer, **CHILD)
    found = entries(records)
    assert found["stdlib"]["valid"] and found["child"]["valid"] and found["child"]["rank"] == 1
    z = (1.3955 - 1.3975 + 0.0045) / (0.0013 * np.sqrt(1 / 4 + 1 / 1))
    assert found["child"]["better"]["pairwise"]["statistic"] == pytest.approx(z)
    assert found["child"]["better"]["verdict"] == (
        "yes" if scipy_stats.norm.sf(z) <= 0.01 else "not shown"
    )
    other = {"recipe": "wide", "tokens": 999, "source": source_of(0.7), "fields": {"RATE": 0.7}}
    add([60.0], [1.39], **other)
    assert "a step is not 8,192 tokens" in entries(records)["wide"]["why_not"]


def test_the_price_of_a_step_comes_from_the_parents_own_lengths(records, add):
    add([60.0, 61.0], [1.3900, 1.3910], steps=300)
    short = {"fields": {"RATE": 0.1, "STEPS": 250}, "overrides": {"STEPS": 250}, "steps": 250}
    add([50.0, 51.0], [1.3945, 1.3955], **short)
    add([40.0, 41.0], [1.3930, 1.3940], steps=280, **CHILD)
    better = entries(records)["child"]["better"]
    price = (1.3950 - 1.3905) / 50
    assert better["price_per_step"] == pytest.approx(price)
    assert "2 numbers of steps" in better["price_from"]
    sigma = np.sqrt(3 * 0.5 * 0.001**2 / 3)  # three pairs, each 0.001 apart
    # the parent's entry of 250 steps is the faster one
    z = (1.3950 - 1.3935 + (250 - 280) * price) / sigma
    assert better["pairwise"]["statistic"] == pytest.approx(z)


def test_the_board_fits_80_columns_and_takes_no_markup(records, add):
    from rich.console import Console

    name = (
        "a-recipe-with-a-name-that-is-longer-than-any-terminal-has-room-for-in-a-column-of-a-table"
    )
    devices = {"kind": "[red]odd[/red] " + "x" * 90, "count": 8, "processes": 8, "platform": "cpu"}
    odd = {"recipe": name, "devices": devices, "overrides": {"x": "[bold]"}, "parent": "stdlib"}
    add([8123.4, 8124.4], **odd)
    add([60.0, 61.0])
    console = Console(width=80, record=True, file=open("/dev/null", "w"), color_system=None)
    with console.file:
        console.print(terminal.board(judge.board(store.load(records))), soft_wrap=True)
        text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "[red]odd[/red]" in text and "x=[bold]" in text and name[:77] in text
    assert "8,124 s" in text
    assert "n valid better date" in text and "p < 0.01" in text and "A track in a test" in text


def test_the_board_says_both_numbers_of_parameters(records, add):
    table = {"rows": {"shape": [80_000_000, 768], "axes": ["row", "model"], "reads": 2}}
    table |= {"head": {"shape": [50304, 768], "axes": ["vocab", "model"]}}
    counts = dict(parameters=61_478_633_472, active_parameters=38_635_008, parameter_table=table)
    add([60.0, 61.0], **counts)
    add([70.0], **CHILD)
    found = entries(records)
    assert {name: found[name]["active_parameters"] for name in ("stdlib", "child")} == {
        "stdlib": 38_635_008,
        "child": None,
    }
    page = html([found["track"]], {}, {}, "the rule")
    for name, said in (("stdlib", "61.5G parameters, 38.6M active"), ("child", "1.23M parameters")):
        assert f", {said}, c0ffee00" in terminal.notes(found[name])[0]
        assert f"; {said}, 2.46M tokens" in page


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("total", [1000, 1008])
def test_a_track_may_limit_parameters(records, total, listed, add):
    rules(records, more="[model]\nmost_parameters = 1000")
    table = {"rows": {"shape": [total // 8, 8], "axes": ["row", "model"], "reads": 1}}
    changes = {"parameters": total} | (
        {"parameter_table": table, "active_parameters": 8} if listed else {}
    )
    add([60.0, 60.0, 61.0], **changes)
    found = entries(records)
    why = "1,008 parameters, more than the track's 1,000" if total > 1000 else None
    why = why if listed else "its parameters are not listed, and the track limits them"
    assert found["stdlib"]["why_not"] == [why] * bool(why)
    assert found["stdlib"]["valid"] is not bool(why)
    assert "at most 1.00k parameters" in " ".join(terminal.rules(found["track"]).split())
    assert "at most 1,000 in total" in html([found["track"]], {}, {}, "the rule")


@pytest.mark.parametrize("allowed", [True, False])
def test_a_track_may_allow_retrieval(records, allowed, add):
    rules(records, more=f"[model]\nretrieval = {str(allowed).lower()}")
    index = {"lengths": [6, 10], "recent": 96, "top": 4, "tokens": 3_000_000}
    add([60.0, 60.0, 61.0], retrieval=index)
    found = entries(records)
    why = (
        []
        if allowed
        else ["uses an index of trained tokens, which only a track with retrieval allows"]
    )
    assert found["stdlib"]["why_not"] == why and found["stdlib"]["valid"] is allowed
    assert ("with retrieval" in " ".join(terminal.rules(found["track"]).split())) is allowed
    page = html([found["track"]], {}, {}, "the rule")
    assert ("holds nothing but the tokens that the run has trained on" in page) is allowed


def test_the_board_says_where_weights_are_kept(records, tmp_path):
    folder = make_series(tmp_path / "s", [60.0, 61.0])
    for run_dir in filter(Path.is_dir, folder.iterdir()):
        (run_dir / "model.safetensors").write_bytes(b"weights")
    store.add([folder], records, "https://example.org/<b>")
    found = entries(records)
    kept = [run["weights"]["kept"] for run in found["stdlib"]["runs"]]
    assert kept[0] == "https://example.org/<b>/1-stdlib-s1/model.safetensors"
    assert f"weights: seed 1 {kept[0]}, seed 2 {kept[1]}" in terminal.notes(found["stdlib"])
    page = html([found["track"]], {}, {}, "the rule")
    assert "seed 2: https://example.org/&lt;b&gt;/2-stdlib-s2/model.safetensors, 7 bytes" in page


HOLDOUT = {"first": 131072, "tokens": 65536, "sha256": "ab" * 32, "val_loss": 1.41}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"holdout": HOLDOUT}, ""),
        ({}, "not evaluated on .* from token 131,072"),
        ({"holdout": HOLDOUT | {"first": 65536}}, "not evaluated on .* from token 131,072"),
        ({"holdout": HOLDOUT | {"sha256": "cd" * 32}}, "another second validation range"),
    ],
)
def test_a_track_may_ask_for_a_second_range(records, changes, why, add):
    rules(records, more=f'[holdout]\nfirst = 131072\nsha256 = "{"ab" * 32}"')
    add([60.0, 60.0, 61.0], **changes)
    found = entries(records)
    reasons = found["stdlib"]["why_not"]
    assert [bool(re.match(why, each)) for each in reasons] == [True] * bool(why)
    assert found["stdlib"]["valid"] is not bool(why)
    page = html([found["track"]], {}, {}, "the rule")
    said = "on the second validation range, which chose nothing: mean loss 1.4100 (n = 3)"
    assert (said in page) is (said in terminal.notes(found["stdlib"])) is bool(changes)
    assert "validation tokens from number 131,072 on" in page


def test_seconds_are_ranked_on_one_kind_and_number_of_devices(records, add):
    other = {"devices": {"kind": "another", "count": 1, "processes": 1, "platform": "cpu"}}
    add([60.0, 61.0, 62.0])
    add([50.0, 51.0, 49.0], **CHILD)
    slow = {"recipe": "slow", "source": source_of(0.9), "fields": {"RATE": 0.9}} | other
    add([80.0, 81.0, 82.0], **slow)
    found = entries(records)
    assert [found[name]["rank"] for name in ("child", "stdlib", "slow")] == [1, 2, 1]
