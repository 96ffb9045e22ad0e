"""``jspeed doctor`` reports measured facts and never fails on a finding."""

import dataclasses
import importlib.util
import json
import os
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from jspeed.base.accelerators import Accelerators
from jspeed.corpus import tokenise
from jspeed.doctor import command as doctor
from jspeed.run.options import Options
from jspeed.run.train import train

from ..multi_process import TOY, shards

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with a data set, one interrupted, one broken, and a compiled program."""
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "text.txt").write_text("round and round " * 300)
    tokenise.prepare_text(
        (tmp_path / "text.txt",), tmp_path / "data" / "mine", tokenise.Tokenising("bytes")
    )
    for name, manifest in {"begun": None, "broken": "{"}.items():
        (tmp_path / "data" / name).mkdir()
        if manifest:
            (tmp_path / "data" / name / "manifest.json").write_text(manifest)
    (tmp_path / "xla").mkdir()
    (tmp_path / "xla" / "jit_step-cache").write_bytes(b"0" * 1234)
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "1.saved").write_bytes(b"0" * 777)
    return tmp_path


def test_what_is_there(cache, capsys):
    doctor.doctor(json_=True)
    found = json.loads(capsys.readouterr().out)
    assert found["devices"]["platform"] == "cpu" and found["devices"]["count"] == 8
    assert found["problem"] is None
    chosen = found["choices"]
    assert list(chosen) == ["attention", "FP8", "custom kernels", "micro-batch"]
    assert chosen["attention"]["why"] == "the only backend on a CPU"
    assert chosen["FP8"]["value"] == "emulated"
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert 0 < found["machine"]["available_memory"] < found["machine"]["memory"]
    assert found["cache"]["programs"] == 1234 and found["cache"]["saved"] == 777
    assert found["cache"]["folder"] == str(cache)
    assert found["cache"]["data"] == sum(
        path.stat().st_size for path in (cache / "data").rglob("*") if path.is_file()
    )
    begun, broken, mine = found["data"]
    assert "run jspeed prepare again to resume" in begun["problem"]
    assert "manifest.json" in broken["problem"]
    assert (mine["name"], mine["tokenizer"], mine["problem"]) == ("mine", "bytes", None)
    assert sum(mine["tokens"].values()) == 16 * 300 + 2  # a BOS before each of the two parts
    assert found["extras"]["parquet"]["installed"] == (
        importlib.util.find_spec("pyarrow") is not None
    )
    assert found["launcher"] == {"processes": 1, "process_id": 0, "problem": None}
    assert (
        found["shared_memory"] == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    )
    assert found["packages"]["jax"] == __import__("jax").__version__


def test_one_screen(cache, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    doctor.doctor()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    labels = [line[: doctor.LABEL].strip() for line in lines if line[0] != " "]
    assert labels == [
        *"jspeed repository Python packages machine devices attention FP8".split(),
        *("custom kernels", "micro-batch", "cache", "data", "extras", "launcher"),
    ]
    assert any("mine: train " in line and line.endswith("tokens of bytes") for line in lines)


def test_devices_that_cannot_be_started_are_said(cache, capsys, monkeypatch):
    def fails():
        raise RuntimeError("Unable to initialize backend 'cuda': no device\nmore")

    monkeypatch.setattr("jspeed.record.provenance.devices", fails)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    doctor.doctor()
    shown = " ".join(capsys.readouterr().out.split())
    assert "devices Unable to initialize backend 'cuda': no device cache" in shown
    assert "launcher RANK" in shown


def test_extras_are_the_package_s():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(doctor.EXTRAS) == set(project) - {"dev", "cuda13"}


def test_a_launched_process_says_which_it_is():
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"} | {
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert doctor.launcher(environment) == {"processes": 2, "process_id": 1, "problem": None}


def test_a_file_that_vanishes_meanwhile_counts_nothing(tmp_path, monkeypatch):
    """A training that runs replaces files of the cache."""
    (tmp_path / "kept").write_bytes(b"1234")
    (tmp_path / "gone").symlink_to(tmp_path / "kept")
    stat = Path.stat

    def vanishes(path, **how):
        if path.name == "gone":
            raise FileNotFoundError(path)
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", vanishes)
    assert doctor.folder_size(tmp_path) == 4


@pytest.fixture
def eight_gpus(monkeypatch):
    """Eight GPUs beside a JAX for the CPU that was not told to use it."""
    monkeypatch.setattr("jspeed.base.accelerators.find", lambda: Accelerators(8, "580.95.05"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", "cpu")


def test_gpus_that_jax_does_not_use_are_said_with_the_remedy(cache, eight_gpus, capsys):
    doctor.doctor()
    shown = " ".join(capsys.readouterr().out.split())
    assert "8 NVIDIA GPUs, driver 580.95.05, and JAX uses the CPU" in shown
    assert (
        f"pip install 'jax[cuda1{3 if sys.version_info >= (3, 12) else 2}]=={jax.__version__}'"
        in shown
    )


def test_a_run_that_leaves_gpus_idle_says_so(eight_gpus, tmp_path, capsys):
    options = Options(
        "stdlib", data=shards(tmp_path / "shards"), run_dir=tmp_path / "run", set_=(*TOY, "STEPS=2")
    )
    train(dataclasses.replace(options, steps=1, progress=False))
    assert "note: 8 NVIDIA GPUs, driver 580.95.05, and JAX uses the CPU" in capsys.readouterr().out


def test_a_cpu_that_was_asked_for_is_no_problem(cache, eight_gpus, capsys):
    jax.config.update("jax_platforms", "cpu")
    doctor.doctor()
    shown = capsys.readouterr().out
    assert "JAX uses the CPU" not in shown and "(JAX_PLATFORMS=cpu)" in shown


@pytest.mark.parametrize(
    ("platform", "count", "shared", "said"),
    [
        ("gpu", 8, 2**26, True),
        ("gpu", 8, 2**30, False),
        ("gpu", 1, 2**26, False),
        ("cpu", 8, 2**26, False),
    ]
    + [("gpu", 8, None, False)],
)
def test_the_shared_memory_of_a_container_is_named(platform, count, shared, said):
    found = doctor.shared_memory_problem({"platform": platform, "count": count}, shared)
    assert bool(found) == said
    assert not said or (found.startswith("/dev/shm has 67.1 MB") and "--shm-size=1g" in found), (
        found
    )
