"""Rules of ARCHITECTURE.md: imports follow the layers, packages stay within a size, one module
reads the time."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from jspeed.base import api

PACKAGE = Path(__file__).parents[1] / "python" / "jspeed"
# The core, from the ground up: what each room may import besides SMALL, all of it on floors below.
FLOORS: list[dict[str, set[str]]] = [
    {"_dataloader": set(), "model": set(), "recipes": set()},
    {"recipe": {"model"}},
    {"data": {"_dataloader"}, "parallel": {"model", "recipe"}, "record": {"recipe"}},
    {"optim": {"model", "parallel", "recipe"}},
    {"run": {"data", "model", "optim", "parallel", "recipe", "recipes", "record"}},
    {"cli": {"_dataloader", "data", "parallel", "recipe", "recipes", "record", "run"}},
    {"__main__": {"cli"}, "__init__": {"cli"}},
]
SMALL = {"base", "errors", "fields"}  # under all
# Rooms that can be taken away: they may import the core, and the satellites that are named.
SATELLITES: dict[str, set[str]] = {
    "board": set(),
    "cluster": set(),
    "corpus": set(),
    "doctor": set(),
    "host_table": set(),
    "inference": {"corpus"},
    "kernels": set(),
    "plan": set(),
    "retrieval": set(),
    "saved": set(),
    "sharding": {"plan"},
    "speedrun": set(),
}
CORE = {name for floor in FLOORS for name in floor} | SMALL
ALLOWED = {name: its for floor in FLOORS for name, its in floor.items()}
ALLOWED |= {name: set(CORE) for name in SMALL}
ALLOWED |= {name: CORE | its for name, its in SATELLITES.items()}
ALLOWED["recipes"] = {"model", "optim", "recipe", "retrieval", "speedrun"}
WITHOUT_JAX = {"data", "board", "corpus"}  # but where a run is started, which hooks are for
MOST_MODULES = 14


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def command(path: Path) -> bool:
    """Whether a file is a command line, on the floor of ``scripts/``."""
    return path.name == "__main__.py"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, wherever in it, but by relative imports."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_rooms_below(path: Path):
    own = room(path)
    allowed = ALLOWED[own] | SMALL | {own}
    assert not any(getattr(node, "level", 0) for node in ast.walk(tree(path))), "relative import"
    for name in imports(path):
        parts = name.split(".")
        if (
            parts[0] == "jspeed"
            and name not in ("jspeed", "jspeed.__version__")
            and not command(path)
        ):
            assert parts[1] in allowed, f"{path.relative_to(PACKAGE)} imports {name}"
        if own in WITHOUT_JAX:
            assert parts[0] not in ("jax", "jaxlib", "optax"), f"{own} imports {name}"


def test_satellites_import_what_the_api_lists():
    """And nothing is listed that none of them imports."""
    listed = {f"{module}.{name}" for module, names in api.NAMES.items() for name in names}
    used = set()
    for path in FILES:
        own = room(path)
        for name in imports(path) if own in SATELLITES else ():
            if name.split(".")[0] != "jspeed" or name in ("jspeed", "jspeed.__version__"):
                continue
            if name.split(".")[1] in {own, *SATELLITES[own]} or name.startswith(api.OPEN):
                continue
            assert name in listed, f"{path.relative_to(PACKAGE)} imports {name}; see base/api.py"
            used.add(name)
    assert used == listed, f"nobody imports {listed - used}"


def test_every_room_is_core_or_satellite():
    assert {room(path) for path in FILES} == CORE - {"_dataloader"} | set(SATELLITES)


def test_no_modules_import_each_other():
    """Not in a circle of several either, and imports in the body of a function count."""
    names = {
        ".".join(("jspeed", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in FILES
    }
    left = {
        name: (
            {found if found in names else found.rpartition(".")[0] for found in imports(path)}
            & names.keys()
        )
        for name, path in names.items()
    }
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert not left, f"a circle among {', '.join(sorted(left))}"


def test_floors_lie_on_each_other():
    """Nobody may import upwards, nor on its own floor."""
    below: set[str] = set()
    for floor in FLOORS:
        for name, allowed in floor.items():
            assert allowed <= below, f"{name} may import {allowed - below}, which is not below"
        below |= floor.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_clock_reads_time(path: Path):
    """Arithmetic on moments that were read elsewhere is fine; reading one is not."""
    # no record may be later
    if path in (PACKAGE / "run" / "clock.py", PACKAGE / "board" / "command.py"):
        return
    # of processes that wait for each other: nothing is measured
    deadlines = path.parent.name == "cluster"
    assert not {name.split(".")[0] for name in imports(path)} & {
        "timeit",
        *(() if deadlines else ("time",)),
    }
    readers = {
        "now",
        "utcnow",
        "today",
        "perf_counter",
        "process_time",
        *(() if deadlines else ("monotonic",)),
    }
    called = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    assert not called & readers


MOVING = {  # API that JAX or Orbax may change in any release: where it is used
    "jax._src": {"base/jax_versions.py", "cli/main.py"},  # the latter names a logger
    "jax.experimental": {"base/jax_versions.py", "kernels/", "plan/target.py"},
    "jax.extend": {
        "base/jax_versions.py",
        "kernels/",
        "plan/findings.py",
        "plan/shard_map_checks.py",
        "run/compute/flat_dots.py",
        "run/compute/gradients.py",
    },
    "orbax": {"run/checkpoint.py"},
}


@pytest.mark.parametrize("api", MOVING)
def test_api_that_moves_has_one_place(api: str):
    """Strings count: ``import_module("jax._src...")`` is an import too. Docstrings count for
    ``jax._src`` alone."""
    for path in FILES:
        own = str(path.relative_to(PACKAGE))
        used = any(name.startswith(f"{api}.") for name in imports(path))
        if used or (api == "jax._src" and api in path.read_text()):
            assert any(own.startswith(place) for place in MOVING[api]), f"{own} uses {api}"


@pytest.mark.parametrize(
    "module",
    (
        "jspeed jspeed.data jspeed.corpus.tokenise jspeed.cluster.launch jspeed.board.judge"
        " jspeed.board.records.verify"
        " jspeed.doctor.command"
    ).split(),
)
def test_loads_without_jax(module: str):
    code = f"import {module}, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_package_itself_loads_nothing():
    """Every command and script begins with it."""
    code = "import jspeed, sys; sys.exit(any(name.startswith('jspeed.') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_recipe_of_one_page_loads_little():
    """Its rooms, and what it calls in them: nothing of kernels, meshes or processes."""
    code = (
        "import sys; from jspeed.recipes import stdlib;"
        " sys.exit(sum(f'{name}.'.startswith('jspeed.') for name in sys.modules))"
    )
    assert 0 < subprocess.run([sys.executable, "-c", code]).returncode <= 14


def test_help_needs_no_jax():
    """Of no command: it would come two seconds later."""
    names = [path.stem for path in (PACKAGE / "cli").glob("[!_]*.py")]
    code = (
        f"import {', '.join(f'jspeed.cli.{name}' for name in names)}, sys; sys.exit('jax' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_rooms_hold_few_modules():
    """Recipes apart, which are as many as there are, and the package itself, which holds what is
    below all rooms."""
    for folder in {path.parent for path in FILES} - {PACKAGE / "recipes", PACKAGE}:
        modules = [path.name for path in folder.glob("*.py") if not path.name.startswith("__")]
        assert len(modules) <= MOST_MODULES, (
            f"{folder.relative_to(PACKAGE)} holds {len(modules)} modules"
        )


def test_the_core_does_not_know_retrieval():
    """A recipe says what it wants beside tokens, and a loader of its own gives it."""
    for path in FILES:
        if room(path) in CORE - {"recipes"}:
            text = path.read_text().lower()
            assert "retriev" not in text, f"{path.relative_to(PACKAGE)} mentions retrieval"


def test_files_are_rooms():
    """A docstring that states one purpose, and no file past 490 lines; a recipe, which is flat, may
    have 707."""
    for path in FILES:
        text = path.read_text()
        assert ast.get_docstring(tree(path)), f"{path} does not state its purpose"
        most = 707 if path.parent.name == "recipes" else 490
        assert len(text.splitlines()) <= most, f"{path} has a second purpose inside"
    assert len((PACKAGE.parents[1] / "ARCHITECTURE.md").read_text().splitlines()) <= 120


ROOT = PACKAGE.parents[1]
# Their runs are on the board by a hash of the file.
AS_RECORDED = {
    PACKAGE / "recipes" / f"{name}.py" for name in ("fineweb_cpu", "shakespeare_char", "stdlib")
}


def test_lines_are_short():
    for folder in ("python", "scripts", "tests"):
        for path in set((ROOT / folder).rglob("*.py*")) - AS_RECORDED:
            if path.suffix in (".py", ".pyi"):
                for number, line in enumerate(path.read_text().splitlines(), 1):
                    assert len(line) <= 100, f"{path}:{number} has {len(line)} columns"


def test_assignments_pack_at_most_three_values():
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                for target in node.targets:
                    count = len(target.elts) if isinstance(target, ast.Tuple) else 1
                    assert count <= 3, f"{path}:{node.lineno} assigns {count} values at once"


def test_functions_of_the_core_fit_a_screen():
    """Recipes apart, whose forward pass is one function: their docstrings and comments count."""
    for path in FILES:
        if room(path) in CORE - {"recipes"}:
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or 0) - node.lineno + 1
                    assert lines <= 60, f"{path}:{node.lineno} {node.name} has {lines} lines"
