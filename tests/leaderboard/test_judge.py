"""What the board makes of runs: who is valid, who is better than the parent, and why not."""

from datetime import timedelta
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy import stats as scipy_stats

from jspeed.leaderboard import judge, parents
from jspeed.leaderboard.views import terminal
from jspeed.record import planned, store
from jspeed.record.planned import make_plan

from ..record.runs import START, as_run, make_run, make_series, source_of

RULES = """
title = "A track in a test"
rank = "{rank}"
target_loss = 1.4
{more}
[data]
name = "stdlib"
val_tokens = 65536
[hardware]
platform = "cpu"
[timing]
text = "the clock"
resumed = {resumed}
[significance]
text = "the test"
test = "{test}"
p = 0.01
failures = 1
source = "none"
{significance}
"""
CHILD = {"recipe": "child", "parent": "stdlib", "source": source_of(0.3, "Another rate."), "fields": {"RATE": 0.3}}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    rules(tmp_path / "records")
    return tmp_path / "records"


def rules(records, rank="timed_seconds", test="t", more="", significance="", resumed="false") -> None:
    folder = records / "stdlib" / "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    text = RULES.format(rank=rank, test=test, more=more, significance=significance, resumed=resumed)
    (folder / "track.toml").write_text(text)


def entries(records: Path) -> dict[str, dict]:
    (track,) = judge.board(store.load(records))
    return {entry["recipe"]: entry for entry in track["entries"]} | {"track": track}


def test_a_planned_series_below_the_target_is_valid(records, tmp_path):
    losses, seconds = [1.39, 1.3912, 1.3891, 1.3887], [60.0, 63.0, 61.0, 62.0]
    store.add([make_series(tmp_path / "s", seconds, losses)], records)
    entry = entries(records)["stdlib"]
    assert entry["valid"] and entry["why_not"] == [] and entry["rank"] == 1 and entry["more_runs"] is None
    expected = scipy_stats.ttest_1samp(losses, 1.4, alternative="less")
    assert entry["tests"]["t"]["p"] == pytest.approx(expected.pvalue)
    sigma = stdev(losses)  # pooled over one group
    z = (fmean(losses) - 1.4) / (sigma / 2)
    assert entry["tests"]["z"] == {"statistic": pytest.approx(z), "p": pytest.approx(scipy_stats.norm.cdf(z))}
    assert entry["seconds"] == {"n": 4, "mean": 61.5, "sd": pytest.approx(stdev(seconds)), "least": 60, "most": 63}
    assert entry["planned"] == 4 and not entry["missing"] and not entry["extra"] and entry["better"] is None
    assert entry["card"] == {"title": "stdlib: a recipe in a test.", "what": "What it does.", "parent": "none"}


def test_too_few_runs_are_valid_in_nothing_but_what_is_missing(records, tmp_path):
    losses = [1.3990, 1.3980, 1.3995]
    store.add([make_series(tmp_path / "s", [60.0] * 3, losses)], records)
    entry = entries(records)["stdlib"]
    p = scipy_stats.ttest_1samp(losses, 1.4, alternative="less").pvalue
    assert not entry["valid"] and p > 0.01
    needed = next(
        n for n in range(3, 99) if 1.4 - fmean(losses) >= scipy_stats.t.ppf(0.99, n - 1) * stdev(losses) / n**0.5
    )
    assert entry["more_runs"] == needed - 3
    assert entry["why_not"] == [f"not yet significant (p = {p:.2g}, needs about {needed - 3} more runs)"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"losses": [1.41, 1.42, 1.43]}, "missed the target: mean loss 1.4200"),
        ({"losses": [1.39, None, None]}, "2 runs did not converge"),
        ({"git": {"commit": "c0ffee00", "dirty": True}}, "the code was not a clean commit"),
        ({"resumed": [100]}, "a run was resumed, and its time is not known"),
        ({"target_loss": 1.5}, "ran for another target, 1.5"),
        ({"devices": {"kind": "H100", "count": 1, "processes": 1, "platform": "gpu"}}, "the track asks for any CPU"),
        ({"data": as_run()["data"] | {"val_tokens": 99}}, "not validated on 65,536 tokens"),
    ],
)
def test_why_a_series_is_not_valid(records, tmp_path, changes, reason):
    store.add([make_series(tmp_path / "s", [60.0, 60.0, 61.0], **changes)], records)
    entry = entries(records)["stdlib"]
    assert not entry["valid"] and reason in entry["why_not"] and entry["rank"] is None


