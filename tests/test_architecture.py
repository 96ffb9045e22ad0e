"""The floors of ARCHITECTURE.md: who imports whom, and who reads the time."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "python" / "jspeed"
MAY_IMPORT = {
    "plan": {"parallel", "recipe", "run", "sizes"},
    "recipes": {"model", "optim", "recipe"},
    "score": {"corpus", "data", "generate", "parallel", "recipe", "run", "trained"},
    "generate": {"model", "recipe", "run", "trained"},
    "trained": {"corpus", "data", "export", "parallel", "recipe", "run"},
    "run": {"cluster", "corpus", "leaderboard", "data", "export", "parallel", "record", "recipe", "sizes"},
    "export": {"recipe"},
    "corpus": {"data"},
    "data": {"corpus", "recipe", "_dataloader"},
    "optim": {"parallel", "recipe"},
    "parallel": {"cluster", "recipe"},
    "cluster": set(),
    "recipe": set(),
    "sizes": {"recipe"},
    "model": set(),
    "leaderboard": {"record"},
    "record": set(),
    "errors": set(),
    "files": set(),
    "markup": set(),
    "stage": set(),
}
UNDER_ALL = {"errors", "files", "markup", "stage"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_rooms_below(path: Path):
    if path.parent == PACKAGE and path.name == "__init__.py":
        assert not imports(path)
        return
    own = room(path)
    allowed = MAY_IMPORT[own] | UNDER_ALL | {own}
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "jspeed":
            assert parts[1] in allowed, f"{path.relative_to(PACKAGE)} imports {name}"
        if own == "record":
            assert parts[0] not in ("jax", "jaxlib", "optax"), f"record imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_clock_reads_time(path: Path):
    """Arithmetic on moments that were read elsewhere is fine; reading one is not."""
    if path == PACKAGE / "run" / "clock.py":
        return
    assert not {name.split(".")[0] for name in imports(path)} & {"time", "timeit"}
    readers = {"now", "utcnow", "today", "perf_counter", "monotonic", "process_time"}
    called = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not called & readers


@pytest.mark.parametrize("module", ["jspeed.record", "jspeed.data", "jspeed.corpus.tokenise"])
def test_loads_without_jax(module: str):
    code = f"import {module}, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_files_are_rooms():
    """A docstring that states one purpose, and no file past 350 lines."""
    for path in FILES:
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{path} does not state its purpose"
        assert len(text.splitlines()) <= 350, f"{path} has a second purpose inside"
    assert len((PACKAGE.parents[1] / "ARCHITECTURE.md").read_text().splitlines()) <= 100
