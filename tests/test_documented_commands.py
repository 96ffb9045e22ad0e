"""Every command of the pages, the Makefile, CI, the workflow and the GPU day, read by its own
parser and not run.

Running them takes hours, downloads and GPUs: test_package.py runs README's, tests/launchers those
of docs/launch.md.
"""

import functools
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from jspeed.cli import main, satellites
from jspeed.cli.flags import Command, Group, choose_command, parse
from jspeed.errors import BadInput
from jspeed.plan.estimates import PUBLISHED
from jspeed.plan.target import parse_target
from jspeed.run.find_recipe import find
from jspeed.run.options import Options, check_options

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "records/ideas/README.md",
]
PAGES += sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("lab/*.md")])
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(
    re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", MAKEFILE, re.M)[1].replace("\\\n", " ").split()
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = {
    path.name: "run" if path.stem == "speedrun" else path.stem for path in ROOT.glob("scripts/*.py")
}
# Files that the reader has, or that the page tells how to get.
READERS = {
    "/data/fineweb",
    "shakespeare.txt",
    "my_texts",
    "mine.txt",
    "gpt2",
    "webtext_val.jsonl.xz",
    "folder/of/the/text",
}
READERS |= {
    "~/nanoGPT",
    "~/torch/bin/python",
    "nanoGPT/data/openwebtext",
    "edu_fineweb10B",
    "cloud.py",
}
# parameters that are files to be written
WRITTEN = {"out", "run_dir", "json_", "svg", "html", "results"}
# What stands for something else, and one thing that it may stand for.
PLACEHOLDERS = {r"(?:RECIPE|PARENT)": "stdlib", "X": "plan", r"\$\w+": "1", "N": "1"}
SPAN = re.compile(
    r"(make|jspeed|python3?|pip|maturin|\S*\.sh"
    rf"|(scripts/)?({'|'.join(map(re.escape, SCRIPTS))})) \S"
)


def on_page(text: str) -> Iterator[tuple[str, bool]]:
    """The commands of a page; and whether one is whole: in a block, not in a sentence."""
    fence = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
    for kind, block in fence.findall(text):
        if kind in ("sh", "bash"):
            yield from ((line, True) for line in block.replace("\\\n", " ").splitlines())
    text = fence.sub("", text)
    yield from ((line, True) for line in re.findall(r"^    (.*)$", text, re.M) if SPAN.match(line))
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text))
    yield from ((span, False) for span in spans if SPAN.match(span))


def simple(line: str) -> Iterator[list[str]]:
    """The simple commands of a line of shell, as words; one that a sentence breaks off has no more
    words."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("&|;()"):
            yield words
            words = []
        elif word != "...":
            words.append(word)
    yield words


class Reader:
    """Reads commands in order; ``made`` are the files that those before have written."""

    def __init__(self, made: frozenset[str] = frozenset()) -> None:
        self.made = set(made)

    def line(self, line: str, whole: bool = True) -> None:
        for name, value in PLACEHOLDERS.items():
            line = re.sub(rf"(?<!\w){name}(?!\w)", value, line)
        for words in simple(line):
            if ">" in words:
                self.made.add(words[words.index(">") + 1])
                words = words[: words.index(">")]
            while words and re.match(r"\w+=", words[0]):
                words = words[1:]
            if words:
                self.command(words, whole)

    def command(self, words: list[str], whole: bool = True) -> None:
        program, *rest = words
        # they read their own flags, in tests/launchers
        if program in ("srun", "mpirun", "mpiexec", "torchrun"):
            start = next(
                number
                for number, word in enumerate(rest)
                if word == "python" or word.endswith(".py")
            )
            self.command(rest[start:])
        elif program == "make":
            named = [word for word in rest if "=" not in word]
            assert set(named) <= TARGETS, f"make {named}: no such target"
        elif program == "jspeed":
            self.jspeed(rest, whole)
        elif Path(program).name in ("python", "python3") and rest[0] == "-m":
            if rest[1] == "jspeed.data":
                from jspeed.corpus.shards.show import show

                self.values(parsed(Command(show), rest[2:]))
            else:
                assert rest[1] in ("venv", "pytest"), f"{rest}: an unknown module"
                self.paths(" ".join(rest))
        elif Path(program).name in ("python", "python3"):
            self.command(rest, whole)
        elif Path(program).name in SCRIPTS:
            assert program in SCRIPTS or (ROOT / program).is_file(), f"{program}: no such file"
            self.jspeed([SCRIPTS[Path(program).name], *rest], whole)
        elif program in ("pip", "maturin"):
            self.extras(rest)
        elif program == ".":
            assert rest == [".venv/bin/activate"]
        elif program.endswith(".py"):
            self.exists(program)
        else:
            assert os.access(ROOT / program, os.X_OK), f"{program}: an unknown program"

    def jspeed(self, words: list[str], whole: bool) -> None:
        """A command line of ``jspeed``; of one in a sentence, which may lack arguments, at least
        the command exists."""
        prog, command = "jspeed", Group(main.ABOUT, satellites.commands(), satellites.command)
        while isinstance(command, Group) and (whole or words):
            name = choose_command(command, words, prog)
            prog, command, words = f"{prog} {name}", command.load(name), words[1:]
        if isinstance(command, Command) and (whole or words):
            self.values(parsed(command, words))

    def values(self, given: dict[str, object]) -> None:
        sets = given.get("set_") or given.get("set") or ()
        for name, value in given.items():
            for each in value if isinstance(value, tuple) else (value,):
                if name in ("recipe", "recipes", "a", "b", "against") and each is not None:
                    self.recipe(str(each).partition(":")[0], sets)
                elif name == "target":
                    parse_target(str(each))
                elif name in WRITTEN and each is not None:
                    self.made.add(str(each))
                elif isinstance(each, Path):
                    self.exists(str(each))
        if "command" in given:  # of launch
            words = list(given["command"])
            self.command(words if words[0].endswith(".py") else ["jspeed", *words])
        if "run_dir" in given and not given["run_dir"] and (recipe := given.get("recipe")):
            self.made.add(f"runs/{Path(recipe).stem}-" + "-plan" * bool(given.get("plan")))

    def recipe(self, name: str, sets: tuple[str, ...]) -> None:
        if name.endswith(".py"):
            self.exists(name)
        elif name not in PUBLISHED:
            assert find(name, sets, trace=False)

    def exists(self, path: str) -> None:
        named = path.isupper() or Path(path).stem.isupper()  # FILE, NAME.py
        known = (
            named
            or Path(path).is_relative_to(Path.home())  # ~/FOLDER is the reader's
            or path in READERS | self.made
            or path.replace("...", "") in self.made
            or (ROOT / path).exists()
        )
        assert known, (
            f"{path}: neither in the repository, nor the reader's, nor written by a line before"
        )

    def extras(self, words: list[str]) -> None:
        """The arguments of pip install or maturin develop."""
        for number, word in enumerate(words[1:], 1):
            if words[number - 1] == "--extras" or re.match(r"(\.|jspeed)\[", word):
                asked = set(re.sub(r"^(\.|jspeed)\[|\]$", "", word).split(","))
                assert asked <= PROJECT["optional-dependencies"].keys(), f"{asked}: no such extra"
            elif not word.startswith("-"):
                assert Requirement(word).name in ("maturin", "libtpu"), (
                    f"{word}: which page says why?"
                )

    def paths(self, text: str) -> None:
        """Paths of the repository's own folders that a command names."""
        for path in re.findall(
            r"(?<![\w./])((?:tests|scripts|records|rust|python|benchmarks|\.github)/[\w./*-]+)",
            text,
        ):
            assert any(ROOT.glob(path)), f"{path}: no such file"


