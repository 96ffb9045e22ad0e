"""Test helpers: a track with rules, parent and child recipes, and races of the two."""

from datetime import timedelta
from pathlib import Path

from jspeed.board import judge
from jspeed.board.records import preregistration, store, verify
from jspeed.board.records.preregistration import make_preregistration

from ..record.synthetic_runs import NOW, START, as_run, make_run, source_of

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
PARENT = {"recipe": "stdlib", "source": source_of(), "fields": {"RATE": 0.1}, "parent": None}
# A race of two rounds: the seconds of either side.
ROUNDS = [60.0, 61.0, 60.0, 61.0], [50.0, 51.0, 50.0, 52.0]
CHILD = dict(
    recipe="child", parent="stdlib", source=source_of(0.3, "Another rate."), fields={"RATE": 0.3}
)


def rules(
    records, rank="timed_seconds", test="t", more="", significance="", resumed="false"
) -> None:
    folder = records / "stdlib" / "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    text = RULES.format(rank=rank, test=test, more=more, significance=significance, resumed=resumed)
    (folder / "track.toml").write_text(text)


def entries(records: Path) -> dict[str, dict]:
    (track,) = judge.board(store.load(records))
    return {entry["recipe"]: entry for entry in track["entries"]} | {"track": track}


def listed(records: Path) -> list[dict]:
    """The entries of the only track, those of equal recipes too."""
    return judge.board(store.load(records))[0]["entries"]


def problems(records: Path, now=NOW) -> list[str]:
    """What ``leaderboard verify`` says."""
    return [problem.text for problem in verify.verify(store.read(records), now)]


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
    plan = make_preregistration("race", START.isoformat(), None, runs)
    folder.mkdir()
    preregistration.write_preregistration(folder, plan)
    for number, (who, run) in enumerate(zip(order, plan["runs"], strict=True)):
        mine = {
            "plan": {"sha256": plan["sha256"], "folder": run["folder"]},
            **(parent, child)[who],
            **changes,
        }
        started = START + timedelta(minutes=1 + 10 * number)
        make_run(folder / run["folder"], next(seconds[who]), run["seed"], started=started, **mine)
    return folder
