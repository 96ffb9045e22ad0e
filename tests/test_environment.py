"""The environment changes no number of a model or a run that run.json does not name."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.base.accelerators import find
from jspeed.cli.main import HONOURED, leave_out_settings, unfold_xla_flags
from jspeed.model.layers import key_of
from jspeed.parallel.mesh import find_devices

from .call_script import Done
from .multi_process import SAME_BITS, environment, metrics, said, shards
from .toys import TINY

OTHER = dict(
    jax_default_prng_impl="rbg", jax_random_seed_offset=5, jax_threefry_partitionable=False
)


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 7, 2**32 - 1])
def test_a_key_is_jax_s_own(seed):
    usual = jax.random.key(np.uint32(seed), impl="threefry2x32")
    for found in (key_of(seed), key_of(jnp.uint32(seed)), jax.jit(key_of)(jnp.uint32(seed))):
        np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(usual))


def jspeed(*words: object, cwd: Path | None = None, **variables: str) -> Done:
    """The installed command, in a process with these variables besides."""
    command = [sys.executable, "-m", "jspeed", *map(str, words)]
    done = subprocess.run(
        command, env=environment() | variables, cwd=cwd, capture_output=True, text=True, timeout=300
    )
    return Done(done.returncode, done.stdout, done.stderr)


def refused(tmp_path: Path, **variables: str) -> str:
    """What a run with these variables says, which is a sentence and leaves no folder."""
    run_dir = tmp_path / "run"
    words = ["--data", shards(tmp_path / "shards"), "--run-dir", run_dir]
    done = jspeed("run", "stdlib", *words, **variables)
    assert done.code == 2 and done.err.count("\n") == 1 and not run_dir.exists(), done
    return done.err


CONSTANTS = """
import json, sys
import jax
from jspeed.model.layers import key_of, lane_keys
from jspeed.speedrun.ngrams import signs

def constants():
    tokens = jax.numpy.arange(40).reshape(1, 40)
    found = signs(tokens, 48), jax.random.key_data(key_of(3)), lane_keys(1, 2, 3, 4)
    return [x.tolist() for x in found]

usual = constants()
for name, value in json.loads(sys.argv[1]).items():
    jax.config.update(name, value)
jax.clear_caches()
sys.exit(0 if constants() == usual else 1)
"""


def test_constants_of_a_model_depend_on_no_setting():
    """In a process of its own: here all other tests would compile again."""
    words = [sys.executable, "-c", CONSTANTS, json.dumps(OTHER)]
    assert subprocess.run(words, env=environment()).returncode == 0


def test_what_is_left_out_is_said(capsys):
    given = dict(
        JAX_ENABLE_X64="1", JAX_PLATFORMS="cpu", XLA_FLAGS="--x", JAX_RANDOM_SEED_OFFSET="5"
    )
    given |= {"CHECK_VMA": "1", "JAX_OF_A_RELEASE_TO_COME": "on", "MY_JAX_RUN": "1"}
    leave_out_settings(given)
    assert given == {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--x", "MY_JAX_RUN": "1"}
    assert capsys.readouterr().err.splitlines() == [
        "note: CHECK_VMA=1 is left out: jspeed's numbers depend on no setting of JAX",
        "note: JAX_ENABLE_X64=1 is left out: jspeed's numbers depend on no setting of JAX",
        (
            "note: JAX_OF_A_RELEASE_TO_COME=on is left out: jspeed's numbers depend on no setting"
            " of JAX"
        ),
        "note: JAX_RANDOM_SEED_OFFSET=5 is left out: jspeed's numbers depend on no setting of JAX",
    ]


def test_what_is_honoured_is_jax_s_own():
    """A misspelt name would leave out the right one. Some about processes are read by ``rank.py``
    alone."""
    processes = {
        "COORDINATOR_ADDRESS",
        "COORDINATOR_BIND_ADDRESS",
        "COORDINATOR_PORT",
        "LOCAL_DEVICE_IDS",
    }
    processes |= {"NUM_PROCESSES", "PARTITION_INDEX", "PROCESS_ID", "SLICE_INDEX"}
    known = {name.upper() for name in jax.config.values} | {f"JAX_{name}" for name in processes}
    assert known >= HONOURED, HONOURED - known


def test_a_variable_that_jax_cannot_read_is_one_sentence(tmp_path):
    said = refused(tmp_path, JAX_LOG_COMPILES="maybe")
    assert said.startswith("error: JAX cannot read a variable (") and "LOG_COMPILES" in said


OTHER_SETTINGS = """
    JAX_DEFAULT_PRNG_IMPL=rbg JAX_RANDOM_SEED_OFFSET=5 JAX_ENABLE_X64=1
    JAX_THREEFRY_PARTITIONABLE=0 JAX_TRANSFER_GUARD=disallow
    JAX_NUMPY_DTYPE_PROMOTION=strict JAX_DEFAULT_MATMUL_PRECISION=bfloat16
