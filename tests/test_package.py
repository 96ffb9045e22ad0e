"""The wheel as a user gets it: installed into a bare environment, used outside the repository: `make test-package`.

It compiles the extension and installs all dependencies: minutes, so other runs skip it.
"""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    "JSPEED_TEST_PACKAGE" not in os.environ, reason="a wheel takes minutes to build and install; make test-package does"
)


def run(*words: object, **settings) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=1800, **settings)
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", out, cwd=REPOSITORY)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def jspeed(wheel: Path, tmp_path_factory: pytest.TempPathFactory):
    """Call the command of a jspeed that is installed with its dependencies alone, in a folder that holds nothing."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "venv", with_pip=True)
    run(folder / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", wheel)
    (folder / "here").mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    kept |= {"JSPEED_CACHE": str(folder / "cache"), "JAX_PLATFORMS": "cpu", "COLUMNS": "150"}
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
    assert "parameters of r89" in jspeed("plan", "r89", "--no-compile").stdout  # without a network
    assert "No records yet in records/" in jspeed("leaderboard", "show").stdout
    assert "launch" in jspeed("--help").stdout
    assert json.loads(jspeed("doctor", "--json").stdout)["jspeed"]
