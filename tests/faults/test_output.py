"""Closed pipes, full disks and Ctrl-C at any moment: the run still ends with a valid record."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jspeed.record.run_json import read_run

from ..multi_process import REPOSITORY, SAME_BITS, environment, start, toy

SCRIPTS = sorted(path.name for path in (REPOSITORY / "scripts").glob("*.py"))
FIELDS = toy("STEPS=40", "EVAL_EVERY=20")
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


@pytest.fixture
def variables(folder):
    return environment(**SAME_BITS, JSPEED_CACHE=folder / "cache")


def call(cwd: Path, variables: dict[str, str], *words: object, script="speedrun.py", **options):
    command = [sys.executable, str(REPOSITORY / "scripts" / script), *map(str, words)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(
        command, cwd=cwd, env=variables, text=True, timeout=200, errors="replace", **streams
    )


def words_of(folder: Path, *words: object) -> list[object]:
    return ["--data", folder / "shards", "--run-dir", "run", *words, *FIELDS]


def run(tmp_path: Path, variables: dict[str, str], folder: Path, *words: object, **options):
    return call(tmp_path, variables, *words_of(folder, *words), **options)


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "both"])
def test_a_reader_that_takes_one_line_and_goes(tmp_path, variables, folder, both):
    """``speedrun.py | head -1``, or ``2>&1 |`` of that: the training goes on to its record."""
    script = REPOSITORY / "scripts" / "speedrun.py"
    words = [*map(str, [sys.executable, script, *words_of(folder, "--target-loss", "9")])]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if both else subprocess.PIPE}
    with subprocess.Popen(words, cwd=tmp_path, env=variables, text=True, **streams) as process:
        assert process.stdout and process.stdout.readline().startswith("recipe")
        process.stdout.close()
        said = process.stderr.read() if process.stderr else ""
        assert process.wait(120) == 0 and said == ""
    found = read_run(tmp_path / "run")
    assert found["status"] == "finished" and found["reached"]
    assert (tmp_path / "run" / "loss.svg").exists()


def test_standard_output_on_a_full_disk(tmp_path, variables, folder):
    with open("/dev/full", "w") as full:
        done = run(tmp_path, variables, folder, "--target-loss", "9", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output could not be written (No space")
    assert done.stderr.count("\n") == 1 and read_run(tmp_path / "run")["reached"]


def test_a_text_that_cannot_be_shown_and_a_reader_that_goes(tmp_path, variables, folder):
    done = run(tmp_path, variables | ASCII, folder, "--steps", "2", "--sample")
    assert done.returncode == 0 and done.stderr == "" and done.stdout.isascii(), done.stderr
    (tmp_path / "run" / "config.json").write_text(
        (tmp_path / "run" / "config.json")
        .read_text()
        .replace(
            '"tokenizer": null',
            '"tokenizer": {"tokenizer": "bytes", "vocab_size": 257, "bos_id": 256}',
        )
    )
    words = ["run", "--prompt", "Ü\x1b", "--tokens", 40]
    done = call(tmp_path, variables | ASCII, *words, script="sample.py")
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith(r"\xdc\x1b"), done
    with start(
        tmp_path, variables, "run", "--tokens", 1_000_000, "--prompt", "the ", script="sample.py"
    ) as process:
        process.stdout.read(5)
        process.stdout.close()
        assert process.wait(60) == 0 and process.stderr.read() == ""
    with open("/dev/full", "w") as full:
        done = call(tmp_path, variables, *words, script="sample.py", stdout=full)
    assert (
        done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
    ), done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_that_nobody_reads_or_that_does_not_fit(tmp_path, variables, script):
    reader, writer = os.pipe()
    os.close(reader)
    done = call(tmp_path, variables, "--help", script=script, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        done = call(tmp_path, variables, "--help", script=script, stdout=full)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def small(tmp_path):
    """A run directory with room for a record and a picture, and not for the model."""
    (tmp_path / "run").mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(tmp_path / "run")]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield tmp_path / "run"
    subprocess.run(["umount", "--lazy", str(tmp_path / "run")], check=True)


@pytest.mark.parametrize(
    ("flags", "said", "left"),
    [
        (["--sample"], "run/model.safetensors cannot be written", None),
        (["--checkpoint-every", 1000], "a checkpoint could not be written to", "checkpoints"),
        (["--profile", 20], "the trace could not be written", "profile"),
    ],
    ids=["model", "last checkpoint", "trace"],
)
def test_a_disk_without_room(tmp_path, variables, folder, small, flags, said, left):
    """All steps are made: the record is written, and an error message."""
    done = run(tmp_path, variables, folder, "--target-loss", "9", *flags)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stderr.startswith(f"error: the run ended, but {said}")
    assert done.stderr.count("\n") == 1
    assert left == "profile" or "No space left on device" in done.stderr
    assert read_run(small)["reached"] and (small / "loss.svg").exists()
    assert not any(path.name.startswith(".") for path in small.iterdir())
    assert not left or not [*(small / left).glob("*")]
    assert left != "profile" or not (small / left).exists()


@pytest.mark.parametrize("script", ["speedrun.py", "sample.py", "plan.py"])
def test_ctrl_c_while_a_script_imports_and_sets_out(tmp_path, variables, folder, script):
    """From the first import of the command line's own: before that it is Python's start that is
    interrupted."""
    given = {
        "speedrun.py": ["--data", folder / "shards", "--run-dir", "run", *FIELDS],
        "sample.py": ["nowhere"],
    }
    of_script = given.get(script, ["stdlib", "--target", "h100x8"])
    command = [sys.executable, "-X", "importtime", REPOSITORY / "scripts" / script, *of_script]
    for delay in (0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.5, 2, 3):
        words, pipe = list(map(str, command)), subprocess.PIPE
        with subprocess.Popen(
            words, cwd=tmp_path, env=variables, stderr=pipe, stdout=pipe
        ) as process:
            assert process.stderr
            while b"jspeed.cli.main" not in process.stderr.readline():
                pass
            process.stderr.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        own = [line for line in said.decode().splitlines() if not line.startswith("import time:")]
        assert process.returncode in (130, -signal.SIGINT) or (
            script != "speedrun.py" and process.returncode == 2
        ), (delay, said[-500:])
        assert "Traceback" not in "".join(own), (delay, own)
        assert not (tmp_path / "run").exists()
