"""sharding.py says of a function of one's own what its devices do twice, exchange, hold in copies
and get wrong."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jspeed.parallel.mesh import make_mesh
from jspeed.sharding import check, picture

from .refusals import refused

BOTH = ("data", "model")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 4, "model": 2})


def product(x, w):
    return x @ w


LINE = f"test_sharding.py:{product.__code__.co_firstlineno + 1}"


def struct(mesh, shape, spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


# Factors worked out by hand: devices x a device's share of the rows x its share of the columns.
@pytest.mark.parametrize(
    ("x_spec", "w_spec", "factor", "exchanged", "names"),
    [
        (P("data"), P(None, "model"), 1.0, set(), set()),
        (
            P("model"),
            P(None, "model"),
            4.0,
            {("all-gather", ("data",), 8192)},
            {"axis-used-twice", "idle-axis"},
        ),
        (P("data"), P(), 2.0, set(), {"idle-axis"}),
        (P(), P(), 8.0, set(), {"idle-axis"}),
        (P(BOTH), P(), 1.0, set(), set()),
        (P("data"), P("data", "model"), 1.0, {("all-gather", ("data",), 4096)}, {"fsdp"}),
        (P("data", None, "model"), P("model"), 1.0, {("all-reduce", ("model",), 8192)}, set()),
    ],
)
def test_work_that_devices_repeat(mesh, x_spec, w_spec, factor, exchanged, names):
    found = check(
        product, struct(mesh, (16, 8, 32), x_spec), struct(mesh, (32, 64), w_spec), data="x"
    )
    assert found.factor == pytest.approx(factor, abs=0.05) and found.devices == 8
    [row] = found.matmuls
    assert row["redundancy"] == pytest.approx(factor, abs=0.05)
    assert row["source"].endswith("/" + LINE)
    moved = {(one.kind, one.along, one.bytes) for one in found.collectives}
    assert {one for one in moved if one[0] != "collective-permute"} == exchanged
    assert {one.name for one in found.findings} == names | set(
        ["redundant-matmul"] * (factor > 1.5)
    )
    assert (
        f"8 devices, data=4, model=2: matmuls take {factor:.2f} times the FLOPs they need"
        in str(found)
    )


def loss(params, x, y):
    hidden = jax.nn.relu(x @ params["up"])
    return jnp.mean((hidden @ params["down"] - y) ** 2)


def step(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.parametrize(
    ("up", "down", "rows", "kept", "kinds"),
    [
        (P(), P(), P(BOTH), 2 * 65_536, {"all-reduce"}),
        (P(BOTH), P(BOTH), P(BOTH), 2 * 8_192, {"all-gather", "all-to-all", "all-reduce"}),
        (P(None, "model"), P("model"), P("data"), 2 * 32_768, {"all-reduce"}),
    ],
    ids=["dp", "fsdp", "tp"],
)
def test_a_training_step(mesh, up, down, rows, kept, kinds):
    params = {"up": struct(mesh, (64, 256), up), "down": struct(mesh, (256, 64), down)}
    x = struct(mesh, (64, 64), rows)
    found = check(jax.jit(step, donate_argnums=0), params, x, x, data=("x", "y"))
    assert found.factor == pytest.approx(1, abs=0.05)
    assert [one.name for one in found.arguments] == ["params/down", "params/up", "x", "y"]
    assert sum(one.bytes for one in found.arguments[:2]) == kept
    assert {one.kind for one in found.collectives} <= kinds
    assert "all-reduce" in {one.kind for one in found.collectives}
    moved = {
        one.along: one.bytes * one.runs for one in found.collectives if one.kind == "all-reduce"
    }
    if "all-gather" in kinds:  # of whole parameters; XLA for CPUs sums whole gradients, too
        assert {one.bytes for one in found.collectives if one.kind == "all-gather"} >= {65_536}
        assert {one.name for one in found.findings} == {"fsdp"}
    # of activations, 16 rows x 64, and of the parts of gradients; 4 bytes more for the loss
    elif up:
        assert moved == {("model",): 4_096, ("data",): 65_540} and not found.findings
    else:
        assert moved == {BOTH: 131_076} and not found.findings
        assert [one.fewer for one in found.replicated] == [P(BOTH), P("model", "data")]


def manual(mesh, reduce, cut=None, along=("data",)):
    """One step of gradient descent as each device runs it."""

    def update(w, x):
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * (jax.lax.pmean(grad, along) if reduce else grad)

    return jax.shard_map(
        update, mesh=mesh, in_specs=(P(cut), P(along)), out_specs=P(cut), check_vma=False
    )


@pytest.mark.parametrize(
    ("function", "rows", "factor", "names"),
    [
        (partial(manual, reduce=True, along=BOTH), 64, 1, set()),
        (partial(manual, reduce=True), 64, 2, {"redundant-matmul", "idle-axis"}),
        (partial(manual, reduce=False, along=BOTH), 64, 1, {"unreduced-result"}),
        (partial(manual, reduce=False, along=BOTH, cut=BOTH), 8, 1, {"ungathered-weight"}),
    ],
)
def test_shard_map(mesh, function, rows, factor, names):
    """A matmul is needed once for each part of it, and what JAX is told not to check is checked."""
    function = function(mesh)
    x = struct(mesh, (16, rows), P(BOTH if factor == 1 else "data"))
    w = struct(mesh, (64, 8), P(BOTH if rows == 8 else None))
    found = check(function, w, x, data="x")
    assert found.factor == pytest.approx(factor, abs=0.05)
    assert {one.name for one in found.findings} == names


def test_explicit_axes_are_in_the_types():
    explicit = jax.make_mesh((4, 2), BOTH, axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        x = jax.device_put(jnp.ones((16, 8, 32)), NamedSharding(explicit, P("data")))
        w = jax.device_put(jnp.ones((32, 64)), NamedSharding(explicit, P(None, "model")))
        found = check(product, x, w)
        with pytest.raises(Exception, match="illegally sharded"):
            check(product, jax.device_put(x, NamedSharding(explicit, P("model"))), w)
    types = [one.type for one in (*found.arguments, *found.results)]
    assert types == ["float32[16@data,8,32]", "float32[32,64@model]", "float32[16@data,8,64@model]"]
    assert found.factor == 1 and not found.findings


def test_copies_that_differ(mesh):
    sharding = NamedSharding(mesh, P(None, "model"))
    parts = [
        jnp.full((32, 32), 1 + 1e-3 * (device.id == 3), device=device)
        for device in mesh.devices.flat
    ]
    w = jax.make_array_from_single_device_arrays((32, 64), sharding, parts)
    [found] = check(product, struct(mesh, (16, 8, 32), P("data")), w).findings
    assert found.name == "copies-differ" and found.value == pytest.approx(1e-3, rel=1e-3)
    assert found.text == "arguments[1]: copies that should be equal differ by 0.001"


def test_what_is_left_out_of_a_program(mesh):
    """Arguments that it does not read, static ones, results that are none, a convolution's
    FLOPs."""

    def convolved(x, unused, times, kernel, w):
        rows = jax.lax.conv(x, kernel, (1, 1), "SAME").reshape(8, -1)
        return (rows @ w) * times, None

    x, kernel = struct(mesh, (8, 3, 8, 8), P(BOTH)), struct(mesh, (4, 3, 3, 3), P())
    w = struct(mesh, (256, 8), P())
    found = check(jax.jit(convolved, static_argnums=2), x, {"a": None, "b": w}, 2, kernel, w)
    assert found.factor == 1 and len(found.results) == 1
    assert [one.name for one in found.arguments] == [
        "argument 0",
        "argument 1/b",
        "argument 2",
        "argument 3",
    ]
    assert [one.sharding is None for one in found.arguments] == [False, True, False, False]
    assert "not used" in str(found)
    alone = check(lambda x: x + 1, 1.0)
    assert alone.factor is None and str(alone).startswith("1 device: no matmuls\n")
    assert not alone.collectives


def test_what_cannot_be_meant(mesh):
    refused("no parameter 'z'", check, product, np.ones((8, 8)), np.ones((8, 8)), data=("x", "z"))
    refused("this ndarray has no sharding", picture, np.ones(3))
    refused("ShapeDtypeStruct has no sharding", picture, jax.ShapeDtypeStruct((3,), jnp.float32))


def test_picture(mesh):
    assert picture(struct(mesh, (16, 8, 32), P("data", None, "model"))).splitlines()[:4] == [
        "float32[16,8,32] in tiles of 4x8x16 on devices",
        "┌───┬───┐",
        "│ 0 │ 1 │",
        "├───┼───┤",
    ]
    assert "│ 0,1,2,3,4,5,6,7 │" in picture(struct(mesh, (), P()))


PRINTED = f"""\
8 devices, data=4, model=2: matmuls take 1.00 times the FLOPs they need
matmuls
line runs on a device FLOPs of all times those needed
{LINE} 1 1x32x16x64 524,288 1.00
A line's forward and backward matmuls together; of the largest: batch x rows x contracted x columns.

