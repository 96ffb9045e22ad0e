"""Preregistered runs: parsing, enforcement, continuation and races, with a fake trainer."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from math import nan
from pathlib import Path

import pytest

from jspeed.board.records import preregistration
from jspeed.board.series import preregistered
from jspeed.cli.flags import Command, parse
from jspeed.errors import BadInput
from jspeed.run.options import Options

from ..multi_process import REPOSITORY, ended, environment, shards, start, toy
from ..refusals import refused

# What preregistered.py calls: writes the record of a run that took as long as its recipe's name
# says, or does as told.
TRAINER = """
    import os, sys, time
    from pathlib import Path
    sys.path[:0] = [{tests!r}, {python!r}]
    from record.synthetic_runs import make_run
    from jspeed.board.records.preregistration import announcement_of, read_preregistration
    recipe, folder = sys.argv[1], Path(sys.argv[sys.argv.index("--run-dir") + 1])
    seed = int(sys.argv[sys.argv.index("--seed") + 1])
    told = Path(sys.argv[0]).with_name("told").read_text().split()
    if told[:1] == [str(seed)] and "left" not in told:
        sys.exit(int(told[1]))
    runs = read_preregistration(folder.parent / "plan.json")["runs"]
    planned = next(run for run in runs if run["folder"] == folder.name)
    steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else None
    plan = announcement_of(folder, planned["recipe_hash"], seed, steps)
    seconds = (30.0 if "char" in recipe else 20.0) + 0.1 * seed
    stopped = told[:1] == [str(seed)] and "--resume" not in sys.argv
    loss, status = (None, {{"status": "interrupted"}}) if stopped else (1.39 + 0.001 * seed, {{}})
    make_run(folder, seconds, seed, loss, plan=plan, recipe=planned["recipe"], **status)
    Path(sys.argv[0]).with_name("calls").open("a").write(" ".join(sys.argv[1:]) + "\\n")
    if stopped:
        sys.exit(int(told[1]))
