"""run.json's evidence of data, machine and state, against slow and obvious implementations."""

import stat
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.data import open_shards
from jspeed.data.overlap import TokenRange, overlap, trained_on
from jspeed.record import provenance
from jspeed.record.provenance import checksum
from jspeed.run.compute.inside import Inside, described, host_calls


def shard(path: Path, tokens: np.ndarray) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return path


@pytest.mark.parametrize("chunk", [1 << 22, 50])
def test_overlap_is_the_share_of_blocks_found_everywhere(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("jspeed.data.overlap.CHUNK", chunk)
    rng = np.random.default_rng(0)
    val = rng.integers(0, 50_000, 64 * 10 + 7)
    train = [rng.integers(0, 50_000, 900) for _ in range(3)]
    train[0][100:300] = val[0:200]  # blocks 0, 1, 2
    train[1][899 - 64 : 899] = val[256:320]  # block 4, up to the last token but one
    train[2][10:74] = val[320:384]  # block 5, of which the stream has read all but the last token
    files = [shard(tmp_path / f"t_train_{n}.bin", tokens) for n, tokens in enumerate(train)]
    ranges = [TokenRange(path, 0, end) for path, end in zip(files, (900, 900, 73), strict=True)]
    pieces = {
        tuple(t[a:b][i : i + 64])
        for t, (_, a, b) in zip(train, ranges, strict=True)
        for i in range(b - a - 63)
    }
    slow = np.mean([tuple(val[64 * n : 64 * n + 64]) in pieces for n in range(10)])
    assert slow == 0.4
    assert overlap(ranges, np.dtype("<u2"), val.astype(np.uint16)) == pytest.approx(slow)
    assert overlap([], np.dtype("<u2"), val.astype(np.uint16)) == 0
    assert overlap([TokenRange(files[0], 0, 20)], np.dtype("<u2"), val[:20].astype(np.uint16)) == 0


def test_what_a_stream_can_have_read(tmp_path):
    files = [shard(tmp_path / f"t_train_{n}.bin", np.arange(100 + n)) for n in range(3)]
    shards = open_shards(files)
    position = {"step": 5, "epoch": 0, "shard": 1, "offset": 40, "shuffle": "none"}
    assert trained_on(shards, position) == [(files[0], 0, 100), (files[1], 0, 41)]
    assert trained_on(shards, position | {"step": 0, "shard": 0, "offset": 0}) == []
    everything = [(path, 0, 100 + n) for n, path in enumerate(files)]
    assert trained_on(shards, position | {"epoch": 1}) == everything
    assert trained_on(shards, position | {"shuffle": "seed 1, blocks of 4 tokens"}) == everything


def test_checksum_sees_one_bit_anywhere_and_not_where_it_lies():
    rng = np.random.default_rng(0)
    state = {
        "w": rng.normal(size=(8, 24)).astype(np.float32),
        "b": jnp.asarray(rng.normal(size=16), jnp.bfloat16),
        "count": np.int32(3),
        "flag": np.array([True, False]),
    }
    first = checksum(state)
    assert first == checksum(jax.tree.map(jnp.array, state)) and len(first) == 16
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert checksum(state | {"w": jax.device_put(state["w"], cut)}) == first
    for place in [(0, 0), (7, 23), (3, 11)]:
        other = state["w"].copy()
        other.view(np.uint32)[place] ^= 1
        assert checksum(state | {"w": other}) != first
    swapped = state["w"].copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert checksum(state | {"w": swapped}) != first
    assert checksum(state | {"count": np.int32(4)}) != first
    assert checksum(state | {"flag": np.array([False, True])}) != first


def test_calls_to_the_host_are_found_at_any_depth():
    def inner(x):
        return jax.pure_callback(np.sin, x, x)

    hidden = jax.jit(
        lambda x: jax.lax.scan(lambda c, _: (jax.checkpoint(inner)(c), None), x, length=2)[0]
    )
    for function, calls in ((hidden, {"pure_callback"}), (jnp.sin, set())):
        inside = Inside()
        inside.look(jax.make_jaxpr(function)(1.0))
        assert inside.calls == calls
    text = jax.jit(hidden).lower(1.0).compile().as_text()
    assert host_calls(text) and not host_calls(jax.jit(jnp.sin).lower(1.0).compile().as_text())


def test_constants_of_a_program_are_counted_where_they_are():
    table = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)

    def hidden(x):
        return jax.lax.scan(lambda c, _: (jax.jit(lambda y: y + table)(c), None), x, None, 3)[0]

    inside = Inside()
    inside.look(jax.make_jaxpr(hidden)(jnp.ones((5, 7))))
    assert 35 <= inside.numbers <= 40 and len(inside.arrays) == 1