collectives
kind along bytes a device runs line
all-reduce model 8,192 1 {LINE}
XLA for CPUs writes a reduce-scatter as an all-reduce, or an all-to-all, and a slice.

arrays
name type sharding on a device bytes copies with fewer copies
x float32[16,8,32] {P("data", None, "model")} 4x8x16 2,048 1
w float32[32,64] {P("model")} 16x64 4,096 4 {P("model", "data")}
result float32[16,8,64] {P("data")} 4x8x64 8,192 2 {P("data", None, "model")}"""


def test_printed_whole(mesh):
    x, w = struct(mesh, (16, 8, 32), P("data", None, "model")), struct(mesh, (32, 64), P("model"))
    lines = [" ".join(line.split()) for line in str(check(product, x, w)).splitlines()]
    assert lines == PRINTED.splitlines()


def test_what_the_documentation_shows(capsys):
    page = (Path(__file__).parents[1] / "docs" / "reference" / "sharding.md").read_text()
    code, _, rest = page.partition("```python\n")[2].partition("```\n")
    there = 'jax.config.update("jax_num_cpu_devices", 8)\n'
    assert there in code
    exec(compile(code.replace(there, "\n"), "mine.py", "exec"), {})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = [
        line[4:]
        for line in rest.partition("prints\n")[2].partition("\nand between")[0].splitlines()
    ]
    assert {line for line in shown if line not in ("", "...")} <= set(printed)
