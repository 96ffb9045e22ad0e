"""A whole run with broken fused attention: it equals a run that was asked for the next backend."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.errors import BadInput
from jspeed.kernels import attention_backends
from jspeed.kernels.preflight import checks
from jspeed.kernels.preflight.hooks import add
from jspeed.model.attention import attention
from jspeed.model.custom_kernels import Refused
from jspeed.run import setup
from jspeed.run.compute import device
from jspeed.run.hooks import NO_HOOKS
from jspeed.run.options import Options
from jspeed.run.train import train

from ...data.on_disk import shard_bytes
from ...refusals import refused
from ...toys import TOYS

HOOKS = add(NO_HOOKS)
SETS = (*TOYS["track3"], "STEPS=3", "EVAL_TOKENS=64", "LANES=2")


def plain(q, k, v, *, scale, offsets_BO, window):
    return attention(q, k, v, scale=scale)


def refuses(*_, **__):
    raise Refused("not here")


def a_percent_off(*arrays, **rest):
    out = plain(*arrays, **rest)
    return (1.01 * out.astype(jnp.float32)).astype(out.dtype)


BROKEN = {"raises": refuses, "1 % off": a_percent_off}


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Options of a short run on a CPU that should have cuDNN."""
    tokens = np.random.default_rng(0).integers(0, 272, 4000)
    (tmp_path / "data").mkdir()
    for name in ("t_train_000.bin", "t_val_000.bin"):
        (tmp_path / "data" / name).write_bytes(shard_bytes(tokens))
    monkeypatch.setattr(checks, "LENGTH", 32)

    def here(mesh, asked, *_):
        rest = () if asked else ("xla",)
        return device.Device(
            "cpu", asked or "cudnn", "emulated", 512, fallbacks=rest, asked=device.Request(asked)
        )

    monkeypatch.setattr(setup, "device_of", here)

    monkeypatch.setattr(
        setup, "make_mesh", lambda: jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    )

    def build(name, **rest):
        given = dict(data=tmp_path / "data", run_dir=tmp_path / name, set_=SETS, sample=False)
        return Options("track3", progress=False, target_loss=9.0, **given | rest)

    return build


def result(options):
    train(options, HOOKS)
    return json.loads((options.run_dir / "run.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_a_run_goes_on_with_the_next_backend(broken, options, monkeypatch, capsys):
    monkeypatch.setattr(attention_backends, "cudnn", BROKEN[broken])
    fallen = result(options("fallen"))
    assert "attention by xla" in capsys.readouterr().out
    [why] = fallen["kernels"]["refused"]
    assert fallen["kernels"]["attention"] == "xla" and why.startswith("attention cudnn: ")
    assert [line["name"] for line in fallen["ledger"]].count("preflight") == 1
    assert not any(line["timed"] for line in fallen["ledger"] if line["name"] == "preflight")
    asked = result(options("asked", attention="xla"))
    assert asked["kernels"]["refused"] == [] and asked["val_loss"] == fallen["val_loss"]
    assert [point["val_loss"] for point in asked["curve"]] == [
        point["val_loss"] for point in fallen["curve"]
    ]


def test_a_backend_that_was_asked_for_or_none_at_all_is_refused(options, monkeypatch):
    monkeypatch.setattr(attention_backends, "cudnn", refuses)
    with pytest.raises(BadInput, match="--attention cudnn: Refused: not here"):
        train(options("asked", attention="cudnn"), HOOKS)
    monkeypatch.setattr(checks, "attention", refuses)
    refused("no attention backend works on these devices", train, options("none"), HOOKS)
    assert not options("asked").run_dir.exists() and not options("none").run_dir.exists()


@pytest.mark.slow
def test_without_a_preflight_the_first_backend_is_taken(options, monkeypatch):
    monkeypatch.setattr(attention_backends, "cudnn", a_percent_off)
    found = result(options("unchecked", preflight=False))
    assert found["kernels"] == {
        "attention": "cudnn",
        "fp8": "emulated",
        "own": False,
        "checked": [],
        "refused": [],
        "why": found["kernels"]["why"],
        "calls": found["kernels"]["calls"],
    }
