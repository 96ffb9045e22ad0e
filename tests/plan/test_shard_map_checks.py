"""plan/shard_map_checks.py finds shard_map programs that run but diverge between devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jspeed.parallel.mesh import make_mesh
from jspeed.parallel.replicas import drift
from jspeed.plan.shard_map_checks import check_shard_map
from jspeed.run.compute import program
from jspeed.run.compute.device import Placement, device_of
from jspeed.run.find_recipe import find

from ..run.compute.steps import mesh_of, start
from ..toys import TOYS

RATE = 0.1


def loss(w, x):
    return jnp.mean(jax.nn.relu(x @ w) ** 2)


def right(w, x):
    return w - RATE * jax.lax.pmean(jax.grad(loss)(w, x), "data")


def gathered(w, x):
    """FSDP: the whole weight for use, and its gradient scattered."""
    grad = jax.grad(lambda part: loss(jax.lax.all_gather(part, "data", tiled=True), x))(w)
    return w - RATE * grad


def never_reduced(w, x):
    return w - RATE * jax.grad(loss)(w, x)


def clipped_by_its_own_norm(w, x):
    grad = jax.grad(loss)(w, x)
    norm = jnp.sqrt(jnp.sum(grad**2))  # of this device's rows alone
    return w - RATE * jax.lax.pmean(grad, "data") / norm


def in_a_loop(w, x):
    """The difference comes into the carry only in the second turn."""

    def turn(carry, _):
        w, other = carry
        return (w - other, jax.grad(loss)(w, x)), None

    return jax.lax.scan(turn, (w, jnp.zeros_like(w)), None, length=3)[0][0]


def part_of_a_weight(w, x):
    return w - RATE * jax.grad(loss)(w, x)


@pytest.mark.parametrize(
    ("update", "cut", "names"),
    [
        (right, P(), []),
        (gathered, P("data"), []),
        (never_reduced, P(), ["unreduced-result"]),
        (clipped_by_its_own_norm, P(), ["unreduced-result"]),
        (in_a_loop, P(), ["unreduced-result"]),
        (part_of_a_weight, P("data"), ["ungathered-weight"]),
    ],
)
def test_misuse_of_shard_map(update, cut, names):
    """Of a weight 64 x 8 a part of 8 x 8 fits rows of 8 as well as the whole would rows of 64."""
    mesh = make_mesh({"data": 8})
    x = jnp.ones((16, 8 if names == ["ungathered-weight"] else 64))
    step = jax.jit(
        partial(jax.shard_map, mesh=mesh, check_vma=False)(
            update, in_specs=(cut, P("data")), out_specs=cut
        )
    )
    found = check_shard_map(step.trace(jnp.ones((64, 8)), x).jaxpr)
    assert sorted({finding.name for finding in found}) == names
    assert {f.level for f in found} <= {"error"}
    if names:
        assert "test_shard_map_checks.py:" in found[0].text


LAYOUTS = [("zero1", {"data": 8}), ("fsdp", {"data": 8})]
MORE = [
    ("dp", {"data": 8}),
    ("tp", {"data": 4, "model": 2}),
    ("pp", {"data": 2, "pipe": 4}),
    ("fsdp+scan", {"data": 8}),
]


@pytest.mark.parametrize(
    ("layout", "axes"), LAYOUTS + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]
)
def test_steps_of_recipes_are_well(layout, axes, monkeypatch):
    monkeypatch.setattr("jspeed.parallel.layout.SMALL", 0)
    monkeypatch.setattr("jspeed.optim.muon.SMALL", 0)
    recipe, mesh = (
        find("track3", [*TOYS["track3"], "HEADS=4", "LAYERS=4", "LANES=16"]).recipe,
        mesh_of(**axes),
    )
    traced = program.trace_step(
        recipe, recipe.stages[0], Placement(mesh, layout, device_of(mesh)), 1
    )
    assert check_shard_map(traced.jaxpr) == []


def test_copies_that_drift_apart_are_found():
    """One copy of one leaf, 1e-3 off on one device."""
    recipe = find("llmc", TOYS["llmc"], trace=False).recipe
    params = start(recipe, mesh_of(8), "dp")["params"]
    assert drift(params) == {}
    gain = params["final_gain"]
    copies = [np.array(shard.data) for shard in gain.addressable_shards]
    copies[5][3] += 1e-3
    arrays = [
        jax.device_put(copy, shard.device)
        for copy, shard in zip(copies, gain.addressable_shards, strict=True)
    ]
    params["final_gain"] = jax.make_array_from_single_device_arrays(
        gain.shape, gain.sharding, arrays
    )
    ((path, far),) = drift(params).items()
    assert path == "final_gain" and far == pytest.approx(1e-3, rel=1e-3)
    with jax.set_mesh(mesh_of(8)):  # of more devices than have the copies that are compared
        assert drift(params) == {path: far}
