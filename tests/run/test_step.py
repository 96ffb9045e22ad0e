"""The step on one to eight devices, accumulation, warm-up and evaluation, by comparing whole programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jspeed.parallel import mesh as meshes
from jspeed.parallel.mesh import batch_rows, make_mesh, replicated
from jspeed.recipe import Context
from jspeed.run import evaluate, program, step
from jspeed.run.device import device_of
from jspeed.run.find import find
from jspeed.run.train import every_step

from ..toys import ALIKE, TOYS


@pytest.fixture(autouse=True)
def cut_small_arrays_too(monkeypatch):
    monkeypatch.setattr(meshes, "SMALL", 0)


def toy(name="stdlib"):
    return find(name, TOYS[name]).recipe


def mesh_of(count):
    return make_mesh({"data": count}, devices=jax.devices()[:count])


def batches(recipe, count, seed=0):
    rng = np.random.default_rng(seed)
    shape = (count, recipe.lanes, recipe.stages[0].lane_len + 1)
    return rng.integers(0, 257, size=shape, dtype=np.uint16)


def start(recipe, mesh, layout="zero1", seed=1):
    _, shardings = program.state_shardings(recipe, layout, mesh)
    return jax.jit(lambda s: step.init_state(recipe, s), out_shardings=shardings)(np.uint32(seed))


def run(recipe, mesh, micro_batch, tokens, layout="zero1", seed=1):
    """Train on ``tokens`` through all stages and return (state, losses)."""
    device, state, losses = device_of(mesh), start(recipe, mesh, layout, seed), []
    compiled = [program.fit(recipe, s, mesh, layout, device, micro_batch)[0] for s in recipe.stages]
    for batch, (_, execute) in zip(tokens, every_step(recipe.stages, compiled), strict=False):
        state, metrics = execute(state, jax.device_put(batch, batch_rows(mesh)))
        losses.append(float(jax.block_until_ready(metrics["loss"])))
    return state, losses


@functools.cache
def losses_on_one_device(name):
    recipe = toy(name)
    return run(recipe, mesh_of(1), None, batches(recipe, 10))[1]


@pytest.mark.parametrize("name", [name for name in TOYS if name not in ALIKE or name == "stdlib-adamw"])
@pytest.mark.parametrize(("devices", "lanes_at_once"), [(8, 1), (4, 1), (2, 4)])
def test_any_devices_and_accumulation_give_the_same_losses(name, devices, lanes_at_once):
    recipe = toy(name)
    expected = losses_on_one_device(name)
    micro_batch = lanes_at_once * recipe.stages[0].lane_len
    _, found = run(recipe, mesh_of(devices), micro_batch, batches(recipe, 10))
    assert abs(expected[-1] - expected[0]) > 1e-3
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_layouts_and_stages_are_the_same_training():
    recipe = find("r29", [*TOYS["r29"], "WINDOWS=(1,6)", "STEPS=6"]).recipe
    assert [stage.steps for stage in recipe.stages] == [3, 3]
    expected, found = (
        run(recipe, mesh_of(devices), None, batches(recipe, 6), layout=layout)[1]
        for devices, layout in ((1, "zero1"), (8, "dp"))
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["track3", "r29"])
def test_zero1_cuts_banks_and_tables_and_their_optimizer_state(name):
    recipe, mesh = toy(name), mesh_of(8)
    state = start(recipe, mesh)
    held = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        held[jax.tree_util.keystr(path)] = leaf.addressable_shards[0].data.size / leaf.size
    for leaf in ("attention", "embed", "head"):
        places = [part for path, part in held.items() if path.endswith(f"['{leaf}']")]
        assert len(places) >= 2 and set(places) == {1 / 8}, leaf


def test_same_seed_is_bit_equal_and_another_seed_is_not():
    recipe = toy()
    tokens = batches(recipe, 3)
    one, losses = run(recipe, mesh_of(1), None, tokens)
    two, again = run(recipe, mesh_of(1), None, tokens)
    _, other = run(recipe, mesh_of(1), None, tokens, seed=2)
    assert losses == again != other
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.parametrize("name", ["stdlib", "llmc", "track3", "r21"])
def test_step_is_gradient_descent_on_the_mean_loss(name):
    """Against value_and_grad of the plain mean and the recipe's optimizer, without any of the step's machinery."""
    recipe = toy(name)
    tokens = batches(recipe, 2)
    _, losses = run(recipe, mesh_of(1), None, tokens)
    plain = step.init_state(recipe, jnp.uint32(1))
    ctx = Context(recipe.stages[0], training=True)
    optimizer = recipe.optimizer()

    def mean_loss(params, batch):
        logits = recipe.forward(params, batch[:, :-1], ctx)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.take_along_axis(log_p, batch[:, 1:, None], axis=-1).mean()

    @jax.jit
    def update(plain, batch):
        loss, grads = jax.value_and_grad(mean_loss)(plain["params"], batch)
        updates, optimizer_state = optimizer.update(grads, plain["optimizer"], plain["params"])
        return {"params": optax.apply_updates(plain["params"], updates), "optimizer": optimizer_state}, loss

    for batch, loss in zip(tokens, losses, strict=True):
        plain, expected = update(plain, jnp.asarray(batch, jnp.int32))
        assert loss == pytest.approx(float(expected), abs=1e-5)


def test_state_is_donated():
    recipe, mesh = toy(), mesh_of(1)
    compiled, _ = program.fit(recipe, recipe.stages[0], mesh, "zero1", device_of(mesh), None)
    state = start(recipe, mesh)
    old = jax.tree.leaves(state)
    compiled(state, jax.device_put(batches(recipe, 1)[0], batch_rows(mesh)))
    assert all(leaf.is_deleted() for leaf in old)


def test_warm_up_leaves_no_trace():
    recipe, mesh = toy("r29"), mesh_of(2)
    built = program.compile_program(recipe, mesh, "zero1", None, rows=10)
    validation = evaluate.place(batches(recipe, 2).reshape(16, -1)[:10], built.eval_rows, recipe, mesh)
    seed = jax.device_put(np.uint32(7), replicated(mesh))
    fresh = jax.device_get(built.init(seed))
    program.warm_up(built, recipe, mesh, validation.rows)
    jax.tree.map(np.testing.assert_array_equal, fresh, jax.device_get(built.init(seed)))


@pytest.mark.parametrize("name", ["fineweb-cpu", "llmc", "r29"])
def test_validation_loss_depends_on_neither_devices_nor_batch(name):
    recipe = toy(name)
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 257, size=(10, recipe.eval_len + 1), dtype=np.uint16)
    params = step.init_state(recipe, jnp.uint32(1))["params"]
    params = jax.tree.map(lambda p: p + 0.05 * jax.random.normal(jax.random.key(0), p.shape), params)
    ctx = program.eval_context(recipe, device_of(mesh_of(1)))
    logits = recipe.forward(params, jnp.asarray(rows[:, :-1], jnp.int32), ctx)
    log_p = np.asarray(jax.nn.log_softmax(logits, -1), np.float64)
    expected = -np.take_along_axis(log_p, rows[:, 1:, None].astype(int), -1).mean()
    for devices in (1, 8):
        mesh = mesh_of(devices)
        device = device_of(mesh)
        padded, lowered = program.lower_evaluation(recipe, mesh, "zero1", device, recipe.eval_len, len(rows))
        validation = evaluate.place(rows, padded, recipe, mesh)
        placed = jax.device_put(params, program.state_shardings(recipe, "zero1", mesh)[1]["params"])
        assert evaluate.validation_loss(lowered.compile(), placed, validation) == pytest.approx(expected, abs=1e-6)
