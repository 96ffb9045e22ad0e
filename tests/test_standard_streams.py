"""Standard streams of scripts: closed pipes, full disks, narrow encodings, C++ logs; Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jspeed.errors import escaped

WORKS = """
import sys
from pathlib import Path
from jspeed.errors import run_script

def main():
    for _ in range(2000):
        print("Ü" * 50)
        print("Ü" * 50, file=sys.stderr)
    Path("done").touch()
    return {code}

run_script(main)
"""


def run(folder: Path, code: int = 0, **options) -> subprocess.CompletedProcess:
    (folder / "works.py").write_text(WORKS.format(code=code), encoding="utf-8")
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONIOENCODING", "PYTHONUTF8")}
    environment = variables | options.pop("variables", {})
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(
        [sys.executable, "works.py"], cwd=folder, env=environment, timeout=60, **streams
    )


@pytest.fixture
def unread():
    """The end to write to of a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


ASCII = [
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]


@pytest.mark.parametrize("variables", ASCII, ids=["PYTHONIOENCODING", "LC_ALL"])
def test_unencodable_characters_are_escaped(tmp_path, variables):
    done = run(tmp_path, variables=variables)
    assert (done.returncode, (tmp_path / "done").exists()) == (0, True), done.stderr[-300:]
    assert done.stdout.count(rb"\xdc") == 2000 * 50 and done.stderr.count(rb"\xdc") == 2000 * 50


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("code", [0, 1])
def test_a_closed_pipe_ends_printing_and_not_the_work(tmp_path, unread, code, unbuffered):
    done = run(
        tmp_path, code, stdout=unread, stderr=unread, variables={"PYTHONUNBUFFERED": unbuffered}
    )
    assert done.returncode == code and (tmp_path / "done").exists()
    done = run(tmp_path, code, stdout=unread)
    assert done.returncode == code and b"Traceback" not in done.stderr
    assert b"rror" not in done.stderr


@pytest.mark.parametrize(("code", "expected"), [(0, 2), (1, 1)])
def test_output_on_a_full_disk_is_an_error_at_the_end(tmp_path, code, expected):
    with open("/dev/full", "wb") as full:
        done = run(tmp_path, code, stdout=full)
    assert done.returncode == expected and (tmp_path / "done").exists()
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("error: standard output could not be written (No space left on device)")
    assert b"Traceback" not in done.stderr


def test_closed_streams(tmp_path):
    run(tmp_path)
    (tmp_path / "done").unlink()
    words = ["sh", "-c", f"{sys.executable} works.py >&- 2>&-"]
    assert subprocess.run(words, cwd=tmp_path, timeout=60).returncode == 0
    assert (tmp_path / "done").exists()


def test_control_characters_are_escaped():
    assert escaped("a\tb\nÜ \N{SNOWMAN}") == "a\tb\nÜ \N{SNOWMAN}"
    assert escaped("\x1b[31m\x00\x7f\x9b2J") == r"\x1b[31m\x00\x7f\x9b2J"
    assert escaped("\r\u202egpj.exe\u2069\u2028") == r"\r\u202egpj.exe\u2069\u2028"
    assert escaped("א\u00a0\u3000\u200d") == "א\u00a0\u3000\u200d"


ENDS = """
import time
from jspeed.errors import run_script
from jspeed.base.standard_streams import end_at_ctrl_c, interruptible

def main():
    {within}
        try:
            print("working", flush=True)
            time.sleep(60)
        finally:
            print("clean")

end_at_ctrl_c()
run_script(main)
"""


@pytest.mark.parametrize(
    ("within", "code", "said"),
    [("if True:", -signal.SIGINT, ""), ("with interruptible():", 130, "clean\n")],
)
def test_ctrl_c_ends_at_once_but_where_something_cleans_up(tmp_path, within, code, said):
    """Without a word either way; a shell sees 130."""
    (tmp_path / "script.py").write_text(ENDS.format(within=within))
    with subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout and process.stdout.readline() == "working\n"
        # else print may not have emptied its buffer yet, which is then written twice
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (code, said, "")


def test_ctrl_c_is_ignored_where_a_shell_says_so(tmp_path):
    """As of what it starts in the background."""
    lines = (
        "from jspeed.base.standard_streams import end_at_ctrl_c\n"
        "import os, signal\nend_at_ctrl_c()\n"
    )
    (tmp_path / "script.py").write_text(lines + "os.kill(os.getpid(), signal.SIGINT)\n")
    assert (
        subprocess.run(
            ["sh", "-c", f"trap '' INT; {sys.executable} script.py"], cwd=tmp_path
        ).returncode
        == 0
    )


LOGGED = """
import os, sys
from jspeed.base import standard_streams

standard_streams.harden_streams()
with standard_streams.without_logs():
    os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to \
STDERR\\n")
    os.write(2, b"I0000 00:00:1795377060.652110   17481 cudart_stub.cc:31] Could not find cuda \
drivers\\n")
    os.write(2, b"W1122 19:51:00.123456   17481 any.cc:7] careful\\n")
    os.write(2, b"E0000 00:00:1795377060.7   17481 any.cc:9] failed\\n")
    print("Ü, from Python", file=sys.stderr)
    {last}
os.write(2, b"I0000 00:00:1.5   1 later.cc:1] after it\\n")
"""


@pytest.mark.parametrize(
    ("last", "debug", "shown"),
    [
        ("pass", "", ["failed", "Python", "after it"]),
        ("pass", "1", ["absl", "drivers", "careful", "failed", "Python", "after it"]),
        ("raise SystemExit(3)", "", ["absl", "drivers", "careful", "failed", "Python"]),
    ],
)
def test_logs_of_libraries_are_hidden_until_something_fails(tmp_path, last, debug, shown):
    (tmp_path / "script.py").write_text(LOGGED.format(last=last), encoding="utf-8")
    environment = os.environ | {"JSPEED_DEBUG": debug}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    lines = done.stderr.splitlines()
    assert done.returncode == (3 if "3" in last else 0) and len(lines) == len(shown), lines
    assert all(word in line for word, line in zip(shown, lines, strict=True))


def test_logs_without_standard_error(tmp_path):
    lines = (
        "from jspeed.base import standard_streams as streams\nstreams.harden_streams()\nwith"
        " streams.without_logs(): 1\n"
    )
    (tmp_path / "script.py").write_text(lines)
    assert (
        subprocess.run(["sh", "-c", f"{sys.executable} script.py 2>&-"], cwd=tmp_path).returncode
        == 0
    )
