"""Runs whose table lies in the host's memory are those whose table lies on the devices."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jspeed.cli import satellites
from jspeed.errors import BadInput
from jspeed.host_table import in_run
from jspeed.inference import trained
from jspeed.inference.commands.export import export
from jspeed.inference.trained import load_model
from jspeed.parallel.mesh import make_mesh
from jspeed.run import setup
from jspeed.run.export import load
from jspeed.run.options import Options
from jspeed.run.train import train

from ..multi_process import shards

RECIPE = Path(__file__).parent / "bigrams.py"
BYTES = {"tokenizer": "bytes", "vocab_size": 257, "bos_id": 256, "mark": "before"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    shards(folder / "data")
    return folder


def run(folder, name, devices=1, recipe=RECIPE, **options):
    """Return the lines of metrics.jsonl of a run on so many devices, its record, and its table."""
    mesh = make_mesh({"data": devices}, jax.devices()[:devices])
    given = {"data": folder / "data", "run_dir": folder / name, "progress": False, "sample": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_mesh", lambda: mesh)
        train(Options(str(recipe), **given | options), satellites.hooks())
    text = (folder / name / "metrics.jsonl").read_text()
    lines = [json.loads(each) for each in text.splitlines()]
    record = json.loads((folder / name / "run.json").read_text())
    return lines, record, load(folder / name / "model.safetensors")[0]["rows"]


@pytest.fixture(scope="module")
def on_device(folder):
    return run(folder, "on device")


def losses(lines):
    return np.array([line.get("train_loss", line.get("val_loss")) for line in lines])


def assert_close(found, expected):
    (lines, record, table), (its, other, its_table) = found, expected
    np.testing.assert_allclose(losses(lines), losses(its), atol=2e-3)
    np.testing.assert_allclose(table, its_table, atol=0.02)
    assert record["val_loss"] == pytest.approx(other["val_loss"], abs=2e-3)
    assert record["parameters"] == other["parameters"]
    assert all(probe["passed"] for probe in record["probes"].values())


def assert_same(found, expected):
    """To the bit: losses, also of the validation, and every number of the table."""
    assert losses(found[0]).tolist() == losses(expected[0]).tolist()
    assert found[1]["val_loss"] == expected[1]["val_loss"]
    assert found[2].tobytes() == expected[2].tobytes()


def test_a_table_on_the_host_has_the_bits_of_one_on_the_device(folder, on_device):
    """A device rounds the sum of a step's equal rows to bf16, and so does the host."""
    assert_same(run(folder, "bits", table="host"), on_device)
    two = run(folder, "two on device", 2, table="device", steps=12)
    assert_same(run(folder, "two on host", 2, table="host", steps=12), two)


@pytest.mark.parametrize(
    ("devices", "micro_batch"),
    [(4, None), *(pytest.param(n, 64, marks=pytest.mark.slow) for n in (1, 2))],
)
def test_a_table_on_the_host_trains_as_one_on_the_device(folder, on_device, devices, micro_batch):
    name = f"{devices} {micro_batch}"
    found = run(folder, name, devices, table="host", micro_batch=micro_batch, accuracy=True)
    assert_close(found, on_device)
    # it has learned something that a table of zeros has not
    assert np.sum(np.any(found[2] != 0, axis=1)) > 50 and losses(found[0])[-1] < 3


@pytest.fixture(scope="module")
def of_documents(tmp_path_factory):
    """A folder of text in which a document begins every 12 tokens, and the recipe with lanes of
    them, which may be cut."""
    folder = tmp_path_factory.mktemp("documents")
    for path in shards(folder / "data").glob("*.bin"):
        content = np.fromfile(path, "<u2")
        content[512::12] = 256
        content.tofile(path)
    edits = {
        "LANE_LEN = 32": "LANE_LEN = 128",
        "bos_id=256": 'bos_id=256, align="bos"',
        "LANE_LEN, every=2)": "LANE_LEN, 12, 129, every=2)",
        "Stage(STEPS[1], LANE_LEN)": "Stage(STEPS[1], LANE_LEN, 12, 129)",
    }
    (folder / "bigrams.py").write_text(edited(edits))
    return folder