"""


@pytest.mark.slow
def test_a_run_with_other_settings_is_the_same(tmp_path):
    """Losses were 3.2250 and 3.5240 for 3.4241, with the same hash of the recipe.

    Nor needs it a place for a cache, and of the folder that it is called in it imports nothing.
    """
    (tmp_path / "numpy").mkdir()
    for name in ("jax.py", "random.py", "typing.py", "numpy/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit(9)")
    words = "run stdlib --no-progress --no-sample --steps 2 --data".split()
    words += [shards(tmp_path / "shards"), "--set", *TINY, "LAYERS=1", "EVAL_EVERY=1", "--run-dir"]
    settings = dict(each.split("=") for each in OTHER_SETTINGS.split())
    usual = jspeed(*words, tmp_path / "usual", **SAME_BITS)
    none = {"JSPEED_CACHE": "/dev/null/none"}
    other = jspeed(*words, tmp_path / "other", cwd=tmp_path, **SAME_BITS, **settings, **none)
    assert usual.code == other.code == 0, usual.err + other.err
    assert usual.err == ""
    assert other.err.count("is left out") == len(settings)
    assert other.err.count("programs that this run compiles are not kept") == 1
    assert other.err.count("\n") == len(settings) + 1
    for kind in ("train_loss", "val_loss"):
        losses = metrics(tmp_path / "usual", kind)
        assert metrics(tmp_path / "other", kind) == losses and len(losses) >= 2


@pytest.mark.skipif(bool(find().gpus), reason="there are GPUs here")
@pytest.mark.parametrize("platform", ["cuda", pytest.param("nonsense", marks=pytest.mark.slow)])
def test_a_platform_that_is_not_here_is_one_sentence(platform, tmp_path):
    wanted = f"error: JAX_PLATFORMS={platform}: JAX can use none of these here"
    assert refused(tmp_path, JAX_PLATFORMS=platform).startswith(wanted)


@pytest.mark.slow
@pytest.mark.skipif(bool(find().gpus), reason="there are GPUs here")
def test_doctor_says_that_a_platform_is_not_here():
    looked = jspeed("doctor", JAX_PLATFORMS="cuda")
    assert looked.code == 0, looked.err
    assert "JAX_PLATFORMS=cuda: JAX can use none" in looked.out


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--xla_cpu_enable_fast_math=false", None),
        (
            "--xla_cpu_enable_fast_math=false --xla_gone --xla_x=1",
            "Unknown flags in XLA_FLAGS: --xla_gone --xla_x=1)",
        ),
        ("--xla_cpu_enable_fast_math=maybe", "Couldn't interpret value maybe for flag"),
        ("nowhere.txt", 'Could not open file "nowhere.txt"'),
        (" ", "Could not open file"),
    ],
)
def test_flags_that_xla_does_not_take(flags, fault, monkeypatch):
    """XLA ends the process at them, with exit code 1, which says that a run missed its target."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    if fault is None:
        assert find_devices()
    else:
        assert f"does not take these XLA_FLAGS ({fault}" in said(find_devices)


def test_a_run_with_flags_that_xla_does_not_take_is_bad_input(tmp_path):
    said = refused(tmp_path, XLA_FLAGS="--xla_gone=1")
    assert said.startswith("error: the XLA of jaxlib ") and "XLA_FLAGS: --xla_gone=1)" in said


@pytest.mark.parametrize(
    ("written", "unfolded"), [("--xla_a=1\n  --xla_b\n", "--xla_a=1 --xla_b"), (None, "{}")]
)
def test_a_file_of_flags_becomes_its_flags(written, unfolded, tmp_path):
    """A run records XLA_FLAGS, and options of its own go by them."""
    if written:
        (tmp_path / "flags").write_text(written)
    for given, expected in (
        (f"{tmp_path}/flags", unfolded.format(f"{tmp_path}/flags")),
        ("--xla_c", "--xla_c"),
    ):
        settings = {"XLA_FLAGS": given}
        unfold_xla_flags(settings)
        assert settings == {"XLA_FLAGS": expected}


@pytest.mark.parametrize(
    "columns", ["0", *(pytest.param(c, marks=pytest.mark.slow) for c in ("00", " "))]
)
def test_a_terminal_without_width_still_gets_the_text(columns):
    done = jspeed("leaderboard", "show", COLUMNS=columns)
    assert done.code == 0 and "stdlib" in done.out, done.err