@pytest.mark.parametrize(
    ("array", "numbers"),
    [
        (np.arange(100), 2),
        (np.full(100, 3.5, np.float32), 2),
        (np.interp(np.arange(300), [0, 100, 300], [0, 1, 0.1]).astype(np.float32), 4),
        (np.random.default_rng(0).normal(size=100).astype(np.float32), 100),
        (np.random.default_rng(0).integers(0, 65, 100), 100),
    ],
)
def test_what_is_straight_takes_two_numbers_a_stretch(array, numbers):
    assert described(array) == pytest.approx(numbers, abs=3)


SMI = """#!/bin/sh
case "$*" in
  *driver_version*) printf '570.124.06\\n570.124.06\\n' ;;
  *query-gpu*) printf 'NVIDIA H100 80GB HBM3, 700.00, 1755, 1980, 2619, 41\\n' &&
               printf 'NVIDIA H100 80GB HBM3, [N/A], 1980, 1980, 2619, 43\\n' ;;
  "topo -m") printf '\\tGPU0\\tGPU1\\tNIC0\\tCPU Affinity\\n' &&
             printf 'GPU0\\t X \\tNV18\\tPIX\\t0-51\\nGPU1\\tNV18\\t X \\tSYS\\t0-51\\n' ;;
  *) printf '| NVIDIA-SMI 570.124.06    Driver Version: 570.124.06    CUDA Version: 12.8     |\\n' \
;;
esac
"""