"""


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    script = tmp_path / "trainer.py"
    places = {"tests": str(REPOSITORY / "tests"), "python": str(REPOSITORY / "python")}
    script.write_text(textwrap.dedent(TRAINER).format(**places))
    (tmp_path / "told").write_text("")
    monkeypatch.setattr(preregistered, "RUN", (sys.executable, str(script)))
    return tmp_path


def calls(trainer: Path) -> list[str]:
    return (trainer / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("n=3", [1, 2, 3]),
        ("seeds=4..6", [4, 5, 6]),
        ("n=2,seeds=7..8", [7, 8]),
        ("seeds=5..5", [5]),
    ],
)
def test_seeds_of_a_plan_flag(text, seeds):
    assert preregistration.parse_seeds(text) == seeds


@pytest.mark.parametrize(
    "text",
    [*"n=0 4 n=x n=3,seeds=1..4 seeds=4..1 seeds=1-4 n=2,m=3 n=-1".split(), "", "n=²", "n=3,n=4"]
    + ["n=1000000000,seeds=1..1000000000", "seeds=1..1000000000000", "n=1001", "n=" + "9" * 5000]
    + ["seeds=4294967295..4294967296"],
)
def test_a_malformed_plan_flag_is_refused(text):
    refused(f"--plan {text}", preregistration.parse_seeds, text)


def test_a_series_makes_its_planned_runs_and_continues(trainer, capfd):
    options = Options(
        "stdlib", run_dir=trainer / "s", set_=("MUON_LR=0.03",), data=Path("here"), progress=False
    )
    assert preregistered.run_series(options, "n=3") == 0
    assert [line.split()[0] for line in calls(trainer)] == ["stdlib"] * 3
    assert "--data here --set MUON_LR=0.03 --no-progress" in calls(trainer)[0]
    assert "mean loss 1.3920 <= 1.4, mean time 20.2 s, n=3; sd 0.0010" in capfd.readouterr().out
    plan = (trainer / "s" / "plan.json").read_bytes()
    (trainer / "s" / "2-stdlib-s2" / "run.json").unlink()
    assert preregistered.run_series(options, "n=3") == 0 and len(calls(trainer)) == 4
    assert "--seed 2" in calls(trainer)[3]
    assert (trainer / "s" / "plan.json").read_bytes() == plan
    for wrong, says in [
        ({"seed": 5}, "leave --seed out"),
        ({"steps": 0}, "--steps 0"),
        ({"target_loss": nan}, "nan"),
    ]:
        refused(says, preregistered.run_series, dataclasses.replace(options, **wrong), "n=3")
    refused("holds another plan", preregistered.run_series, options, "n=4")


def test_the_flags_of_options_are_parsed_to_the_same_options():
    given = dict(
        data=Path("d"), layout="dp", mesh="data=2", micro_batch=8, preflight=False, target_loss=1.5
    )
    given |= dict(max_minutes=0.5, set_=("A=1", "B=2"), log="wandb,tensorboard", checkpoint_every=5)
    given |= dict(keep_best=True, progress=False, sample=False)
    found = []

    def keep(options: Options) -> None:
        """Keep the options."""
        found.append(options)

    parse(Command(keep), preregistered.arguments(Options(**given)), "keep")()
    assert found == [Options(**given)]


def test_a_plan_is_not_for_several_processes(trainer, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    options = Options("stdlib", run_dir=trainer / "s")
    refused("in one process each", preregistered.run_series, options, "n=3")


def test_a_run_that_fails_stops_the_series(trainer):
    (trainer / "told").write_text("2 2")
    words, options = "2-stdlib-s2: .* exit code 2", Options("stdlib", run_dir=trainer / "s")
    refused(words, preregistered.run_series, options, "n=3")
    (trainer / "told").write_text("2 143")
    with pytest.raises(SystemExit) as ended:
        preregistered.run_series(Options("stdlib", run_dir=trainer / "s"), "n=3")
    assert ended.value.code == 143
    assert len(calls(trainer)) == 1


@pytest.mark.parametrize("checkpoint", [True, False])
def test_an_interrupted_run_is_resumed_or_stays_without_a_result(
    trainer, capfd, monkeypatch, checkpoint
):
    """It left a run.json, as Ctrl-C, SIGTERM and a full disk do; then the command is given again,
    twice."""
    options = Options("stdlib", run_dir=trainer / "s")
    (trainer / "told").write_text("2 130 left")
    with pytest.raises(SystemExit) as ended:
        preregistered.run_series(options, "n=3")
    assert ended.value.code == 130 and len(calls(trainer)) == 2
    monkeypatch.setattr(preregistered, "newest", lambda folder: (20 if checkpoint else None, {}))
    for _ in range(2):
        assert preregistered.run_series(options, "n=3") == (0 if checkpoint else 1)
        assert ("note: 2-stdlib-s2 was interrupted" in capfd.readouterr().out) != checkpoint
    resumed = [line for line in calls(trainer) if "--resume" in line]
    assert len(calls(trainer)) == 3 + checkpoint
    assert [("--seed 2" in line) for line in resumed] == [True] * checkpoint


def test_a_race_is_a_b_b_a_with_the_same_seeds_for_both(trainer, capfd):
    assert (
        preregistered.race(
            "shakespeare-char", "stdlib", 2, trainer / "r", None, ["--data", "a folder"]
        )
        == 0
    )
    order = [(line.split()[0], int(line.split("--seed ")[1].split()[0])) for line in calls(trainer)]
    a, b = "shakespeare-char", "stdlib"
    assert order == [(a, 1), (b, 1), (b, 2), (a, 2), (a, 3), (b, 3), (b, 4), (a, 4)]
    assert "--data a folder" in calls(trainer)[0]
    out = capfd.readouterr().out
    logs = [(20.1 * 20.2 / (30.1 * 30.2)) ** 0.5, (20.3 * 20.4 / (30.3 * 30.4)) ** 0.5]
    assert f"stdlib takes {(logs[0] * logs[1]) ** 0.5:.3f} (" in out
    assert "2 rounds of A B B A" in out
    drawn = (trainer / "r" / "loss.svg").read_text()
    assert all(f"{each}, seed {seed}, last" in drawn for each, seed in order)
    assert "no interval" not in out
    assert preregistered.race(a, b, 1, trainer / "one", None, []) == 0
    assert "one round has no interval, so give --rounds 2" in capfd.readouterr().out
    for bad, says in [
        (dict(flags=["--seed", "3"]), "holds --seed"),
        (dict(flags=["--set=A=1"]), "holds --set"),
    ]:
        values = dict(a=a, b=b, rounds=1, folder=trainer / "x", steps=None, flags=[]) | bad
        refused(says, preregistered.race, **values)
    refused("the same recipe", preregistered.race, "stdlib", "stdlib", 1, trainer / "x", None, [])
    assert not (trainer / "x").exists()


@pytest.mark.parametrize(("load", "told"), [(0.6, False), (1.4, True)])
def test_a_race_warns_of_other_programs(trainer, monkeypatch, capfd, load, told):
    monkeypatch.setattr(preregistered, "cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    preregistered.race("shakespeare-char", "stdlib", 1, trainer / "r", None, [])
    assert ("1.4 of 2 cores were busy" in capfd.readouterr().err) is told


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_signal_reaches_the_run_and_its_code_comes_back(tmp_path, number):
    program = (
        f"import signal, sys, time; signal.signal({int(number)}, lambda *_: sys.exit(143));"
        " print('up', flush=True)"
    )
    parent = (
        "import sys; from jspeed.board.series.preregistered import run_child;"
        " sys.exit(run_child(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", parent, sys.executable, "-c", f"{program}; time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(30) == 143


def test_a_run_keeps_to_its_plan(tmp_path, monkeypatch):
    runs = [("stdlib", "abc", 1), ("stdlib", "abc", 2)]
    plan = preregistration.make_preregistration("seeds", "2026-01-01T00:00:00Z", 40, runs)
    preregistration.write_preregistration(tmp_path, plan)
    good = tmp_path / "2-stdlib-s2"
    place = {"sha256": plan["sha256"], "folder": good.name}
    assert preregistration.announcement_of(good, "abc", 2, 40) == place
    good.mkdir()
    monkeypatch.chdir(good)
    assert preregistration.announcement_of(Path(), "abc", 2, 40) == place
    for arguments, says in [
        ((good, "abd", 2, 40), "plans recipe hash abc for this folder, found abd"),
        ((good, "abc", 1, 40), "plans seed 2 for this folder, found 1"),
        ((good, "abc", 2, None), "plans --steps 40 for this folder, found None"),
        ((tmp_path / "other", "abc", 2, 40), "no run for this folder"),
    ]:
        refused(says, preregistration.announcement_of, *arguments)
    assert preregistration.announcement_of(tmp_path / "a" / "b", "abc", 1, 40) is None
    assert preregistration.announcement_of(None, "abc", 1, 40) is None
    preregistration.write_preregistration(tmp_path, plan | {"schema": 9})
    refused("'schema': .* found 9", preregistration.read_preregistration, tmp_path / "plan.json")


@pytest.mark.slow
def test_two_real_runs_of_a_plan(tmp_path):
    """And that a run for the wrong folder is refused before it begins."""
    shards(tmp_path / "shards")
    fields = toy("STEPS=6", "EVAL_EVERY=3", "LAYERS=1")
    common = ["--data", "shards", "--run-dir", "plan", "--no-progress"]
    ((code, out, err),) = ended(
        [start(tmp_path, environment(), *common, "--plan", "n=2", "--steps", 4, *fields)]
    )
    assert code == 0 and "mean loss" in out, err
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    runs = [
        json.loads((tmp_path / "plan" / run["folder"] / "run.json").read_text())
        for run in plan["runs"]
    ]
    assert [run["seed"] for run in runs] == [1, 2]
    assert runs[0]["initial_state"] != runs[1]["initial_state"]
    assert [run["plan"]["folder"] for run in runs] == ["1-stdlib-s1", "2-stdlib-s2"]
    assert all(
        run["asked_steps"] == plan["steps"] == 4 and run["started"] >= plan["made"] for run in runs
    )
    wrong = [*"--data shards --run-dir plan/2-stdlib-s2 --seed".split(), 3, "--steps", 4, *fields]
    ((code, _, err),) = ended([start(tmp_path, environment(), *wrong)])
    assert code == 2 and "plans seed 2 for this folder, found 3" in err and err.count("\n") == 1
    ((code, out, err),) = ended(
        [start(tmp_path, environment(), "add", "plan", "--records", "r", script="leaderboard.py")]
    )
    assert code == 0 and out.count("added") == 2, err
    ((code, out, _),) = ended(
        [start(tmp_path, environment(), "verify", "--records", "r", script="leaderboard.py")]
    )
    assert code == 0 and "all files agree" in out


def test_runs_are_made_by_this_jspeed_not_by_a_folder_so_named(tmp_path, monkeypatch):
    (tmp_path / "jspeed").mkdir()
    (tmp_path / "jspeed" / "__main__.py").write_text("print('another')")
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([*preregistered.RUN, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: jspeed run"), done


def test_planned_runs_start_from_their_seeds(trainer):
    with pytest.raises(BadInput, match="--plan and --init-from"):
        preregistered.run_series(Options("stdlib", run_dir=trainer / "s", init_from=trainer), "n=1")