def edited(edits):
    """Return the recipe's text with these edits."""
    source = RECIPE.read_text()
    for before, after in edits.items():
        assert before in source
        source = source.replace(before, after)
    return source


def test_pieces_of_lanes_train_as_lanes(of_documents):
    """Each piece is given the rows of its own tokens, those of its margins too."""
    its = {"recipe": of_documents / "bigrams.py", "steps": 20}
    whole = run(of_documents, "whole", table="host", **its)
    pieces = run(of_documents, "pieces", table="host", micro_batch=64, **its)
    assert pieces[1]["micro_batch"] == 64 < 128 <= whole[1]["micro_batch"]
    assert_close(pieces, whole)
    assert_close(run(of_documents, "two", 2, table="host", micro_batch=64, **its), whole)


def test_each_table_has_updates_of_its_own(folder, tmp_path):
    """Of two tables, one is updated in every second step, and the other's gradients stay."""
    few = """    "few": ParamSpec(
        (64, WIDTH), ("row", "model"), zeros, "rows", dtype=COMPUTE, every=2, sparse_rows=1
    ),
"""
    adam = """    few = row_adam(falling, betas, eps=1e-8, weight_decay=lambda update: 2.0)
    return {"few": few, "rows": row_adam("""
    edits = {
        '    "zero": ParamSpec': few + '    "zero": ParamSpec',
        "    return found_BTD": '    found_BTD += ctx.fetch(params["few"], tokens_BT % 64)\n'
        "    return found_BTD",
        '    return {"rows": row_adam(': adam,
        'named_rows={"rows"': 'named_rows={"few": lambda tokens_BT: tokens_BT % 64, "rows"',
    }
    recipe = tmp_path / "bigrams.py"
    recipe.write_text(edited(edits))
    on_device = run(folder, "few on device", recipe=recipe, steps=24)
    assert_same(run(folder, "few on host", recipe=recipe, steps=24, table="host"), on_device)


def test_a_step_waits_only_for_rows_that_it_names(folder, monkeypatch):
    """An update begins without those of its last step, whose others end beside the next one."""
    calls = []

    class Watched:
        def __init__(self, table):
            self._table = table

        def __getattr__(self, name):
            return getattr(self._table, name)

        def update(self, number, rows, gradients, **rates):
            calls.append((number, np.array(rows), sum(map(len, gradients))))
            self._table.update(number, rows, gradients, **rates)

    make = in_run.make
    monkeypatch.setattr(in_run, "make", lambda *given: Watched(make(*given)))
    run(folder, "watched", table="host", steps=12)
    # warm-up apart: two updates of two steps, and two of four, of 256 look-ups each
    updates = [[rows for at, rows, _ in calls[-11:] if at == number] for number in range(4)]
    assert [len(update) for update in updates] == [3, 3, 3, 2]  # none follows the last one
    assert all(count == len(rows) for _, rows, count in calls)
    whole = [
        np.max([np.append(rows, [-1] * (len(update[-1]) - len(rows))) for rows in update], 0)
        for update in updates
    ]
    for update, rows, after in zip(updates, whole, [*whole[1:], None], strict=True):
        last, named = rows[-256:], after[:256] if after is not None else ()
        assert min(rows) >= 0 and not set(update[0]) & set(last)
        assert sum(np.sum(part >= 0) for part in update) == len(rows)  # each in one of the calls
        if after is not None:
            assert set(update[1]) - {-1} == set(last) & set(named)
            assert not set(update[2]) & set(named)


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(folder):
    whole = run(folder, "whole", table="host", checkpoint_every=20)
    run(folder, "parts", table="host", checkpoint_every=20, steps=24)
    parts = run(folder, "parts", table="host", checkpoint_every=20, resume=True)
    assert losses(whole[0]).tolist() == losses(parts[0]).tolist()
    assert whole[2].tobytes() == parts[2].tobytes()


