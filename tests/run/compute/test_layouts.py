"""Every sharding layout gives the same losses and gradients; shapes per device; unsupported layouts
are refused."""

import functools
import io
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from jspeed.parallel import describe
from jspeed.parallel import layout as layouts
from jspeed.parallel.layout import lanes_only
from jspeed.parallel.mesh import batch_lanes
from jspeed.parallel.pipeline import bubble
from jspeed.recipe import ParamSpec
from jspeed.run.compute import program
from jspeed.run.compute.device import Placement, device_of
from jspeed.run.compute.division import place
from jspeed.run.console import layout_table, tile_table
from jspeed.run.find_recipe import find

from ...refusals import refused
from ...toys import TOYS
from .steps import batches, mesh_of, run, start

WAYS = {  # layout, mesh, lanes a device takes at once
    "dp": ("dp", {"data": 8}, 1),
    "zero1+remat": ("zero1+remat", {"data": 8}, 1),
    "fsdp": ("fsdp", {"data": 8}, 2),
    "fsdp, accumulated": ("fsdp", {"data": 4}, 1),
    "tp, accumulated": ("tp", {"data": 2, "model": 4}, 2),
    "fsdp+tp 4x2": ("fsdp+tp", {"data": 4, "model": 2}, 4),
    "fsdp+tp 1x8": ("fsdp+tp", {"data": 1, "model": 8}, 16),
    "pp, 4 micro-batches": ("pp", {"data": 2, "pipe": 4}, 2),
    "pp+remat": ("pp+remat", {"data": 4, "pipe": 2}, 1),
    "zero1+scan": ("zero1+scan", {"data": 8}, 1),
    "fsdp+scan": ("fsdp+scan", {"data": 8}, 2),
    "tp+scan": ("tp+scan", {"data": 4, "model": 2}, 4),
    "fsdp+tp+remat+scan": ("fsdp+tp+remat+scan", {"data": 4, "model": 2}, 4),
    "pp+remat+scan": ("pp+scan+remat", {"data": 4, "pipe": 2}, 1),
}
# each in one with more, or with another recipe
ELSEWHERE = ("fsdp", "pp+remat", "zero1+scan", "tp+scan")
SOME = ("fsdp+tp 4x2", "pp, 4 micro-batches")
CASES = [
    pytest.param("track3", way, marks=pytest.mark.slow) for way in WAYS if way not in ELSEWHERE
]
# norms of another kind; a head of which a sample is scored
CASES += [("microgpt-names", SOME[0])]
CASES += [pytest.param("fineweb-cpu", way, marks=pytest.mark.slow) for way in SOME]
# The only one with dropout, whose masks must be the same.
CASES += [
    pytest.param("nanogpt", way, marks=pytest.mark.slow) for way in ("tp+scan", "pp+remat+scan")
]


@pytest.fixture(autouse=True)
def cut_small_arrays_too(monkeypatch):
    monkeypatch.setattr(layouts, "SMALL", 0)


def toy(name, *sets):
    size = ["SIZES={'124M': (4, 4, 32)}"] if name == "gpt2" else ["HEADS=4", "LAYERS=4"]
    return find(name, [*TOYS[name], *size, "LANES=16", *sets]).recipe


@functools.cache
def on_one_device(name, *sets):
    recipe = toy(name, *sets)
    return run(recipe, mesh_of(1), None, batches(recipe, 10))[1]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_every_layout_gives_the_losses_of_one_device(name, way):
    layout, axes, lanes_at_once = WAYS[way]
    # A layer at least for every stage, a head at least for every device.
    sets = ["LAYERS=2"] * ("pipe" not in axes) + ["HEADS=8"] * (axes.get("model") == 8)
    recipe = toy(name, *sets)
    expected = on_one_device(name, *sets)
    _, found = run(recipe, mesh_of(**axes), lanes_at_once, batches(recipe, 10), layout)
    assert abs(expected[-1] - expected[0]) > 1e-3
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    "spec", [PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "model")]
)
def test_bf16_gradients_are_summed_where_xla_partitions_too(spec):
    """XLA for CPUs turns bf16 sums into fp32, and aborts the process where JAX left a constraint in
    the sum."""
    mesh, gradient = mesh_of(data=2, model=2), jnp.arange(16, dtype=jnp.bfloat16).reshape(4, 4)
    rows = lanes_only(spec)
    reduce = jax.shard_map(
        lambda x: layouts.reduce_gradient(mesh, x, spec),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=rows,
        axis_names={"data"},
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(reduce)(gradient), 2 * gradient)


