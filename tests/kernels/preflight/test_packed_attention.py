"""A whole run whose attention is told the longest document: the preflight, training, evaluation,
evidence."""

import json

import jax
import numpy as np
import pytest

from jspeed.kernels import packed_cudnn
from jspeed.kernels.preflight import checks
from jspeed.kernels.preflight.hooks import add
from jspeed.run import evaluate, setup
from jspeed.run.compute import device
from jspeed.run.find_recipe import find
from jspeed.run.hooks import NO_HOOKS
from jspeed.run.options import Options
from jspeed.run.train import train

from ...data.on_disk import shard_bytes
from ...kernels import fake_cudnn
from ...toys import TOYS

BOS, LONGEST = 5, 40  # validation documents are not cut at MAX_DOC_LEN
SETS = (
    *TOYS["r29"],
    *"STEPS=3 LANES=2 LANE_LEN=128 MAX_DOCS=80 EVAL_LEN=128 EVAL_TOKENS=256".split(),
)


@pytest.fixture
def folder(tmp_path):
    draw = np.random.default_rng(0)
    for name in ("t_train_000.bin", "t_val_000.bin"):
        tokens = draw.integers(6, 272, 4000)
        tokens[np.cumsum([0, *draw.integers(2, LONGEST + 1, 190)]).clip(max=3999)] = BOS
        (tmp_path / name).write_bytes(shard_bytes(tokens))
    return tmp_path


@pytest.mark.slow
def test_a_run_in_rows_is_the_run_of_plain_attention(folder, tmp_path, monkeypatch, capsys):
    """cuDNN's place is taken by its fake. The causality probe changes documents, and passes."""
    rows = []

    def row_length(tokens, longest):
        rows.append((tokens, longest))
        return whole(tokens, longest)

    whole = packed_cudnn.row_length
    fake_cudnn.put_in_place(monkeypatch)
    monkeypatch.setattr(packed_cudnn, "row_length", row_length)
    monkeypatch.setattr(checks, "LENGTH", 104)
    monkeypatch.setattr(checks, "WINDOW", 30)
    # so few keys round dk by up to 0.91 % (the CPU compiler of JAX 0.12)
    compare = checks.first_mismatch
    monkeypatch.setattr(checks, "first_mismatch", lambda *given: compare(*given[:3], 0.012))
    monkeypatch.setattr(
        setup, "make_mesh", lambda: jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    )

    def here(mesh, asked, *_):
        return device.Device(
            "cpu",
            asked or "cudnn",
            "emulated",
            512,
            fallbacks=("xla",),
            asked=device.Request(asked),
        )

    monkeypatch.setattr(setup, "device_of", here)

    def run(name, **rest):
        how = dict(data=folder, run_dir=tmp_path / name, set_=SETS, sample=False, progress=False)
        train(Options("r29", target_loss=9.0, **how | rest), add(NO_HOOKS))
        return json.loads((tmp_path / name / "run.json").read_text())

    found, expected = run("rows"), run("lanes", attention="xla")
    assert found["kernels"]["attention"] == "cudnn" and not found["kernels"]["refused"]
    kinds = [
        f"attention cudnn, packed{kind}, heads of 128" for kind in ("", ", a longest document")
    ]
    assert found["kernels"]["checked"] == kinds
    longest = evaluate.longest_document(
        evaluate.read_lanes(*of_validation(folder)), of_validation(folder)[1]
    )
    assert 16 < longest <= LONGEST and {(256, 16), (128, longest)} <= set(rows)
    assert all(probe["passed"] for probe in found["probes"].values())
    curves = [[point["val_loss"] for point in run["curve"]] for run in (found, expected)]
    np.testing.assert_allclose(*curves, rtol=1e-5)


def of_validation(folder):
    return setup.find_split(folder, "val"), find("r29", SETS).recipe


def test_the_longest_document_of_rows():
    """By counting; a row's first token begins a document, and its last one is only a target."""
    recipe = find("r29", [*TOYS["r29"], "EVAL_LEN=12"]).recipe
    rows = np.array(
        [[1, 1, 5, 1, 1, 1, 1, 5, 1, 1, 1, 1, 5], [5, 1, 1, 1, 1, 1, 1, 5, 5, 1, 1, 1, 1]]
    )
    assert evaluate.longest_document(rows, recipe) == 7
    assert evaluate.longest_document(rows[:1], recipe) == 5
    assert evaluate.longest_document(np.ones((3, 13), int), recipe) == 12
