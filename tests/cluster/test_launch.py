"""scripts/launch.py with small programs in place of a training run: ranks, output, failures,
signals, restarts."""

import json
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jspeed.cli.flags import parse
from jspeed.cluster.command import COMMAND

from ..multi_process import REPOSITORY
from ..refusals import refused

LAUNCH = [sys.executable, str(REPOSITORY / "scripts" / "launch.py")]


@pytest.fixture
def launch(tmp_path):
    started = []

    def call(flags, program="", start=False):
        (tmp_path / "program.py").write_text(
            "import os, signal, sys, time\n" + textwrap.dedent(program)
        )
        command = [*LAUNCH, *flags.split(), "program.py", "--flag", "of the program"]
        settings = dict(cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if start:
            started.append(subprocess.Popen(command, **settings))
            return started[-1]
        return subprocess.run(command, timeout=60, **settings)

    yield call
    for process in started:
        process.kill()
        process.communicate()


def test_every_process_gets_its_rank(launch):
    program = """
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    print(*(os.environ[name] for name in names), sys.argv[1:])
    """
    node = "--nnodes 2 --node_rank=1 --nproc-per-node 2 --master-addr 10.0.0.1 --master-port 77"
    done = launch(f"{node} --prefix", program)
    assert done.returncode == 0 and not done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] {rank} 4 {rank - 2} 2 10.0.0.1 77 ['--flag', 'of the program']"
        for rank in (2, 3)
    ]
    alone = launch("--standalone --nproc-per-node 2 --prefix", program)
    assert {line.split()[2] for line in alone.stdout.splitlines()} == {"0", "1"}
    assert len({line.split()[7] for line in alone.stdout.splitlines()}) == 1


def test_dry_run_prints_each_node(launch):
    done = launch("--nnodes 3 --master-addr n0 --dry-run", "print('ran')")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and "ran" not in lines and lines[0] == "# node 0 of 3"
    assert [line.split()[0] for line in lines[1::2]] == ["RANK=0", "RANK=1", "RANK=2"]
    assert all("MASTER_ADDR=n0 MASTER_PORT=29500" in line for line in lines[1::2])
    assert all("'of the program'" in line for line in lines[1::2])


def test_results_of_every_process_are_gathered(launch, tmp_path):
    """Rank 0 leaves a result and samples, rank 1 a result and an error, rank 2 is killed before it
    can."""
    program = """
    import json
    rank = int(os.environ["RANK"])
    if rank == 2:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.mkdir(f"run{rank}")
    open(f"run{rank}/samples.txt", "w").write("once upon")
    json.dump({"val_loss": 1.5, "run_dir": f"run{rank}"}, open(os.environ["JSPEED_RESULT"], "w"))
    sys.exit(3 * rank)
    """
    done = launch("--nproc-per-node 3 --results all.json", program)
    assert done.returncode == 3
    said = {"val_loss": 1.5, "run_dir": "run0"}
    assert json.loads((tmp_path / "all.json").read_text()) == [
        {"rank": 0, "exit_code": 0, **said, "samples": "once upon"},
        {"rank": 1, "exit_code": 3, **said, "run_dir": "run1"},
        {"rank": 2, "exit_code": -9},
    ]
    lost = launch("--results nowhere/all.json", program)
    assert lost.returncode == 2
    assert "--results nowhere/all.json: there is no folder nowhere" in lost.stderr


@pytest.mark.slow
def test_one_that_fails_ends_all_and_its_code_counts(launch):
    """Rank 1 dies; rank 0 neither ends by itself nor on SIGTERM."""
    before = time.monotonic()
    program = """
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
    while True:
        time.sleep(0.1)
    """
    done = launch("--nproc-per-node 2 --grace 1", program)
    assert done.returncode == 128 + 9 and time.monotonic() - before < 30
    assert done.stdout == "told\n"
    assert done.stderr.splitlines() == [
        "launch: rank 1 was killed by SIGKILL",
        "launch: rank 1 was killed by SIGKILL; ending rank 0",
        "launch: rank 0 did not end; SIGKILL",
    ]


def test_a_failed_run_starts_again_but_not_for_bad_input(launch, tmp_path):
    program = """
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(attempt, os.environ["MASTER_PORT"], flush=True)
    sys.exit([70, 75, int(sys.argv[1] == "--flag") and 2][attempt])
    """
    done = launch("--max-restarts 5 --master-port 400", program)
    assert done.returncode == 2 and done.stdout.split() == ["0", "400", "1", "401", "2", "402"]
    assert done.stderr.splitlines() == ["launch: restart 1 of 5", "launch: restart 2 of 5"]
    assert launch("--max-restarts 1", "sys.exit(70)").returncode == 70


