"""Every satellite can be taken away: a copy of the tree without it loads, and one without any still
helps, trains, and passes tests of the core."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .multi_process import QUICK, TOY
from .test_architecture import PACKAGE, SATELLITES, imports, tree

ROOT = PACKAGE.parents[1]
TESTS = ROOT / "tests"
ROOMS = ("data", "model", "optim", "parallel", "record", "run")
FEW = [  # of the core's tests, one or more of each room
    "data/test_document_sharding.py",
    "model/test_losses.py",
    "optim/test_muon.py",
    "parallel/test_mesh.py",
    "run/test_clock.py",
    "run/evidence/test_evidence.py",
]


def helpers(path: Path) -> set[Path]:
    """The files of tests/ that ``path`` imports, at its top."""
    found = {
        folder / "conftest.py" for folder in path.parents if TESTS in (folder, *folder.parents)
    }
    for node in tree(path).body:
        level = getattr(node, "level", 0)
        if level:
            module = path.parents[level - 1] / (node.module or "").replace(".", "/")
            found |= {module.with_suffix(".py")}
            found |= {(module / alias.name).with_suffix(".py") for alias in node.names}
    return {path for path in found if path.is_file()}


def needs(path: Path, seen: frozenset[Path] = frozenset()) -> set[str]:
    """The satellites that a test imports, or what it imports of tests/, or a recipe that it
    imports."""
    names = [name.split(".")[1:] for name in imports(path) if name.startswith("jspeed.")]
    own = {name[0] for name in names}
    recipes = {
        PACKAGE / "recipes" / f"{name[1]}.py" for name in names if name[0] == "recipes" and name[1:]
    }
    inner = (helpers(path) | set(filter(Path.is_file, recipes))) - seen
    seen |= inner | {path}
    return (own & SATELLITES.keys()).union(*(needs(each, seen) for each in inner))


def core_tests() -> list[str]:
    """The tests of the core's rooms that need no satellite."""
    paths = [path for room in ROOMS for path in sorted((TESTS / room).rglob("test_*.py"))]
    return [str(path.relative_to(TESTS)) for path in paths if not needs(path)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the default text."""
    from jspeed.corpus.tokenise import prepare_stdlib

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JSPEED_CACHE", str(tmp_path_factory.mktemp("cache")))
        return prepare_stdlib().parents[1]


def copy_without(folders: set[str], to: Path) -> Path:
    """Copy the tree without these satellites, and without those that are said to need them."""
    gone = folders | {name for name, needed in SATELLITES.items() if needed & folders}
    for name in ("python", "tests", "scripts"):
        shutil.copytree(ROOT / name, to / name)
    shutil.copy(ROOT / "pyproject.toml", to)
    for name in gone:
        shutil.rmtree(to / "python" / "jspeed" / name)
    return to


def run_in(copy: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with ``words`` in ``copy``, on its package."""
    environment = os.environ | QUICK | {"PYTHONPATH": str(copy / "python"), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=copy,
        env=environment | variables,
        text=True,
        capture_output=True,
    )


# But recipes, of which some use retrieval or what the speedrun added.
IMPORT_ALL = """
import importlib, pkgutil, jspeed
for module in pkgutil.walk_packages(jspeed.__path__, "jspeed."):
    if not module.name.endswith("__main__") and ".recipes." not in module.name:
        importlib.import_module(module.name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", SATELLITES)
def test_the_rest_loads_without(folder: str, tmp_path: Path):
    copy = copy_without({folder}, tmp_path / "copy")
    found = run_in(copy, "-m", "jspeed", "--help")
    assert found.returncode == 0 and "\n    run " in found.stdout, found.stderr
    loaded = run_in(copy, "-c", IMPORT_ALL)
    assert loaded.returncode == 0, loaded.stderr


def test_the_core_works_without_any(cache: Path, tmp_path: Path):
    copy = copy_without(set(SATELLITES), tmp_path / "copy")
    found = run_in(copy, "-m", "jspeed", "--help")
    assert found.returncode == 0 and "\n    run " in found.stdout, found.stderr
    run_dir = copy / "runs" / "a"
    words = ("-m", "jspeed", "run", "stdlib", "--steps", "3", "--set", *TOY)
    run = run_in(copy, *words, "--run-dir", str(run_dir), JSPEED_CACHE=str(cache))
    assert run.returncode == 0 and (run_dir / "run.json").exists(), run.stdout + run.stderr


def test_the_few_are_of_the_core():
    assert set(FEW) <= set(core_tests()) and {name.split("/")[0] for name in FEW} >= {
        *ROOMS[:4],
        "run",
    }


@pytest.mark.slow
def test_the_core_s_tests_load_without_any(tmp_path: Path):
    copy = copy_without(set(SATELLITES), tmp_path / "copy")
    assert len(core_tests()) > 30
    for flags, names in ((["--collect-only"], core_tests()), ([], FEW)):
        words = ("-m", "pytest", "-q", *flags, *(f"tests/{name}" for name in names))
        tests = run_in(copy, *words)
        assert tests.returncode == 0, tests.stdout[-4000:]
