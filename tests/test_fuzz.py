"""Fuzz command lines, recipe fields, recipe files and manifests: exit codes are documented ones.

No traceback, and no file outside the run directory.

Everything goes in by ``scripts/`` and ``python -m jspeed.data`` as a user's does, in this process.
Most examples stop before anything is compiled, by ``--show-layout`` or because there is no model;
some train a toy for a step. Examples are the same in every run.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jspeed.recipes import FOLDER
from jspeed.run.find_recipe import find

from .call_script import Done, call
from .multi_process import shards
from .toys import TOYS

CODES = {0, 1, 2, 130, 143}
QUICK = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
THOROUGH = settings(QUICK, max_examples=120)
both = pytest.mark.parametrize(
    "how", [QUICK, pytest.param(THOROUGH, marks=pytest.mark.slow)], ids=["few", "many"]
)
HOME = "home"  # where examples run; what is beside it nobody may write

numbers = st.one_of(
    st.sampled_from(["", "9" * 5000, *"0 -1 1 3 1.5 nan inf -inf 1e999 x 1_0 ² 0x10".split()]),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(repr),
)
texts = st.one_of(
    st.sampled_from(["", "a b", "x" * 5000, *". .. ../../evil / <script> - -- = , $HOME".split()]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
)
short = texts.filter(lambda text: len(text) < 100)
axes = st.tuples(
    st.sampled_from(["data", "model", "pipe", "datta", ""]), numbers | st.just("2")
).map("=".join)
meshes = st.lists(axes, max_size=3).map(",".join) | texts
plans = st.one_of(
    texts,
    numbers.map("n={}".format),
    st.tuples(numbers, numbers).map("..".join).map("seeds={}".format),
)
layouts = (
    st.sampled_from(["zero1", "dp", "fsdp", "tp", "fsdp+tp", "pp", "dp+remat", "pp+remat", "+", ""])
    | texts
)
names = (
    st.sampled_from(["stdlib", "shakespeare-char", "r21", "stdlb", "none.py", "mine/.py", "/"])
    | texts
)
FIELDS = sorted(find("stdlib", trace=False).fields)
values = st.one_of(
    # sizes are small: a recipe is traced layer by layer
    numbers.filter(lambda text: len(text) < 3),
    st.sampled_from(["[1, 2]", "{[]: 1}", "(" * 300, "lambda: 0"]),
    st.sampled_from("None True () {} 'x' b'' 1j nan".split()),
    short,
)
sets = st.tuples(st.sampled_from(FIELDS) | texts, st.sampled_from(["=", "", "=="]), values).map(
    "".join
)
NUMBERED = ["--seed", "--steps", "--micro-batch", "--target-loss", "--max-minutes", "--profile"]
NUMBERED += ["--checkpoint-every", "--processes", "--process-id"]
flags = st.one_of(
    st.tuples(st.sampled_from(NUMBERED), numbers),
    st.tuples(st.just("--mesh"), meshes),
    st.tuples(st.just("--layout"), layouts),
    st.tuples(
        st.sampled_from("--attention --log --coordinator --data --init-from --nope".split()), texts
    ),
    st.tuples(st.just("--set"), sets),
    st.tuples(st.sampled_from("--resume --no-sample --no-progress --sample --help -h".split())),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | short,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short, inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / HOME).mkdir()
    shards(tmp_path / "shards")
    return tmp_path


def behaves(place: Path, script: str, *arguments: object, writes: tuple[str, ...] = ()) -> Done:
    """Call a command line; only folders of HOME that are called one of ``writes`` may be other
    afterwards."""
    before = snapshot(place, writes)
    done = call(place / HOME, script, *arguments)
    assert done.code in CODES, (arguments, done)
    assert "Traceback" not in done.out + done.err, (arguments, done)
    if done.err.startswith("error: "):
        # a word with line ends is given back as it is, or as Python writes it
        lines = done.err.count("\n")
        assert done.code == 2 and 1 <= lines <= 1 + "".join(map(str, arguments)).count("\n"), (
            arguments,
            done,
        )
    assert snapshot(place, writes) == before, arguments
    return done


def snapshot(place: Path, writes: tuple[str, ...]) -> dict[str, bytes | None]:
    """Everything below ``place`` but the folders that may be written."""
    found: dict[str, bytes | None] = {}
    for folder, folders, files in os.walk(place):
        if Path(folder) == place / HOME:
            folders[:] = [name for name in folders if name not in writes]
        found |= {str(Path(folder, name)): None for name in folders}
        found |= {str(Path(folder, name)): Path(folder, name).read_bytes() for name in files}
    return found


@both
def test_command_lines(how: settings, place: Path) -> None:
    @how
    @given(st.lists(flags, max_size=4), names | st.just("stdlib"))
    def each(chosen, name):
        words = [word for flag in chosen for word in flag]
        behaves(place, "speedrun.py", name, *words, "--show-layout")

    each()


@both
def test_fields(how: settings, place: Path) -> None:
    @how
    @given(st.lists(sets, min_size=1, max_size=3))
    def each(fields):
        behaves(place, "speedrun.py", "stdlib", "--show-layout", "--set", *TOYS["stdlib"], *fields)

    each()


# The other commands, as far as they come without a model, a network or another process: words,
# flags, last words.
TEXT = "text ../names.txt --out out --tokenizer bytes --processes 1"
SAMPLE = "--number --tokens --temperature --top-k --top-p --seed --prompt-file --stop --mesh"
LAUNCH = "--nnodes --node-rank --nproc-per-node --master-port --max-restarts --grace --results"
OTHERS = [
    ("launch.py", "--dry-run", LAUNCH, "run"),
    ("launch.py", "--dry-run", "--master-addr", ""),
    ("sample.py", "nowhere", SAMPLE, ""),
    ("evaluate.py", "nowhere", "--tokens --items --hellaswag --tasks --mesh --json --data", ""),
    ("export.py", "nowhere", "--out", ""),
    ("plan.py", "gpt2", "--target --micro-batch --mesh --layout --json", ""),
    ("prepare.py", "names --input ../names.txt --out out", "--row", ""),
    ("prepare.py", TEXT, "--val-fraction --seed --end-of-text --val-input", ""),
    ("leaderboard.py", "race stdlib stdlib", "--rounds --steps --flags --run-dir", ""),
    ("leaderboard.py", "show", "--track --records", ""),
    ("leaderboard.py", "verify --records ../records", "", ""),
    ("leaderboard.py", "compare --records ../records stdlib", "", ""),
]


@both
def test_other_commands(how: settings, place: Path) -> None:
    (place / "names.txt").write_text("ada\nbob\ncy\n")
    (place / "records").mkdir()

    @how
    @given(st.data(), st.sampled_from(OTHERS), numbers | texts)
    def each(data, other, last):
        script, words, flags, ends = (other[0], *(part.split() for part in other[1:]))
        chosen = data.draw(st.lists(st.sampled_from(flags), max_size=2)) if flags else []
        given = [word for flag in chosen for word in (flag, data.draw(numbers | texts))]
        behaves(
            place, script, *words, *given, *(ends or ([] if flags else [last])), writes=("out",)
        )
        shutil.rmtree(place / HOME / "out", ignore_errors=True)

    each()


LINES = [
    line
    for line in (FOLDER / "stdlib.py").read_text().splitlines()
    if line[:4] == "    " and "=" in line
][-21:]
PYTHON = "None 0 -1 1e999 '../../evil' '' 64.0 () print [] sys.exit(0) 1/0 recipe".split()


@both
def test_recipe_files(how: settings, place: Path) -> None:
    how = settings(QUICK, max_examples=8) if how is QUICK else how
    source = (
        (FOLDER / "stdlib.py").read_text().replace("import jax\n", "import sys\nimport jax\n", 1)
    )

    @how
    @given(st.sampled_from(LINES), st.sampled_from(PYTHON) | json_values.map(repr))
    def each(line, value):
        (place / HOME / "mine.py").write_text(
            source.replace(line, f"{line.partition('=')[0]}={value},")
        )
        behaves(place, "speedrun.py", "mine.py", "--show-layout")
        behaves(place, "plan.py", "mine.py", "--no-compile")

    each()


def test_plans(place: Path) -> None:
    """A plan that can be meant is stopped by what the run is given; the rest by what it says."""

    @QUICK
    @given(plans)
    def each(plan):
        behaves(place, "speedrun.py", "--plan", plan, "--steps", "0")

    each()


GOOD = {"format_version": 1, "tokenizer": "bytes", "vocab_size": 257, "bos_id": 256, "files": []}


def test_manifests(place: Path) -> None:
    @QUICK
    @given(
        st.dictionaries(
            st.sampled_from([*GOOD, "symbols", "pad_id", "other"]), json_values, max_size=3
        ),
        st.booleans(),
    )
    def each(changes, verify):
        (place / "shards" / "manifest.json").write_text(json.dumps(GOOD | changes))
        behaves(place, "jspeed.data", place / "shards", *["--verify"] * verify)

    each()


NOT_ALONE = ("--coordinator", "--processes", "--process-id")


@pytest.mark.slow
def test_whole_runs(place):
    """Flags that reach a run: a step of a toy, and what it writes lies in its run directory."""

    alone = flags.filter(lambda flag: flag[0] not in NOT_ALONE)

    @settings(QUICK, max_examples=30)
    @given(st.lists(alone, max_size=2))
    def each(chosen):
        words = [word for flag in chosen for word in flag]
        common = ["--data", place / "shards", "--steps", 1, "--no-sample", "--set", *TOYS["stdlib"]]
        behaves(place, "speedrun.py", *common, *words, writes=("runs",))

    each()
