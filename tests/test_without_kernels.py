"""Without the folder of kernels, and with a JAX that has no Pallas on Triton, everything else
works, and one line says what is missing."""

import subprocess
import sys

import jax
import pytest

from jspeed.model.custom_kernels import Attending, Chip, available
from jspeed.run.compute.device import device_of

from .multi_process import TOY, environment, shards
from .run.compute.test_device import cuda
from .toys import TOYS

TRITON = "jax.experimental.pallas.triton", "jax._src.pallas.triton"
PACKED = Attending(packed=True, bounded=True, width=128)
# The rest of the command line: what to block, then that of `jspeed`. Each recipe is traced first.
PROGRAM = """
import sys

blocked, words = sys.argv[1].split(","), sys.argv[2:]
sys.modules |= dict.fromkeys(blocked)
from jspeed.cli.main import main
from jspeed.run.find_recipe import find

for line in sys.stdin.read().splitlines():
    name, *sets = line.split()
    find(name, sets)
assert not [name for name in sys.modules if name.startswith("jspeed.kernels.")]
sys.argv = ["jspeed", *words]
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocked", "names"),
    [
        pytest.param(("jspeed.kernels",), ("r29", "jspeed3"), id="folder"),
        pytest.param(TRITON, ("r92",), id="triton"),
    ],
)
def test_recipes_are_traced_and_a_run_trains(blocked, names, tmp_path):
    recipes = "\n".join(" ".join([name, *TOYS[name]]) for name in names)
    run = ["run", "stdlib", "--data", shards(tmp_path / "data"), "--run-dir", tmp_path / "run"]
    words = [*run, "--steps", 3, "--no-progress", "--no-sample", "--set", *TOY]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(blocked), *map(str, words)],
        input=recipes,
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode in (0, 1), done.stderr
    assert (tmp_path / "run" / "run.json").is_file(), done.stderr


@pytest.fixture
def without_triton(monkeypatch):
    """As if neither it nor the folder of kernels had been imported yet."""
    for name in [name for name in sys.modules if f"{name}.".startswith("jspeed.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("jspeed.kernels", *TRITON):
        parent, _, child = name.rpartition(".")
        monkeypatch.delattr(sys.modules.get(parent), child, raising=False)
    for name in TRITON:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_device_says_in_a_line_what_it_lacks_of_kernels(without_triton):
    found = device_of(cuda("9.0"))
    assert (found.attention, found.fallbacks) == ("cudnn", ("xla",)) and not found.custom_kernels
    assert found.note == (
        "this JAX has no jax.experimental.pallas.triton: without custom kernels FP8 casts, MLP,"
        " XSA, gradient of a norm, pointer, queries and keys, sums of rows, update of rows and"
        " attention triton"
    )
    assert device_of(cuda("8.0")).attention == "xla"
    assert device_of(cuda("7.5")).note is None and jax.default_backend() == "cpu"


def test_devices_have_all_kernels_where_nothing_is_missing():
    hopper, ampere = (available(Chip("gpu", (number, 0)), PACKED) for number in (9, 8))
    assert hopper.attention == ("cudnn", "cudnn_lanes", "triton", "xla") and len(hopper.custom) == 8
    assert ampere.attention == ("triton", "xla") and not ampere.custom
    assert hopper.lacking is ampere.lacking is None


def test_without_the_folder_attention_is_xla_s(monkeypatch):
    monkeypatch.setitem(sys.modules, "jspeed.kernels", None)
    assert available(Chip("gpu", (9, 0)), PACKED) == (("xla",), frozenset(), None)
