"""Every layout that a recipe takes compiles, each in every dtype (docs/reference/layouts.md)."""

import subprocess
import sys
from pathlib import Path

import pytest

from jspeed.errors import BadInput
from jspeed.parallel import layout as layouts
from jspeed.parallel.layout import LAYOUTS, check_layout
from jspeed.recipes import known_recipes

from .compile_layouts import DTYPES, ENDINGS, computes, mesh_for, toy

ROOT = Path(__file__).parents[3]
EVERY = [base + ending for base in LAYOUTS for ending in ENDINGS]
# At toy size they are llmc and fineweb-cpu to the letter (tests/test_recipe.py), but for constants
# of updates; r92 is jspeed3 but for the pointer.
SAME = ("gpt2", "tinystories", "r92")
NAMES = [name for name in known_recipes() if name not in SAME]
ENDED = ("nanogpt", "track3")  # with dropout and without


@pytest.fixture(autouse=True)
def small_arrays_are_sharded(monkeypatch):
    """As the processes of compile_layouts do."""
    monkeypatch.setattr(layouts, "SMALL", 0)


def compiled(cases):
    """Compile in another process, and fail with the case at which it ended: XLA ends a process by
    SIGABRT."""
    command = [sys.executable, "-m", "tests.run.compute.compile_layouts", *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = (done.stdout.splitlines() or ["nothing"])[-1]
    assert done.returncode == 0, f"exit code {done.returncode} at {last}: {done.stderr[-2000:]}"
    assert done.stdout.splitlines() == [f"{case} ok" for case in cases]


def taken(name, dtype):
    """The layouts that check_layout lets through at toy size, where two devices divide heads and
    layers."""
    recipe, found = toy(name, dtype), []
    for layout in EVERY:
        try:
            check_layout(layout, mesh_for(layout), recipe)
        except BadInput as error:
            assert "\n" not in str(error)
        else:
            found.append(layout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_one_that_is_taken_compiles(name):
    """Endings change how a gradient is computed, of any recipe alike: of some, each alone under dp,
    all elsewhere.

    A recipe's dtypes take turns, and not all begin with the same one, so that each layout meets
    each of them.
    """
    dtypes, turn = computes(name), len(name)
    ends = [*(base + ENDINGS[-1] for base in LAYOUTS), *("dp" + ending for ending in ENDINGS[1:-1])]
    some = [*LAYOUTS, *(ends if name in ENDED else ())]
    turns = {layout: dtypes[(turn + number) % len(dtypes)] for number, layout in enumerate(some)}
    able = taken(name, dtypes[-1])
    compiled([f"{name}:{dtype}:{layout}" for layout, dtype in turns.items() if layout in able])


@pytest.mark.parametrize(
    "name",
    [
        "microgpt-names",
        "r29",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("shakespeare-char", "r21")),
    ],
)
def test_a_layout_and_its_endings_are_taken_if_each_is(name):
    """Which is how the table is read."""
    found = taken(name, DTYPES[0])
    assert "zero1" in found
    for layout in EVERY:
        base = next(
            base for base in sorted(LAYOUTS, key=len, reverse=True) if layout.startswith(base)
        )
        endings = [f"dp+{ending}" for ending in layout.removeprefix(base).split("+")[1:]]
        assert (layout in found) == all(each in found for each in [base, *endings]), layout