@pytest.mark.parametrize(("stubborn", "code"), [(False, 143), (True, 143)])
def test_sigterm_is_passed_on_and_becomes_sigkill(launch, stubborn, code):
    program = f"""
    signal.signal(signal.SIGTERM, lambda *_: {"None" if stubborn else "sys.exit(143)"})
    sys.stdout.write("ready\\n")
    while True:
        time.sleep(0.1)
    """
    process = launch("--nproc-per-node 2 --grace 1", program, start=True)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code and ("SIGKILL" in err) == stubborn


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells that a parent has died")
def test_none_is_left_over_when_the_launcher_is_killed(launch):
    program = """
    signal.signal(signal.SIGTERM, lambda *_: (sys.stdout.write("told\\n"), sys.exit(143)))
    sys.stdout.write("ready\\n")
    time.sleep(60)
    """
    process = launch("--nproc-per-node 2", program, start=True)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.kill()
    told = process.stdout.read().splitlines()  # ends when both are gone
    # again where who adopts an orphan dies too: prctl(2)
    assert set(told) == {"told"} and len(told) >= 2


@pytest.mark.parametrize(
    ("word", "flags"),
    [
        ("--node-rank 2", "--nnodes 2 --node-rank 2 run"),
        ("--nproc-per-node none", "--nproc-per-node none run"),
        ("--standalone", "--standalone --nnodes 2 run"),
        *(
            (f"--master-addr {host!r}: expected", f"--master-addr={host} run")
            for host in ("node..1", "node0:29500", "http://node0", "", "a" * 64, "[node0]")
        ),
        ("--nnodes", "--nnodes two run"),
        ("nowhere.py", "nowhere.py"),
        ("--nproc-per-node ²", "--nproc-per-node ² run"),
        ("--nproc-per-node 100000000", "--dry-run --nproc-per-node 100000000 run"),
        ("at most 65,536 processes", "--dry-run --nnodes 1000000000 run"),
        ("--master-port", "--master-port 99999999 run"),
        *(("--grace", f"--grace={grace} run") for grace in ("nan", "inf", "-1.0", "1e+300")),
        ("--results no/all.json: there is no folder no", "--results no/all.json run"),
        ("did you mean 'run'?", "rum"),
        ("'--nproc-per-node'", "--nproc-pr-node 2 run"),
        ("run|SCRIPT.py", ""),
        ("port, up to 65535", "--master-port 65535 --max-restarts 3 run"),
        ("'--stepz'", "--standalone --nproc-per-node 3 run --stepz 3"),
    ],
)
def test_bad_flags_are_an_error_message(word, flags):
    assert word in refused("", lambda: parse(COMMAND, flags.split(), "jspeed launch")())


def test_the_word_run_is_the_command_of_an_installed_jspeed(capsys, monkeypatch, tmp_path):
    (tmp_path / "run").write_text("a file of that name is ./run")
    monkeypatch.chdir(tmp_path)
    for end in ("", "--"):
        words = f"--nproc_per_node=2 --dry-run --prefix {end} run --seed 2 --no-sample".split()
        assert parse(COMMAND, words, "jspeed launch")() == 0
        _, *lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 and lines[1].startswith("RANK=1 WORLD_SIZE=2 ")
        assert lines[1].endswith(f"{sys.executable} -u -P -m jspeed run --seed 2 --no-sample")


@pytest.mark.parametrize("host", ["fd00::1", "[fd00::1]"])
def test_ipv6_is_passed_on_without_brackets(host, capsys):
    assert (
        parse(
            COMMAND, ["--nnodes", "2", "--master-addr", host, "--dry-run", "run"], "jspeed launch"
        )()
        == 0
    )
    assert "MASTER_ADDR=fd00::1 " in capsys.readouterr().out


def test_a_dry_run_of_one_node_has_its_address(capsys):
    words = ["--standalone", "--master-addr", "elsewhere", "--dry-run", "run"]
    assert parse(COMMAND, words, "jspeed launch")() == 0
    assert "MASTER_ADDR=127.0.0.1 " in capsys.readouterr().out


def test_unreadable_results_change_no_exit_code_but_0(launch, tmp_path):
    program = """
    open(os.environ["JSPEED_RESULT"], "w").write("{half")
    os.rename("there", "gone")
    sys.exit(int(os.environ["CODE"]))
    """
    for code, expected in ((0, 2), (1, 1)):
        (tmp_path / "there").mkdir()
        done = launch("--results there/all.json", program.replace('os.environ["CODE"]', str(code)))
        assert done.returncode == expected
        assert "error: there/all.json cannot be written" in done.stderr
        (tmp_path / "gone").rmdir()
    program = """open(os.environ["JSPEED_RESULT"], "w").write("{half")"""
    assert launch("--results all.json", program).returncode == 0
    assert json.loads((tmp_path / "all.json").read_text()) == [{"rank": 0, "exit_code": 0}]


def test_the_record_of_ones_own_program_cannot_say_who_wrote_it(launch, tmp_path):
    program = """
    import json
    json.dump({"rank": 7, "exit_code": 0, "run_dir": 5, "loss": 1.5}, \
open(os.environ["JSPEED_RESULT"], "w"))
    sys.exit(3)
    """
    assert launch("--results all.json", program).returncode == 3
    assert json.loads((tmp_path / "all.json").read_text()) == [
        {"rank": 0, "exit_code": 3, "run_dir": 5, "loss": 1.5}
    ]