def keep():
    """An optimizer that keeps the gradient and its norm, and no more; weights are drawn so that
    none of it is 0."""

    def drawn(params):
        draw = lambda p: 0.02 * jax.random.normal(jax.random.key(p.size), p.shape)
        return {"gradient": jax.tree.map(draw, params), "norm": jnp.zeros(())}

    def update(grads, state, params):
        to_drawn = jax.tree.map(lambda s, p: s - p, state["gradient"], params)
        return to_drawn, {"gradient": grads, "norm": optax.tree.norm(grads)}

    return optax.GradientTransformation(drawn, update)


def kept(layout, axes, lanes_at_once, *sets):
    """The loss of a step at weights that were drawn, and what :func:`keep` kept of it."""
    recipe = replace(toy("llmc", *sets), optimizer=keep)
    state, losses = run(recipe, mesh_of(**axes), lanes_at_once, batches(recipe, 2), layout)
    return losses[1], jax.device_get(state["optimizer"])


@functools.cache
def kept_on_one_device(*sets):
    return kept("dp", {"data": 1}, 16, *sets)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp+tp 4x2", "dp", "fsdp", "pp, 4 micro-batches"])
def test_gradients_and_their_norm_are_those_of_one_device(way):
    """The norm that recipes clip by is that of the whole gradient, wherever its parts lie."""
    _, expected = kept_on_one_device()
    _, found = kept(*WAYS[way])
    for name, gradient in expected["gradient"].items():
        norm = np.linalg.norm(gradient)
        assert norm > 0, name
        assert np.linalg.norm(found["gradient"][name] - gradient) < 1e-5 * norm, name
    squares = (np.sum(np.square(g, dtype=np.float64)) for g in expected["gradient"].values())
    assert float(found["norm"]) == pytest.approx(sum(squares) ** 0.5, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["remat", "scan"])
def test_remat_and_a_loop_over_layers_change_nothing(more):
    """To 1e-6 at one step, where nothing else differs (seen: 1.1e-7); between meshes sums are in
    another order."""
    sets = ["LAYERS=2"]
    expected, plain = kept_on_one_device(*sets)
    loss, other = kept(f"dp+{more}", {"data": 1}, 16, *sets)
    assert abs(loss - expected) <= 1e-6
    for name, gradient in plain["gradient"].items():
        off = np.linalg.norm(other["gradient"][name] - gradient)
        assert off <= 1e-6 * np.linalg.norm(gradient), name


def test_states_lie_as_was_asked_and_no_step_compiles_again(caplog):
    recipe, mesh = toy("llmc", "LAYERS=1"), mesh_of(data=4, model=2)
    _, asked = program.state_shardings(recipe, "fsdp+tp", mesh)
    compiled, *_ = program.fit(recipe, place(recipe, mesh, "fsdp+tp", device_of(mesh)), 0)
    tokens = [jax.device_put(batch, batch_lanes(mesh)) for batch in batches(recipe, 3)]
    state = start(recipe, mesh, "fsdp+tp")
    with jax.log_compiles():
        for batch in tokens:
            state, metrics = compiled(state, batch)
            jax.block_until_ready(metrics)
        assert not caplog.messages
        jax.jit(lambda x: x + 1)(np.zeros(3))
        assert any("Compiling" in message for message in caplog.messages)
    cut = 0
    leaves = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(asked), strict=True)
    for (path, leaf), sharding in leaves:
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), path
        cut += not sharding.is_fully_replicated
    assert cut > 20