def test_one_run_may_fail_to_converge_and_is_shown(records, tmp_path):
    store.add([make_series(tmp_path / "s", [60.0, 20.0, 61.0, 62.0], [1.39, None, 1.391, 1.389])], records)
    entry = entries(records)["stdlib"]
    assert entry["valid"] and entry["seconds"]["n"] == 3 and entry["seconds"]["mean"] == 61.0
    assert [run["status"] for run in entry["runs"]].count("diverged") == 1


def test_runs_without_a_plan_and_on_other_tokens_do_not_count(records, tmp_path):
    run_dirs = [make_run(tmp_path / str(seed), 60.0, seed) for seed in (1, 2, 3)]
    store.add(run_dirs, records)
    assert entries(records)["stdlib"]["why_not"] == ["not all runs were planned"]
    store.add([make_series(tmp_path / "first", [60.0, 60.0, 61.0])], records)
    data = as_run()["data"] | {"val_sha256": "ab" * 32, "fingerprint": "cc" * 8}
    later = START + timedelta(days=1)
    store.add([make_series(tmp_path / "s", [50.0, 50.0, 51.0], start=later, data=data, **CHILD)], records)
    found = entries(records)
    assert found["child"]["why_not"] == ["validated on other tokens than the track's"], (
        "those of the earliest plan stand for it"
    )
    assert found["track"]["val_sha256"] == "dd" * 32


def test_a_missing_run_is_shown(records, tmp_path):
    folder = make_series(tmp_path / "s", [60.0, 60.0, 61.0, 62.0])
    (folder / "2-stdlib-s2" / "run.json").unlink()
    store.add([folder], records)
    assert "of 4 planned runs 1 are missing, 0 are extra" in entries(records)["stdlib"]["why_not"]


def test_old_evidence_is_shown_and_not_valid(tmp_path):
    board = judge.board(store.load(Path(__file__).parents[2] / "records"))
    old = [entry for track in board for entry in track["entries"] if entry["git"]["commit"].startswith("8816f3fc")]
    assert [entry["why_not"][0] for entry in old] == ["from before the evidence of schema 2"]


def test_a_track_without_rules_has_no_valid_runs(tmp_path):
    store.add([make_series(tmp_path / "s", [60.0, 60.5])], tmp_path / "records")
    assert entries(tmp_path / "records")["stdlib"]["why_not"] == ["the track has no rules"]


def test_better_than_the_parent_by_welch_when_not_raced(records, tmp_path):
    parent, child = [60.0, 61.0, 62.0], [50.0, 51.0, 49.0]
    store.add([make_series(tmp_path / "p", parent), make_series(tmp_path / "c", child, **CHILD)], records)
    found = entries(records)
    better = found["child"]["better"]
    interval = scipy_stats.ttest_ind(np.log(child), np.log(parent), equal_var=False).confidence_interval(0.95)
    assert (better["low"], better["high"]) == pytest.approx((np.exp(interval.low), np.exp(interval.high)))
    assert better["verdict"] == "yes" and better["how"] == "apart" and better["seconds_saved"] == pytest.approx(11.0)
    assert [found[name]["rank"] for name in ("child", "stdlib")] == [1, 2] and found["stdlib"]["better"] is None


