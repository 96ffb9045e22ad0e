"""Package lists that the docs install on other machines: each alone suffices for a training
process."""

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
import types
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jspeed.cli import satellites
from jspeed.recipes import known_recipes

from .minimal_venv import closure, minimal_venv, variables

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "jspeed"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("benchmarks/*.md"),
    *ROOT.glob("lab/*.md"),
    *ROOT.glob("examples/*.ipynb"),
]
# Asked for by a flag, and a missing one is answered with what to install: `jspeed doctor` has the
# same list.
ASKED_FOR = {"pyarrow", "tokenizers", "lm_eval", "tensorboard", "wandb"}


def of_skyward(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the page's own file gives to Skyward's image."""
    (code,) = re.findall(r"^```python\n(.*?)^```", section("Skyward"), re.MULTILINE | re.DOTALL)
    images = []
    fake = types.ModuleType("skyward")
    fake.function, fake.Image = (
        lambda **_: lambda train: train,
        lambda **image: images.append(image),
    )
    monkeypatch.setitem(sys.modules, "skyward", fake)
    monkeypatch.chdir(ROOT)
    exec(compile(code, "cloud.py", "exec"), {"__name__": "cloud"})
    (image,) = images
    assert set(image["includes"]) == {"scripts", "python"}
    return image["pip"]


def of_skypilot(_: pytest.MonkeyPatch) -> list[str]:
    """What its setup's pip installs."""
    (asked,) = re.findall(r"pip install '\.\[(\w+)\]'", section("SkyPilot"))
    return [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][asked]]


def section(heading: str) -> str:
    page = (ROOT / "docs" / "launch.md").read_text()
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return text


def imports(path: Path) -> set[str]:
    """The modules that a file imports, in functions too, but not for a type checker alone."""
    tree = ast.parse(path.read_text())
    unread = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    skipped = {id(inner) for node in unread for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            own = node.module.split(".")[0] == "jspeed"
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names if own}
    return found


def needed() -> list[str]:
    """The modules that a training process may import, of jspeed and others, from commands on."""
    todo = ["jspeed.cli.main", *(satellites.COMMANDS[name][0] for name in ("run", "launch"))]
    todo += [*satellites.HOOKS, satellites.RANK, satellites.JOIN]  # a run finds these by name
    todo += [f"jspeed.recipes.{name.replace('-', '_')}" for name in known_recipes()]
    own: set[str] = set()
    others: set[str] = set()
    while todo:
        name = todo.pop()
        if name.split(".")[0] != "jspeed":
            others |= {name} - sys.stdlib_module_names
            continue
        path = PACKAGE.joinpath(*name.split(".")[1:])
        file = next(
            (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()),
            None,
        )
        if file and name not in own:
            own.add(name)
            todo += imports(file)
    others = {name for name in others if name.split(".")[0] not in sys.stdlib_module_names}
    assert len(own) > 60 and {"safetensors.numpy", "orbax.checkpoint", "tiktoken"} <= others
    return sorted(own | {name for name in others if name.split(".")[0] not in ASKED_FOR})


IMPORT_ALL = """
    import importlib, importlib.util, sys
    for name in sys.argv[1:]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(name, error)
    assert importlib.util.find_spec("pytest") is None  # the environment is bare
"""


@pytest.mark.slow
def test_every_list_is_enough(monkeypatch, tmp_path):
    lists = [of_skyward(monkeypatch), of_skypilot(monkeypatch), PROJECT["dependencies"]]
    made = {tuple(sorted(closure(packages))): packages for packages in lists}
    for number, packages in enumerate(made.values()):
        python = minimal_venv(tmp_path / str(number), packages)
        command = [python, "-c", textwrap.dedent(IMPORT_ALL), *needed()]
        done = subprocess.run(
            command, env=variables(ROOT / "python"), capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_list_without_a_package_is_not_enough(tmp_path):
    """The page's list as it once was: no other package brings safetensors along, and the
    environment shows it."""
    short = [text for text in PROJECT["dependencies"] if not text.startswith("safetensors")]
    command = [
        minimal_venv(tmp_path / "venv", short),
        "-c",
        "import numpy; import safetensors.numpy",
    ]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'safetensors'\n")


def test_every_package_that_is_imported_is_declared():
    """By name, not only by another that needs it: tqdm, which huggingface_hub brings, was not."""
    rows = [
        *PROJECT["dependencies"],
        *(row for rows in PROJECT["optional-dependencies"].values() for row in rows),
    ]
    declared = {canonicalize_name(Requirement(row).name) for row in rows}
    declared |= {"markupsafe"}  # jinja2's own type of text that is safe
    # nvidia-cudnn-frontend, by plan/cudnn/worker.py, which runs where make test-cudnn put it
    declared |= {"cudnn"}
    names = {name for file in PACKAGE.rglob("*.py") for name in imports(file)}
    tops = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"jspeed", "benches"}
    whose = packages_distributions()
    for top in tops:  # of what is not installed the module's name must do
        names = {canonicalize_name(name) for name in whose.get(top, [top])}
        assert names & declared, f"{top}, of {', '.join(names)}"
    assert {"tqdm", "numpy", "jax", "safetensors"} <= tops


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_extras_that_a_page_installs_exist(page):
    for extras in re.findall(r"(?:install '\.|jspeed)\[([\w,]+)\]", page.read_text()):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), extras
