"""Attacks run on one device, which then sees several rows at once; they share an honest run."""

import jax
import pytest

from jspeed.parallel.mesh import make_mesh
from jspeed.run import setup

from ..multi_process import shards
from .attack import attack


@pytest.fixture(autouse=True, scope="package")
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_mesh", lambda: make_mesh({"data": 1}, jax.devices()[:1]))
        yield


@pytest.fixture(scope="package")
def data(tmp_path_factory):
    return shards(tmp_path_factory.mktemp("attacks") / "shards")


@pytest.fixture(scope="package")
def honest(one_device, data, tmp_path_factory):
    return attack(tmp_path_factory.mktemp("honest"), data, {})
