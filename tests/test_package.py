"""The wheel as a user gets it: installed into a bare environment, used outside the repository:
`make test-package`.

It compiles the extension and installs all dependencies: minutes, so other runs skip it.
"""

import json
import os
import random
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SHAKESPEARE = REPOSITORY.parent / "shared" / "data" / "classics" / "tinyshakespeare_input.txt"
pytestmark = pytest.mark.skipif(
    "JSPEED_TEST_PACKAGE" not in os.environ,
    reason="a wheel takes minutes to build and install; make test-package does",
)


def run(*words: object, **settings) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=1800, **settings
    )
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, *"-m maturin build --release --quiet --out".split(), out, cwd=REPOSITORY)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def jspeed(wheel: Path, tmp_path_factory: pytest.TempPathFactory):
    """Call the command of a jspeed that is installed with its dependencies alone, in a folder that
    holds nothing."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "venv", with_pip=True)
    run(folder / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", wheel)
    (folder / "here").mkdir()
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    kept |= {"JSPEED_CACHE": str(folder / "cache"), "COLUMNS": "150"}
    kept |= {
        "HF_HUB_OFFLINE": "1",
        "TIKTOKEN_CACHE_DIR": str(folder / "no vocabulary"),
        "https_proxy": "http://localhost:9",
    }

    def call(*words: object) -> subprocess.CompletedProcess[str]:
        done = run(folder / "venv" / "bin" / "jspeed", *words, cwd=folder / "here", env=kept)
        assert "Traceback" not in done.stderr
        return done

    return call


def test_the_wheel_holds_every_file_of_the_package(wheel):
    listed = run("git", "ls-files", "python/jspeed", cwd=REPOSITORY).stdout.splitlines()
    wanted = {path.removeprefix("python/") for path in listed}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("jspeed/")}
    assert found - wanted == {"jspeed/_dataloader.abi3.so"} and wanted <= found
    assert "-abi3-" in wheel.name


def test_an_installed_jspeed_trains(jspeed):
    done = jspeed("run", "--steps", 2, "--run-dir", "run", "--set", "LAYERS=1", "EVAL_TOKENS=1280")
    assert "stopped after 2 of 250 steps" in done.stdout and done.stderr == ""
    here = Path(done.args[0]).parents[2] / "here"
    record = json.loads((here / "run" / "run.json").read_text())
    assert record["steps"] == 2 and record["git"]["commit"] is None
    assert jspeed("sample", "run", "--prompt", "def ", "--tokens", 5).stdout.startswith("def ")


def test_an_installed_jspeed_plans_and_shows(jspeed):
    assert "275,743,638" in jspeed("plan", "r29", "--no-compile").stdout
    assert "sizes of r89" in jspeed("plan", "r89", "--no-compile").stdout  # without a network
    assert "No records yet in records/" in jspeed("leaderboard", "show").stdout
    assert "launch" in jspeed("--help").stdout
    assert json.loads(jspeed("doctor", "--json").stdout)["jspeed"]


def test_the_scenes_of_the_readme(jspeed):
    """In order, outside the repository, at toy size; those that need a text or XLA's GPU compiler
    have tests below."""
    here = Path(jspeed("--version").args[0]).parents[2] / "here"
    # a text that repeats itself fails a probe
    letters = random.Random(1).choices("etaoinshrdlu \n", k=20_000)
    (here / "text.txt").write_text("".join(letters))
    jspeed("prepare", "text", "text.txt", "--tokenizer", "bytes", "--out", "shards")
    toy = "--set WIDTH=32 LAYERS=2 HEADS=2 MLP_WIDTH=64 LANES=8 LANE_LEN=16 STEPS=4".split()
    toy += ["EVAL_LEN=16", "EVAL_TOKENS=160"]
    trained = ("--data", "shards", "--target-loss", 9, *toy)
    done = jspeed("run", "stdlib", *trained[:2], "--run-dir", "mine", *trained[2:])
    assert " <= 9.0 in " in done.stdout and done.stderr == ""
    assert len(jspeed("sample", "mine", "--prompt", "to be", "--tokens", 20).stdout) > len("to be")

    source = jspeed("run", "stdlib", "--show-recipe").stdout
    for field in toy[1:]:  # a race takes no --set: it is between files
        source = re.sub(
            rf"^{field.partition('=')[0]} = .*$", field.replace("=", " = "), source, flags=re.M
        )
    (here / "small.py").write_text(source.replace('name="stdlib"', 'name="small"'))
    (here / "mine.py").write_text(
        source.replace('parent="stdlib-adamw"', 'parent="small"').replace(
            'name="stdlib"', 'name="mine"'
        )
    )
    flags = "--data shards --no-sample --target-loss 9"
    done = jspeed(
        *"leaderboard race small.py mine.py --rounds".split(),
        1,
        "--run-dir",
        "race",
        f"--flags={flags}",
    )
    assert "x the time of small" in done.stdout

    launched = (
        "launch",
        "--standalone",
        "--nproc-per-node",
        2,
        "run",
        "stdlib",
        "--no-sample",
        *trained,
    )
    assert " <= 9.0 in " in jspeed(*launched, "--run-dir", "launched").stdout

    planned = (
        *"run mine.py --plan n=2,seeds=1..2 --no-sample".split(),
        *trained[:4],
        "--run-dir",
        "planned",
    )
    jspeed(*planned)
    jspeed("leaderboard", "add", "planned")
    shown = jspeed("leaderboard", "show").stdout
    assert "mine" in shown and "stdlib/cpu" in shown
    jspeed("leaderboard", "verify")


@pytest.mark.skipif(
    not SHAKESPEARE.is_file(), reason=f"no {SHAKESPEARE.name} in {SHAKESPEARE.parent}"
)
def test_the_scene_of_the_race(jspeed):
    """The README's own lines but the download, with one round for its two, and its idea."""
    jspeed("prepare", "shakespeare-char", "--input", SHAKESPEARE)
    source = jspeed("run", "shakespeare-char", "--show-recipe").stdout
    orders = re.search(r"^ORDERS = (.*)$", source, flags=re.M)
    assert orders
    idea = source.replace(orders[0], f"ORDERS = (*{orders[1].partition('#')[0].strip()}, 6)")
    idea = re.sub(r'parent="[^"]*"', 'parent="shakespeare-char"', idea)
    here = Path(jspeed("--version").args[0]).parents[2] / "here"
    (here / "race.py").write_text(idea.replace('name="shakespeare-char"', 'name="race"'))
    printed = jspeed("leaderboard", "race", "shakespeare-char", "race.py", "--rounds", 1).stdout
    assert re.search(r"^race.py takes .* x the time of shakespeare-char; ", printed, flags=re.M)


def test_the_scene_of_the_plan(wheel, jspeed):
    """Last, because it installs the compiler beside jspeed."""
    python = Path(jspeed("--version").args[0]).with_name("python")
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[aot]")
    printed = jspeed("plan", "r29", "--target", "h100x8").stdout
    assert re.search(
        r"fits: \d+\.\d of 60\.5 GB .* a device with a micro-batch of 49,152 tokens", printed
    )
    assert "predicted: " in printed and "bottlenecks: r29.py, compute-bound" in printed