def test_valid_and_not_yet_better_is_a_state_of_its_own(records, tmp_path):
    parent, child = [60.0, 61.0, 62.0], [60.5, 58.0, 62.0]
    store.add([make_series(tmp_path / "p", parent), make_series(tmp_path / "c", child, **CHILD)], records)
    entry = entries(records)["child"]
    assert entry["valid"] and entry["better"]["verdict"] == "not shown" and entry["better"]["high"] > 1


def test_slower_than_the_parent_or_above_the_target_is_no(records, tmp_path):
    series = [make_series(tmp_path / "p", [60.0, 61.0, 62.0]), make_series(tmp_path / "c", [80.0, 81.0, 82.0], **CHILD)]
    miss = CHILD | {"recipe": "miss", "source": source_of(0.9), "fields": {"RATE": 0.9}}
    series.append(make_series(tmp_path / "m", [30.0, 31.0, 30.5], [1.42, 1.43, 1.42], **miss))
    store.add(series, records)
    found = entries(records)
    assert found["child"]["valid"] and found["child"]["better"]["verdict"] == "no"
    assert not found["miss"]["valid"] and found["miss"]["better"]["verdict"] == "no"


def make_race(folder: Path, parent, child, a_seconds, b_seconds, **changes) -> Path:
    """Runs A B B A of two recipes, each with (source, recipe, fields)."""
    order, digests = [0, 1, 1, 0] * (len(a_seconds) // 2), []
    for each in (parent, child):
        digests.append(as_run(source=each["source"], fields=each["fields"])["recipe_hash"])
    seconds, counts = (iter(a_seconds), iter(b_seconds)), [0, 0]
    runs = []
    for who in order:
        counts[who] += 1
        runs.append(((parent, child)[who]["recipe"], digests[who], counts[who]))
    plan = make_plan("race", START.isoformat(), None, runs)
    folder.mkdir()
    planned.write_plan(folder, plan)
    for number, (who, run) in enumerate(zip(order, plan["runs"], strict=True)):
        mine = {"plan": {"sha256": plan["sha256"], "folder": run["folder"]}, **(parent, child)[who], **changes}
        started = START + timedelta(minutes=1 + 10 * number)
        make_run(folder / run["folder"], next(seconds[who]), run["seed"], started=started, **mine)
    return folder


PARENT = {"recipe": "stdlib", "source": source_of(), "fields": {"RATE": 0.1}, "parent": None}


def test_a_race_gives_the_ratio_and_the_official_time(records, tmp_path):
    """Raced on another machine, whose times are double: the child's official time is the parent's x the ratio."""
    store.add([make_series(tmp_path / "p", [60.0, 61.0, 62.0])], records)
    other = {"devices": {"kind": "H100", "count": 1, "processes": 1, "platform": "gpu"}}
    a, b = [120.0, 122.0, 118.0, 121.0], [100.0, 101.0, 99.0, 100.0]
    store.add([make_race(tmp_path / "race", PARENT, CHILD, a, b, **other)], records)
    entry = entries(records)["child"]
    logs = [np.mean(np.log(b[i : i + 2])) - np.mean(np.log(a[i : i + 2])) for i in (0, 2)]
    interval = scipy_stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert entry["better"]["ratio"] == pytest.approx(np.exp(np.mean(logs))) and entry["better"]["how"] == "in turn"
    assert entry["better"]["high"] == pytest.approx(np.exp(interval.high)) and entry["better"]["n"] == 2
    assert entry["anchored"]["seconds"] == pytest.approx(61.0 * np.exp(np.mean(logs)))
    assert entry["better"]["seconds_saved"] == pytest.approx(61.0 * (1 - np.exp(np.mean(logs))))
    assert "the track asks for any CPU" in entry["why_not"], "anchored, and still not a time of the track's own"


def test_a_round_that_is_not_whole_is_no_observation(records, tmp_path):
    folder = make_race(tmp_path / "race", PARENT, CHILD, [60.0, 61.0, 60.0, 61.0], [50.0, 51.0, 50.0, 52.0])
    (folder / "7-child-s4" / "run.json").unlink()
    store.add([folder], records)
    assert entries(records)["child"]["better"]["n"] == 1


def test_two_runs_with_one_seed_are_one_sample_of_the_loss(records, tmp_path):
    store.add([make_series(tmp_path / "s", [60.0, 61.0, 62.0], [1.39, 1.391, 1.389])], records)
    again = START + timedelta(days=2)
    store.add([make_series(tmp_path / "t", [66.0, 67.0], [1.30, 1.30], start=again)], records)
    entry = entries(records)["stdlib"]
    assert entry["loss"]["n"] == 3 and entry["loss"]["mean"] == pytest.approx(1.39) and entry["seconds"]["n"] == 5


def test_steps_are_ranked_by_track_3s_rules(records, tmp_path):
    """Wherever they ran and however long they took; z and the pairwise test with the price of a step."""
    more = {"more": "tokens_per_step = 8192", "significance": "sigma = 0.0013\nprice_per_step = 0.000045"}
    rules(records, "steps", "z", resumed="true", **more)
    slow = {"steps": 400, "tokens": 400 * 8192}
    store.add([make_series(tmp_path / "p", [60.0], [1.3955], **slow)], records)
    fewer = {"steps": 300, "tokens": 300 * 8192, "resumed": [7]}
    store.add([make_series(tmp_path / "c", [900.0] * 4, [1.397, 1.398, 1.397, 1.398], **fewer, **CHILD)], records)
    found = entries(records)
    assert found["stdlib"]["valid"] and found["child"]["valid"] and found["child"]["rank"] == 1
    z = (1.3955 - 1.3975 + 0.0045) / (0.0013 * np.sqrt(1 / 4 + 1 / 1))
    assert found["child"]["better"]["pairwise"]["statistic"] == pytest.approx(z)
    assert found["child"]["better"]["verdict"] == ("yes" if scipy_stats.norm.sf(z) <= 0.01 else "not shown")
    other = {"recipe": "wide", "tokens": 999, "source": source_of(0.7), "fields": {"RATE": 0.7}}
    store.add([make_series(tmp_path / "w", [60.0], [1.39], **other)], records)
    assert "a step is not 8,192 tokens" in entries(records)["wide"]["why_not"]


def test_the_price_of_a_step_comes_from_the_parents_own_lengths(records, tmp_path):
    store.add([make_series(tmp_path / "p", [60.0, 61.0], [1.3900, 1.3910], steps=300)], records)
    short = {"fields": {"RATE": 0.1, "STEPS": 250}, "overrides": {"STEPS": 250}, "steps": 250}
    store.add([make_series(tmp_path / "q", [50.0, 51.0], [1.3945, 1.3955], **short)], records)
    store.add([make_series(tmp_path / "c", [40.0, 41.0], [1.3930, 1.3940], steps=280, **CHILD)], records)
    better = entries(records)["child"]["better"]
    price = (1.3950 - 1.3905) / 50
    assert better["price_per_step"] == pytest.approx(price) and "2 numbers of steps" in better["price_from"]
    sigma = np.sqrt(3 * 0.5 * 0.001**2 / 3)  # three pairs, each 0.001 apart
    saved = 250 - 280 if better["steps_saved"] < 0 else 300 - 280
    parent = 1.3950 if saved < 0 else 1.3905
    z = (parent - 1.3935 + saved * price) / sigma
    assert better["pairwise"]["statistic"] == pytest.approx(z)


def test_the_board_fits_80_columns_and_takes_no_markup(records, tmp_path):
    from rich.console import Console

    name = "a-recipe-with-a-name-that-is-longer-than-any-terminal-has-room-for-in-a-column-of-a-table"
    devices = {"kind": "[red]odd[/red] " + "x" * 90, "count": 8, "processes": 8, "platform": "cpu"}
    odd = {"recipe": name, "devices": devices, "overrides": {"x": "[bold]"}, "parent": "stdlib"}
    store.add(
        [make_series(tmp_path / "s", [8123.4, 8124.4], **odd), make_series(tmp_path / "p", [60.0, 61.0])], records
    )
    console = Console(width=80, record=True, file=open("/dev/null", "w"), color_system=None)
    with console.file:
        console.print(terminal.board(judge.board(store.load(records))), soft_wrap=True)
        text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "[red]odd[/red]" in text and "x=[bold]" in text and name[:77] in text and "8,124 s" in text
    assert "n valid better date" in text and "p < 0.01" in text and "A track in a test" in text


FIRST_SHARD = as_run()["data"]["train_shards"][0]
OTHER = {"val_sha256": "ab" * 32, "fingerprint": "cc" * 8, "val_fingerprint": "ff" * 8, "name": "stdlib"}


def on(**changes) -> dict:
    """The data of a run, changed."""
    return {"data": as_run()["data"] | changes}


def shards(*sums: str) -> dict:
    """A run on these training shards, of equal names and sizes."""
    listed = [FIRST_SHARD | {"name": f"{n}.bin", "sha256": each * 32} for n, each in enumerate(sums)]
    return on(train_shards=listed, fingerprint=f"{len(sums):02d}" * 8)


def two_days_later(folder: Path, seconds=(1.0, 1.1, 1.2), losses=(0.50, 0.51, 0.52), **changes) -> Path:
    losses = changes.pop("losses", losses)
    return make_series(folder, list(seconds), list(losses), start=START + timedelta(days=2), **changes)


@pytest.fixture
def valid(records, tmp_path) -> Path:
    """Records with a valid entry of stdlib, and of its child, which is faster."""
    parent = make_series(tmp_path / "valid", [60.0, 61.0, 62.0])
    store.add([parent, make_series(tmp_path / "child", [50.0, 51.0, 49.0], **CHILD)], records)
    return records


DAMAGE = {
    "validated on other data": on(**OTHER),
    "trained on other data": on(train_shards=[FIRST_SHARD | {"sha256": "ab" * 32}]),
    "from another second shard on": shards("ab", "cd"),
    "shuffled, with a second shard": on(
        train_shards=[FIRST_SHARD, FIRST_SHARD | {"name": "2.bin", "sha256": "ab" * 32}],
        position=as_run()["data"]["position"] | {"shuffle": "block"},
    ),
    "of a tree with changes": {"git": {"commit": "c0ffee00", "dirty": True}},
    "cut short": {"asked_steps": 4, "steps": 4, "planned_steps": 300, "status": "stopped", "losses": [3.9, 4.0, 4.2]},
}


@pytest.mark.parametrize("changes", DAMAGE.values(), ids=DAMAGE)
def test_runs_that_cannot_count_change_no_valid_entry(valid, tmp_path, changes):
    """The same recipe by hash on the same machine; whatever such runs did, ranks, times, sigma and verdicts stay."""
    before = judge.board(store.load(valid))
    store.add([two_days_later(tmp_path / "other", **changes)], valid)
    (track,) = judge.board(store.load(valid))
    assert [entry for entry in track["entries"] if entry["valid"]] == before[0]["entries"]
    assert track["sigma"] == before[0]["sigma"] and track["val_sha256"] == before[0]["val_sha256"]
    (other,) = [entry for entry in track["entries"] if not entry["valid"]]
    assert other["recipe"] == "stdlib" and other["rank"] is None


def test_an_unplanned_run_changes_no_valid_entry(valid, tmp_path):
    before = judge.board(store.load(valid))[0]["entries"]
    store.add([make_run(tmp_path / "other", 1.0, 9, 0.5)], valid)
    assert judge.board(store.load(valid))[0]["entries"][:2] == before


def test_runs_on_other_data_are_an_entry_that_says_so(valid, tmp_path):
    store.add([two_days_later(tmp_path / "v", **on(**OTHER))], valid)
    why = [entry["why_not"] for entry in judge.board(store.load(valid))[0]["entries"] if not entry["valid"]]
    assert why == [["validated on other tokens than the track's"]]


def test_an_earlier_run_on_other_data_takes_no_track_that_pins_its_own(records, tmp_path):
    pins = f'val_sha256 = "{"dd" * 32}"\ntrain_sha256 = "{FIRST_SHARD["sha256"]}"\n[hardware]'
    path = records / "stdlib/cpu/track.toml"
    path.write_text(path.read_text().replace("[hardware]", pins))
    store.add([make_series(tmp_path / "s", [60.0, 61.0, 62.0])], records)
    train = on(train_shards=[FIRST_SHARD | {"sha256": "ab" * 32}])
    for days, name, changes in ((9, "v", on(**OTHER)), (8, "t", train)):
        before = START - timedelta(days=days)
        store.add([make_series(tmp_path / name, [9.0, 9.1, 9.2], start=before, **changes)], records)
    why = [entry["why_not"] for entry in judge.board(store.load(records))[0]["entries"]]
    assert sorted(why) == [
        [], ["trained on other shards than the track's"], ["validated on other tokens than the track's"]
    ]  # fmt: skip


def test_more_shards_on_disk_or_a_longer_run_are_the_same_data(records, tmp_path):
    """FineWeb downloaded in another number of shards: the first are the same files, the fingerprint differs."""
    few, many = shards("ab", "cd"), shards("ab", "cd", "ef")
    store.add([make_series(tmp_path / "s", [60.0, 61.0, 62.0], [1.390, 1.391, 1.389], **few)], records)
    again = START + timedelta(days=2)
    store.add([make_series(tmp_path / "t", [60.5, 61.5], [1.391, 1.390], start=again, **many)], records)
    entry = entries(records)["stdlib"]
    assert entry["valid"] and entry["seconds"]["n"] == 5


def test_a_second_shard_is_other_data_where_the_first_is_pinned_too(records, tmp_path):
    path = records / "stdlib/cpu/track.toml"
    pins = f'val_sha256 = "{"dd" * 32}"\ntrain_sha256 = "{"ab" * 32}"\n[hardware]'
    path.write_text(path.read_text().replace("[hardware]", pins))
    store.add([make_series(tmp_path / "s", [60.0, 61.0, 62.0], **shards("ab", "cd"))], records)
    store.add([two_days_later(tmp_path / "t", **shards("ab", "ef"))], records)
    why = [entry["why_not"] for entry in judge.board(store.load(records))[0]["entries"]]
    assert why == [[], ["trained on other shards than the track's"]]


def test_asking_for_the_whole_schedule_in_steps_starts_no_new_entry(records, tmp_path):
    store.add([make_series(tmp_path / "s", [60.0, 61.0, 62.0], [1.390, 1.391, 1.389])], records)
    store.add([two_days_later(tmp_path / "t", losses=[1.390, 1.391, 1.389], asked_steps=99_999)], records)
    (entry,) = [each for each in judge.board(store.load(records))[0]["entries"] if each["recipe"] == "stdlib"]
    assert len(entry["runs"]) == 6


def test_a_plan_may_span_machines_where_steps_are_ranked(records, tmp_path):
    path = records / "stdlib/cpu/track.toml"
    path.write_text(path.read_text().replace('rank = "timed_seconds"', 'rank = "steps"'))
    folder = make_series(tmp_path / "s", [60.0, 61.0, 62.0])
    plan = planned.read_plan(folder / "plan.json")
    place = {"plan": {"sha256": plan["sha256"], "folder": "3-stdlib-s3"}}
    other = as_run()["devices"] | {"kind": "another", "processes": 4}
    make_run(folder / "3-stdlib-s3", 9.0, 3, 1.390, started=START + timedelta(minutes=31), devices=other, **place)
    store.add([folder], records)
    (entry,) = judge.board(store.load(records))[0]["entries"]
    assert entry["missing"] == 0 and len(entry["runs"]) == 3


def test_planned_runs_that_ran_on_other_data_are_missing(records, tmp_path):
    """Nobody gets rid of a bad run by sending it to other data, or to another machine."""
    folder = make_series(tmp_path / "s", [60.0, 61.0, 62.0, 63.0])
    plan = planned.read_plan(folder / "plan.json")
    place = {"plan": {"sha256": plan["sha256"], "folder": "4-stdlib-s4"}}
    make_run(folder / "4-stdlib-s4", 9.0, 4, 0.5, started=START + timedelta(minutes=31), **place, **on(**OTHER))
    store.add([folder], records)
    one, two = judge.board(store.load(records))[0]["entries"]
    assert not one["valid"] and not two["valid"]
    assert {"of 4 planned runs 1 are missing, 0 are extra", "of 4 planned runs 3 are missing, 0 are extra"} == {
        why for entry in (one, two) for why in entry["why_not"] if "planned" in why
    }


def test_only_complete_plans_of_a_clean_commit_feed_sigma(valid, tmp_path):
    """Another recipe's junk: a dirty tree, four steps, a run missing, no plan."""
    sigma = entries(valid)["track"]["sigma"]
    junk = {"recipe": "junk", "source": source_of(0.5), "fields": {"RATE": 0.5}}
    store.add([two_days_later(tmp_path / "d", [9, 9], [1.2, 1.39], git={"commit": "c0", "dirty": True}, **junk)], valid)
    cut = {
        "asked_steps": 4,
        "steps": 4,
        "planned_steps": 300,
        "status": "stopped",
        "started": START + timedelta(days=4),
    }
    store.add([make_series(tmp_path / "c", [9.0, 9.1], [3.0, 4.0], **cut, **junk)], valid)
    folder = make_series(tmp_path / "m", [9.0, 9.1, 9.2], [1.2, 1.3, 1.39], **junk)
    (folder / "3-junk-s3" / "run.json").unlink()
    store.add([folder, *(make_run(tmp_path / str(n), 9.0, n, 1.1 + n / 10, **junk) for n in (1, 2))], valid)
    assert entries(valid)["track"]["sigma"] == sigma
    said = " ".join(terminal.rules(judge.board(store.load(valid))[0]).split())
    assert f"sigma {sigma:.4f} (of a run's loss, over seeds)" in said


@pytest.mark.parametrize(
    "changes", [on(**OTHER), {"git": {"commit": "c0ffee00", "dirty": True}}], ids=["data", "dirty"]
)
def test_a_race_that_cannot_count_says_nothing(valid, tmp_path, changes):
    before = entries(valid)["child"]["better"]
    race = make_race(tmp_path / "race", PARENT, CHILD, [9.0, 9.1, 9.0, 9.1], [90.0, 91.0, 90.0, 92.0], **changes)
    store.add([race], valid)
    assert before["verdict"] == "yes"
    assert [e["better"] for e in judge.board(store.load(valid))[0]["entries"] if e["valid"] and e["better"]] == [before]


def test_of_a_repeated_seed_the_first_run_counts_everywhere(records, tmp_path):
    again = START + timedelta(days=2)
    store.add([make_series(tmp_path / "s", [60.0, 61.0], [1.390, 1.392])], records)
    store.add([make_series(tmp_path / "t", [60.0, 61.0], [1.30, 1.31], start=again)], records)
    entry = entries(records)["stdlib"]
    assert parents.losses(entry) == [1.390, 1.392] and entry["loss"]["mean"] == pytest.approx(1.391)
    assert {run["val_loss"] for run in parents.by_seed(entry).values()} == {1.390, 1.392}
