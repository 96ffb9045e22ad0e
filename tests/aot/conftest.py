"""AOT compilation for absent GPUs. Skipped without JAX's CUDA plugin, except under ``make
test-aot``."""

import os
from collections.abc import Callable, Iterator

import pytest
from jax.sharding import Mesh

from jspeed.plan.target import Target, load_target, missing, pretend, target_mesh


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    if reason := missing():
        if "JSPEED_TEST_AOT" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def h100(plugin: None) -> Iterator[Target]:
    """The H100, with JAX's questions about the live backend answered for it."""
    target = load_target("h100")
    with pretend(target):
        yield target


@pytest.fixture(scope="session")
def mesh(h100: Target) -> Callable[[int], Mesh]:
    """``mesh(devices)``: that many H100s on one ``data`` axis; each built once, in a second."""
    meshes: dict[int, Mesh] = {}

    def build(devices: int) -> Mesh:
        if devices not in meshes:
            meshes[devices] = target_mesh(h100, devices)
        return meshes[devices]

    return build
