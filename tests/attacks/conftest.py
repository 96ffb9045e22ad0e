"""Attacks run on one device, which then sees several rows at once; they share an honest run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

from jspeed.parallel.mesh import make_mesh
from jspeed.run import setup

from ..multi_process import shards
from .attack import attack


@contextmanager
def on_one_device() -> Iterator[None]:
    """Let runs see the first device alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_mesh", lambda: make_mesh({"data": 1}, jax.devices()[:1]))
        yield


@pytest.fixture(autouse=True)
def one_device():
    with on_one_device():
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return shards(tmp_path_factory.mktemp("attacks") / "shards")


@pytest.fixture(scope="session")
def honest_folder(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("honest")
    with on_one_device(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("JSPEED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        attack(folder, data, {})
    return folder / "run"


@pytest.fixture(scope="session")
def honest(honest_folder):
    return json.loads((honest_folder / "run.json").read_text())