@pytest.mark.slow
def test_replicas_stay_equal_to_the_bit(monkeypatch):
    monkeypatch.setattr(layouts, "SMALL", 300)  # gains and biases stay whole
    recipe = toy("llmc", "STEPS=100")
    state, _ = run(recipe, mesh_of(8), None, batches(recipe, 100), "fsdp")
    whole = [leaf for leaf in jax.tree.leaves(state) if leaf.is_fully_replicated and leaf.ndim]
    assert len(whole) > 20 and len(whole) < len(jax.tree.leaves(state)) - 10
    for leaf in whole:
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("layout", "size"), [("dp", 139_264), ("fsdp", 40_960), ("tp", 73_728), ("fsdp+tp", 24_576)]
)
def test_bytes_of_a_device_are_those_computed_by_hand(layout, size):
    """Matrices 64 x 256 and 256 x 64 and 128 rows of 64 in fp32 on a 4 x 2 mesh: rows are 32 x 64 x
    4 = 8,192 B, the matrices 131,072 B, of which a device holds all, a quarter, a half and an
    eighth."""
    mesh = mesh_of(data=4, model=2)
    zeros = jax.nn.initializers.zeros
    table = {
        "up": ParamSpec((1, 64, 256), ("layer", "model", "mlp"), zeros, "all"),
        "down": ParamSpec((1, 256, 64), ("layer", "mlp", "model"), zeros, "all"),
    }
    cuts = layouts.partitions(table, layout, mesh)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, cut))
        for shape, cut in [(table[n].shape, cuts[n]) for n in table]
        + [((128, 64), PartitionSpec("data"))]
    ]
    compiled = jax.jit(lambda up, down, x: x @ up[0] @ down[0]).lower(*arguments).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == size


def test_a_loop_over_layers_is_one_program_for_any_number():
    def size(layers, layout):
        recipe, where = toy("track3", f"LAYERS={layers}"), placed(layout, data=1)
        return len(program.trace_step(recipe, recipe.stages[0], where, 1).lower().as_text())

    three = size(3, "dp+scan")
    assert size(12, "dp+scan") < 1.05 * three and size(3, "dp") > 1.1 * three


@pytest.mark.slow
def test_remat_takes_less_memory_and_more_flops():
    """A block's forward pass once more, a third of what it costs, and no head: 10 to 40 % more
    FLOPs.

    Memory is compared in a loop over layers: of layers in a row XLA's CPU compiler recomputes all
    before the gradient of the first, and FLOPs in a row, since those of a loop are counted once.
    """
    sets = "LAYERS=6 LANES=16 LANE_LEN=32 EVAL_LEN=32 WIDTH=64 MLP_WIDTH=256".split()
    recipe = find("llmc", [*TOYS["llmc"], *sets]).recipe
    rows, rows_again, loop, loop_again = (
        program.trace_step(recipe, recipe.stages[0], placed(layout, data=1), 1).lower().compile()
        for layout in ("dp", "dp+remat", "dp+scan", "dp+remat+scan")
    )
    memory = [step.memory_analysis().temp_size_in_bytes for step in (loop, loop_again)]
    flops = [step.cost_analysis()["flops"] for step in (rows, rows_again)]
    assert memory[1] < 0.6 * memory[0] and 1.1 < flops[1] / flops[0] < 1.4


def test_stages_of_a_pipeline_hold_their_layers_only():
    state = start(toy("track3"), mesh_of(data=2, pipe=4), "pp")
    assert state["params"]["attention"].addressable_shards[0].data.shape == (4, 32, 32)
    assert state["params"]["attention_gain"].addressable_shards[0].data.shape == (1, 32)
    assert state["params"]["embed"].is_fully_replicated
    assert bubble(4, 4) == pytest.approx(0.4286, abs=1e-4)


