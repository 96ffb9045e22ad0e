"""run.json's evidence of data, machine and state, against slow and obvious implementations."""

import stat
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.data import open_shards
from jspeed.run.evidence import provenance
from jspeed.run.evidence.data import TokenRange, overlap, trained_on
from jspeed.run.evidence.probes import callbacks
from jspeed.run.evidence.provenance import checksum


def shard(path: Path, tokens: np.ndarray) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return path


@pytest.mark.parametrize("chunk", [1 << 22, 50])
def test_overlap_is_the_share_of_blocks_found_by_looking_everywhere(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("jspeed.run.evidence.data.CHUNK", chunk)
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
    assert callbacks(jax.make_jaxpr(hidden)(1.0).jaxpr) == ["pure_callback"]
    assert callbacks(jax.make_jaxpr(jnp.sin)(1.0).jaxpr) == []


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
    assert (
        facts["driver"] == "570.124.06"
        and facts["cuda"] == "12.8"
        and facts["links"] == ["NV18", "PIX", "SYS"]
    )
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


def test_only_changes_of_tracked_files_make_a_commit_dirty(tmp_path):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True
        )

    (tmp_path / "code.py").write_text("1")
    git("init", "-q")
    git("add", "code.py")
    git("commit", "-qm", "first")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    assert provenance.git(tmp_path)["dirty"] is False
    (tmp_path / "code.py").write_text("2")
    assert provenance.git(tmp_path)["dirty"] is True
