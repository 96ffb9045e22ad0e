"""Several processes with one table in their hosts' memory: each has a share of the rows."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed._dataloader import available_memory
from jspeed.host_table import in_run, shares
from jspeed.host_table import load as load_table
from jspeed.host_table.shares import Share
from jspeed.inference.commands.export import export
from jspeed.inference.generate import Generator, Sampling
from jspeed.inference.score import validate
from jspeed.inference.trained import load_model
from jspeed.parallel.mesh import lane_shards
from jspeed.parallel.sharded_table import requests
from jspeed.recipe import ParamSpec
from jspeed.run.compute import division, host_tables
from jspeed.run.export import load

from ..multi_process import ended, places, said, shards, start
from .test_in_run import BYTES, RECIPE, assert_close, assert_same, losses, run

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    shards(folder / "data")
    return folder


@pytest.fixture
def divided(monkeypatch):
    """One process divides a table between its devices as several would."""
    for module in (host_tables, shares, division):
        monkeypatch.setattr(module, "owners_of", lane_shards)


def start_two(folder, name, *more, script="speedrun.py"):
    given = ["--data", folder / "data", "--run-dir", folder / name, "--table", "host", *more]
    command = [RECIPE, *given, "--no-progress", "--no-sample", "--checkpoint-every", "20"]
    return [start(folder, place, *command, script=script) for place in places(2)]


def spec(rows, width=16):
    return ParamSpec((rows, width), ("row", "model"), None, "rows", dtype="bfloat16", sparse_rows=1)


@pytest.mark.parametrize(("owners", "devices", "rows"), [(4, 2, 4096), (3, 1, 7)])
def test_a_process_finds_what_devices_ask_its_own_for(owners, devices, rows):
    """The device's own program asks for the same rows in the same places."""
    rows_BI = np.random.default_rng(rows).integers(0, rows, (2 * owners, 24), np.int32)
    part = -(-rows // owners)
    of_lanes = jnp.asarray(rows_BI.reshape(owners, -1))
    asked, fits = jax.vmap(lambda ids: requests(ids, part, owners))(of_lanes)
    assert np.all(fits)
    for first in range(0, owners, devices):
        share = Share(owners, first, devices)
        found = share.asked(spec(rows), rows_BI).reshape(devices, owners, -1)
        for device in range(devices):
            expected = np.asarray(asked.received_ids[:, first + device])
            number = np.where(expected < part, expected + device * part, shares.LEFT_OUT)
            assert np.array_equal(found[device], number)


def test_rows_that_are_not_spread_are_one_sentence():
    crowd = np.arange(2000, dtype=np.int32).reshape(2, 1000)
    share = Share(2, 0, 1)
    # 500 of a lane's 1,000, and 8 times their root
    assert "name 1000 different rows of the 50000 that another one has, more than the 679" in said(
        lambda: share.asked(spec(100_000), crowd)
    )
    assert np.all(Share(2, 1, 1).asked(spec(100_000), crowd) == shares.LEFT_OUT)


def test_processes_of_a_machine_share_its_memory():
    """Half of a table that fits alone does not fit twice."""
    width = 2**16
    its = spec(2 * int(0.8 * available_memory() / (2 * width)), width)
    alone, two = (in_run.make("rows", its, Share(2, 0, 1), beside) for beside in (1, 2))
    assert alone.capacity == alone.num_rows > two.capacity >= 0.5 * two.num_rows


@pytest.fixture(scope="module")
def whole(folder):
    return run(folder, "whole", 2, table="host")


def test_devices_that_divide_a_table_train_as_one(folder, whole, divided):
    found = run(folder, "four", 4, table="host", accuracy=True, micro_batch=32)
    assert found[1]["micro_batch"] == 32  # of 64 tokens a device
    assert_close(found, whole)


def test_two_processes_train_as_one(folder, whole, divided):
    """With the bits of one process and two devices, whether or not they divide its table; also from
    each other's checkpoints."""
    one = run(folder, "one", 2, table="host", checkpoint_every=20)
    assert_same(one, whole)
    run(folder, "to two", 2, table="host", checkpoint_every=20, steps=24)
    for result in ended(start_two(folder, "to two", "--resume")):
        assert result[0] == 0, result
    results = ended(start_two(folder, "to one", script=HERE / "diverging.py"))
    assert [code for code, *_ in results] == [2, 2]
    assert results[0][2].startswith("error: process 1: the part of rows from row 2048 on: the grad")
    checkpoint = folder / "to one" / "checkpoints" / "20"
    assert [path.name for path in checkpoint.parent.iterdir()] == ["20"]
    config = folder / "to one" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer": BYTES}))
    model = load_model(checkpoint)
    rows = model.tensors()["rows"]
    half = len(rows) // 2
    assert np.any(rows[:half]) and np.any(rows[half:])
    assert validate(model, folder / "data").loss == pytest.approx(losses(one[0])[21], abs=1e-4)
    assert len(list(Generator(model, 1, Sampling(temperature=0))([[97]], 4))) == 4
    export(checkpoint, folder / "exported", table=True)
    files = {"rows.safetensors", "rows.1.safetensors"}
    for place, others in (checkpoint, set()), (folder / "exported", {"model.safetensors"}):
        assert {path.name for path in place.glob("*.safetensors")} == files | others
    found = load_model(folder / "exported").tensors()["rows"]
    assert found.tobytes() == rows.tobytes()
    assert "has 2048 of the 4096 rows of a table" in said(
        lambda: load_table(checkpoint / "rows.1.safetensors")
    )
    run(folder, "to one", 2, table="host", checkpoint_every=20, resume=True)
    for name in ("to two", "to one"):
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        assert losses(map(json.loads, lines)).tolist() == losses(one[0]).tolist()
        record = json.loads((folder / name / "run.json").read_text())
        assert all(probe["passed"] for probe in record["probes"].values())
        found = load(folder / name / "model.safetensors")[0]["rows"]
        assert found.tobytes() == one[2].tobytes()


def test_a_full_share_ends_all(folder):
    results = ended(start_two(folder, "full", script=HERE / "crowded.py"))
    assert [code for code, *_ in results] == [2, 2]
    said = results[0][2].splitlines()[-1]
    assert said.startswith("error: process 1: the part of rows from row 2048 on: the list has more")