@pytest.mark.parametrize(
    ("layout", "axes", "name", "says"),
    [
        ("zero", {"data": 8}, "track3", "--layout zero is unknown (did you mean 'zero1'?)"),
        ("tp", {"data": 8}, "track3", "shards over mesh axis 'model', and the mesh is {'data': 8}"),
        (
            "zero1",
            {"data": 4, "model": 2},
            "track3",
            "'model' of size 2 would repeat the same work; give --mesh data=8",
        ),
        ("tp", {"data": 4, "model": 2}, "r29", "no matrix of recipe r29 has 'heads' or 'mlp'"),
        ("pp", {"data": 4, "pipe": 2}, "r29", "the layers of recipe r29 are not alike"),
        ("zero1+remat", {"data": 8}, "r29", "the layers of recipe r29 are not alike"),
        ("zero1+scan", {"data": 8}, "r29", "the layers of recipe r29 are not alike"),
        ("dp+scan+scan", {"data": 8}, "track3", "known layouts: dp, zero1, fsdp, tp, fsdp+tp, pp"),
        ("pp", {"data": 1, "pipe": 8}, "track3", "4 layers of recipe track3 cannot be divided"),
        ("tp", {"data": 1, "model": 8}, "track3", "recipe track3: attention has 4 heads"),
    ],
)
def test_what_does_not_fit_is_refused(layout, axes, name, says):
    assert says in refused("", layouts.check_layout, layout, mesh_of(**axes), toy(name))


def test_a_loop_over_layers_of_its_own_can_be_recomputed():
    """r21 runs its layers through ctx.layer; r29 does not."""
    layouts.check_layout("zero1+remat", mesh_of(data=8), toy("r21"))
    refused("are not alike", layouts.check_layout, "zero1+remat+scan", mesh_of(data=8), toy("r21"))


@pytest.mark.parametrize("layout", ["pp", "dp+scan", "dp"])
def test_a_block_that_changes_what_it_was_given_cannot_be_a_loop(layout):
    """A pipeline sends what a block returns into the next one, and a loop over layers keeps it."""
    recipe = toy("stdlib")

    def loss(params, tokens_BT, *rest):
        x_BTD = params["embed"][tokens_BT]
        total = jnp.sum(
            rest[-1].blocks(lambda p, x: x.astype("bfloat16"), recipe.parameters, 4, params, x_BTD)
        )
        return total, tokens_BT.astype("float32")

    mesh, own = mesh_of(data=2, **{"pipe": 2} if layout == "pp" else {}), replace(recipe, loss=loss)
    if layout == "dp":
        layouts.check_layout(layout, mesh, own)
        return
    refused("a block of recipe stdlib .* same shapes", layouts.check_layout, layout, mesh, own)


def rows_of(recipe, layout, **axes):
    return {row[0]: row for row in describe.describe_layout(recipe, layout, mesh_of(**axes))}


def test_the_plan_says_what_is_not_cut_and_why(monkeypatch):
    monkeypatch.setattr(layouts, "SMALL", 300)
    rows = rows_of(toy("track3"), "fsdp+tp", data=4, model=2)
    assert rows["attention"][1:] == ("16x32x32", "model/data heads/model", "16x8x16", 8192, "")
    assert rows["down_bias"][2:] == ("whole", "4x32", 512, "no axis that fsdp+tp shards")
    assert rows["embed"][2:5] == ("model/data", "272x8", 8704)
    odd = rows_of(toy("stdlib", "VOCAB=259"), "tp", data=4, model=2)
    assert odd["head"][2:] == ("whole", "259x32", 33_152, "vocab 259 does not divide by 2")
    monkeypatch.setattr(layouts, "SMALL", 10**6)
    small = rows_of(toy("track3"), "zero1", data=8)
    assert small["head"][2:] == ("whole", "272x32", 34_816, "small")


@pytest.mark.parametrize("name", ["gpt2", "microgpt-names", "track3", "r29"])
@pytest.mark.parametrize(
    ("layout", "axes", "why"),
    [
        ("tp", {"data": 2, "model": 2}, "no axis that tp shards"),
        ("zero1", {"data": 3}, "does not divide by 3"),
        ("pp", {"data": 2, "pipe": 2}, "no axis that pp shards"),
        ("dp", {"data": 4}, "dp shards nothing on this mesh"),
        ("tp", {"data": 2, "model": 1}, "tp shards nothing on this mesh"),
    ],
)
def test_what_stays_whole_has_a_reason(name, layout, axes, why):
    """And an array that is sharded over all that the layout shards over has none."""
    rows = list(describe.describe_layout(toy(name), layout, mesh_of(**axes)))
    assert all(reason for *_, sharding, _, _, reason in rows if sharding == "whole")
    assert any(why in row[-1] for row in rows)
    assert not any(row[-1] for row in rows if row[2] != "whole")