def parsed(command: Command, words: list[str]) -> dict[str, object]:
    """The arguments that the command's function would get, a dataclass's fields among them."""
    call = functools.wraps(command.call)(lambda **given: given)
    given: dict[str, object] = {}
    for name, value in parse(replace(command, call=call), words, "jspeed")().items():
        if isinstance(value, Options):
            check_options(value)
        given |= (
            {one.name: getattr(value, one.name) for one in fields(value)}
            if is_dataclass(value)
            else {name: value}
        )
    return given


@functools.cache
def made_by_readme() -> frozenset[str]:
    reader = Reader()
    for line, whole in on_page(PAGES[0].read_text()):
        reader.line(line, whole)
    return frozenset(reader.made)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_pages_can_be_typed(page):
    reader = Reader(made_by_readme())
    for line, whole in on_page(page.read_text()):
        try:
            reader.line(line, whole)
        except BaseException as error:
            error.add_note(line)
            raise


@pytest.mark.parametrize(
    "line",
    [
        "make bnech",
        "jspeed run --stepz 3",
        "jspeed run stdlib --set NOPE=1",
        "jspeed run --data nowhere",
        "jspeed run --log nowhere",
        "jspeed plan r29 --target h100y8",
        "jspeed nope",
        "jspeed launch --standalone run --stepz 3",
        "python scripts/nope.py",
        "python -m jspeed.nope",
        "torchrun --standalone scripts/speedrun.py nope",
        "jspeed sample nowhere && make test",
        "pip install '.[cuda11]'",
        "pip install 'jspeed[cuda11]'",
        "maturin develop --extras nope",
        "frobnicate",
    ],
)
def test_wrong_commands_are_noticed(line):
    with pytest.raises((AssertionError, BadInput)):
        Reader().line(line)


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_targets_name_what_exists(target):
    """``make -n`` fails where a file that a target needs can neither be found nor made."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    reader = Reader()
    reader.paths(done.stdout)
    tests = "".join(
        path.read_text() for path in ROOT.glob("tests/**/*.py") if path != Path(__file__)
    )
    for variable in re.findall(r"\bJSPEED_\w+", done.stdout):
        assert f'"{variable}"' in tests, f"no test reads {variable}"
    # of the variable WEBTEXT, which is empty
    reader.made |= {"/webtext_train_00.jsonl.xz", "/webtext_val.jsonl.xz"}
    for line in re.findall(r"\.venv/bin/python scripts/.*", done.stdout.replace("\\\n", " ")):
        reader.line(line)


def test_every_target_is_phony():
    assert set(re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, re.M)) == TARGETS


def test_ci_and_the_workflow_name_commands():
    reader = Reader()
    ci = (ROOT / ".ci" / "run").read_text()
    reader.paths(ci)
    commands = re.findall(r"^ *(?:\[.*\] \|\| )?suite [a-z]+ ([^#\n]*)", ci, re.M)
    commands = [re.sub(r" \$\{\w+:\+.*?\}$", "", line) for line in commands]
    workflow = re.findall(
        r"^ +(?:.*bin/)?(jspeed .*)$", (ROOT / ".github/workflows/wheels.yml").read_text(), re.M
    )
    assert len(commands) == 10 and len(workflow) > 4
    for line in commands + workflow:
        reader.line(line)