def test_gpus_are_what_nvidia_smi_says(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    before = provenance.gpus()
    facts = provenance.gpu_facts(before)
    assert facts["driver"] == "570.124.06" and facts["cuda"] == "12.8"
    assert facts["links"] == ["NV18", "PIX", "SYS"]
    first, second = facts["after"]
    assert facts["before"] == facts["after"] and second["power_limit_watts"] is None
    assert first == {
        "name": "NVIDIA H100 80GB HBM3",
        "power_limit_watts": 700.0,
        "sm_mhz": 1755.0,
        "max_sm_mhz": 1980.0,
        "memory_mhz": 2619.0,
        "celsius": 41.0,
    }


def test_without_nvidia_smi_there_are_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.gpus() is None and provenance.gpu_facts(None) is None
    assert provenance.git(tmp_path) == {"commit": None, "dirty": None}


def git(folder, *words):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def repository(folder, *files):
    git(folder, "init", "-q")
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("1")
        git(folder, "add", file)
    git(folder, "commit", "-qm", "first")
    return git(folder, "rev-parse", "HEAD").strip()


def test_only_changes_of_tracked_files_make_a_commit_dirty(tmp_path):
    commit = repository(tmp_path, "code.py")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    assert provenance.git(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "code.py").write_text("2")
    assert provenance.git(tmp_path)["dirty"] is True


@pytest.mark.parametrize("place", [".venv/lib/jspeed", "jspeed", "vendor/jspeed"])
def test_a_package_that_a_repository_does_not_hold_has_no_commit(tmp_path, place):
    """In a ``.venv`` of somebody's repository, copied in beside it, or the same, ignored."""
    repository(tmp_path, "own.py")
    (tmp_path / ".gitignore").write_text("vendor\n")
    package = tmp_path / place
    package.mkdir(parents=True)
    (package / "train.py").write_text("1")
    assert provenance.git(package) == {"commit": None, "dirty": None}


@pytest.mark.parametrize("how", ["new file", "assumed", "skipped", "in a submodule's place"])
def test_changed_files_are_dirty_whatever_git_was_told(tmp_path, how):
    repository(tmp_path, "jspeed/train.py", "jspeed/run.py")
    assert provenance.git(tmp_path / "jspeed")["dirty"] is False
    file = tmp_path / "jspeed" / "train.py"
    match how:
        case "new file":
            (tmp_path / "jspeed" / "new.py").write_text("1")
        case "assumed":
            git(tmp_path, "update-index", "--assume-unchanged", str(file))
            file.write_text("2")
        case "skipped":
            git(tmp_path, "update-index", "--skip-worktree", str(file))
            file.write_text("2")
        case "in a submodule's place":
            (tmp_path / "jspeed" / "sub").mkdir()
            repository(tmp_path / "jspeed" / "sub", "more.py")
    assert provenance.git(tmp_path / "jspeed")["dirty"] is True


def test_what_a_hook_sets_is_not_where_the_code_is(tmp_path, monkeypatch):
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    commit = repository(tmp_path / "ours", "code.py")
    repository(tmp_path / "theirs", "other.py", "code.py")
    for name, value in [
        ("GIT_DIR", ".git"),
        ("GIT_WORK_TREE", ""),
        ("GIT_INDEX_FILE", ".git/index"),
    ]:
        monkeypatch.setenv(name, str(tmp_path / "theirs" / value))
    assert provenance.git(tmp_path / "ours") == {"commit": commit, "dirty": False}


def test_a_checkout_of_another_owner_is_known_or_told(tmp_path, monkeypatch):
    """As in a container that root runs and somebody else's checkout is mounted in."""
    package = tmp_path / "top" / "python" / "jspeed"
    commit = repository_in(tmp_path / "top", "python/jspeed/train.py")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    real = provenance._call

    def call(*given):
        made = real(*given)
        made["env"]["GIT_TEST_ASSUME_DIFFERENT_OWNER"] = "1"
        return made

    monkeypatch.setattr(provenance, "_call", call)
    found = provenance.git(package)
    assert found == {"commit": None, "dirty": None}
    told = provenance.why_no_commit(found, package)
    assert told and "commit of this checkout is unknown" in told and "dubious ownership" in told
    monkeypatch.setattr(provenance, "PACKAGE", package)
    assert provenance.git(package) == {"commit": commit, "dirty": False}
    assert provenance.why_no_commit({"commit": None, "dirty": None}, tmp_path) is None


def repository_in(folder, *files):
    folder.mkdir(parents=True)
    return repository(folder, *files)


ARM = """processor	: 0
BogoMIPS	: 50.00
CPU implementer	: {}
CPU architecture: 8
CPU variant	: {}
CPU part	: {}
CPU revision	: 1
"""


@pytest.mark.parametrize(
    "cpuinfo, name",
    [
        ("model\t\t: 85\nmodel name\t: Intel(R) Xeon(R)\nmodel name\t: other", "Intel(R) Xeon(R)"),
        (ARM.format("0x41", "0x0", "0xd4f"), "ARM Neoverse-V2 variant 0x0"),
        (ARM.format("0x41", "0x3", "0xd0c") * 2, "ARM Neoverse-N1 variant 0x3"),
        (ARM.format("0xc0", "0x0", "0xac3"), "Ampere part 0xac3 variant 0x0"),
        (ARM.format("0x99", "0x0", "0xd0c"), "implementer 0x99 part 0xd0c variant 0x0"),
        (
            ARM.format("0x41", "0x0", "0xd08") + ARM.format("0x41", "0x1", "0xd0b"),
            "ARM Cortex-A72 variant 0x0 + ARM Cortex-A76 variant 0x1",
        ),
        ("processor\t: 0\ncpu\t\t: POWER9, altivec\nclock: 2.3GHz", "POWER9, altivec"),
        ("vendor_id : IBM/S390\nprocessor 0: version = FF,  machine = 8561", "IBM/S390 8561"),
        ("Model Name\t: Loongson-3A5000", "Loongson-3A5000"),
        ("hart\t: 0\nuarch\t: sifive,u74-mc", "sifive,u74-mc"),
        ("", None),
    ],
)  # fmt: skip
def test_processors_of_different_kinds_have_different_names(cpuinfo, name):
    assert provenance.cpu_model(cpuinfo) == name