def test_gpt2_shards_queries_keys_and_values_by_heads():
    rows = rows_of(toy("gpt2"), "tp", data=2, model=2)
    assert rows["qkv"][2:] == ("heads/model", "4x32x3x16", 24_576, "")


def placed(layout, **axes):
    mesh = mesh_of(**axes)
    return Placement(mesh, layout, device_of(mesh))


def test_the_table_cuts_nothing_in_a_pipe():
    console = Console(file=io.StringIO(), width=60)
    layout_table(console, toy("gpt2"), placed("tp", data=2, model=2))
    said = console.file.getvalue()
    assert "…" not in said and "why not sharded" in said
    assert said.count("no axis that tp shards") > 5


@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize("width", [40, 70, 80])
def test_the_table_wraps_on_a_narrow_terminal(width, term):
    """Its lines were longer than the terminal, or cut where the terminal is a dumb one."""
    made = {"force_terminal": True, "height": 50, "_environ": {"TERM": term}, "color_system": None}
    console, wide = Console(file=io.StringIO(), width=width, **made), Console(file=io.StringIO())
    for one in (console, wide):
        layout_table(one, toy("gpt2"), placed("tp", data=2, model=2))
    lines, (title, *rows) = console.file.getvalue().splitlines(), wide.file.getvalue().splitlines()
    assert max(map(len, lines[1:])) <= width and lines[0] == title
    # every character
    assert sorted("".join(lines[1:]).replace(" ", "")) == sorted("".join(rows).replace(" ", ""))


@pytest.mark.parametrize("terminal", [True, False])
def test_tiles_are_not_cut(terminal):
    console = Console(file=io.StringIO(), width=24, force_terminal=terminal, color_system=None)
    tile_table(console, toy("track3"), placed("zero1", data=8), "embed")
    said = console.file.getvalue()
    assert "…" not in said and all(str(n) in said for n in range(8))


@pytest.mark.parametrize(
    ("layout", "axes"), [("fsdp+tp", {"data": 4, "model": 2}), ("zero1", {"data": 8})]
)
def test_the_total_of_the_plan_is_what_a_device_holds(layout, axes, monkeypatch):
    monkeypatch.setattr(layouts, "SMALL", 300)
    recipe, mesh = toy("llmc"), mesh_of(**axes)
    total = sum(row[4] for row in describe.describe_layout(recipe, layout, mesh))
    state = start(recipe, mesh, layout)
    for device in mesh.devices.flat:
        parts = [
            s.data.nbytes
            for a in jax.tree.leaves(state["params"])
            for s in a.addressable_shards
            if s.device == device
        ]
        assert sum(parts) == total
    console = Console(file=io.StringIO(), width=200)
    layout_table(console, recipe, placed(layout, **axes))
    assert console.file.getvalue().splitlines()[-1].split() == ["all", f"{total / 1e6:,.3f}"]


def test_tiles_name_the_devices_that_hold_them():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    both, columns, whole, two = (
        NamedSharding(mesh, PartitionSpec(*cut)) for cut in ("xy", "y", "", ("y", None, "x"))
    )
    assert describe.tiles((4, 8), both) == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    assert describe.tiles((8,), columns) == [["0,4", "1,5", "2,6", "3,7"]]
    assert describe.tiles((8, 4, 2), columns) == [["0,4", "1,5", "2,6", "3,7"]]
    assert describe.tiles((4, 8), whole) == [["0,1,2,3,4,5,6,7"]]
    assert describe.tiles((4, 3, 8), two)[3] == ["3", "7"]
    console, placement = Console(file=io.StringIO(), width=200), placed("fsdp+tp", data=4, model=2)
    tile_table(console, toy("track3"), placement, "mlp")
    said = console.file.getvalue()
    assert said.startswith("mlp ") and "tiles of" in said and all(str(n) in said for n in range(8))
    refused("no such parameter .*'mlp'", tile_table, console, toy("track3"), placement, "mlpp")