@pytest.mark.slow
def test_a_run_goes_on_on_two_devices(folder):
    whole = run(folder, "one", table="host")
    run(folder, "two", table="host", checkpoint_every=20, steps=24)
    assert_close(run(folder, "two", 2, table="host", resume=True), whole)


@pytest.mark.parametrize(
    ("first", "then"),
    [("host", "device"), pytest.param("device", "host", marks=pytest.mark.slow)],
)
def test_a_checkpoint_of_the_other_place_is_refused(folder, first, then):
    run(folder, first, table=first, checkpoint_every=20, steps=20)
    with pytest.raises(BadInput, match=f"with table {first} but this run has table {then}"):
        run(folder, first, table=then, resume=True)


def test_a_damaged_table_is_no_checkpoint(folder):
    run(folder, "damaged", table="host", checkpoint_every=20, steps=40)
    path = folder / "damaged" / "checkpoints" / "40" / "rows.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    lines, record, _ = run(folder, "damaged", table="host", resume=True)
    assert record["resumed"] == [20] and len(lines) > 60


def test_a_checkpoint_is_a_model_and_is_exported(folder, tmp_path, monkeypatch):
    """With its table, which an export leaves out unless it is asked for."""
    *_, table = run(folder, "model", table="host", checkpoint_every=20, steps=20)
    checkpoint = folder / "model" / "checkpoints" / "20"
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer": BYTES}))
    assert load_model(checkpoint).tensors()["rows"].astype(np.float32).tobytes() == table.tobytes()
    export(checkpoint, tmp_path / "with", table=True)
    found = load_model(tmp_path / "with").tensors()
    assert found["rows"].astype(np.float32).tobytes() == table.tobytes() and len(found) == 3
    export(checkpoint, tmp_path / "without")
    assert {file.name for file in (tmp_path / "without").iterdir()} == {
        "config.json",
        "model.safetensors",
        "recipe.py",
    }
    with pytest.raises(BadInput, match="lacks rows, too large for it"):
        load_model(tmp_path / "without")
    with pytest.raises(BadInput, match="has no table .*; leave --table out"):
        export(folder / "model", tmp_path / "whole", table=True)
    monkeypatch.setattr(trained, "available_memory", lambda: 1000)
    with pytest.raises(BadInput, match="its tables of 0.0 GB need 0.0 GB of this machine"):
        load_model(checkpoint)


def test_a_table_that_does_not_fit_the_device_is_the_hosts(folder, on_device, monkeypatch, capsys):
    usual = setup.check_state_fits

    def check(recipe, *rest):
        if not recipe.on_host:
            raise BadInput("the table does not fit")
        usual(recipe, *rest)

    monkeypatch.setattr(setup, "check_state_fits", check)
    found = run(folder, "automatic")
    assert_close(found, on_device)
    assert "this machine's memory" in capsys.readouterr().out
    with pytest.raises(BadInput, match="the table does not fit"):
        run(folder, "asked", table="device")
    monkeypatch.setattr(
        satellites, "hooks", lambda: replace(setup.NO_HOOKS, second_range=lambda recipe: None)
    )
    with pytest.raises(BadInput, match="does not fit; nor do .*host_table, which is not installed"):
        run(folder, "without")


def test_what_cannot_be_on_the_host_is_one_sentence(folder, tmp_path):
    source = RECIPE.read_text()
    for edit, said in [
        (('    named_rows={"rows": rows_of},\n', ""), "does not say which rows of rows it reads"),
        (('COMPUTE = "bfloat16"', 'COMPUTE = "float32"'), "rows is of float32"),
    ]:
        mine = tmp_path / "mine.py"
        mine.write_text(source.replace(*edit))
        with pytest.raises(BadInput, match=said):
            run(folder, "refused", recipe=mine, table="host")
    for options, said in [
        ({"recipe": "stdlib"}, "has no table that is updated row by row"),
        ({"init_from": folder}, "the rows start at zero"),
        ({"table": "hots"}, "expected device or host .did you mean 'host'"),
    ]:
        with pytest.raises(BadInput, match=said):
            run(folder, "refused", **{"table": "host"} | options)
    assert not (folder / "refused").exists()
