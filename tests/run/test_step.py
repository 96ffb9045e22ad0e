"""The step on one and eight devices, accumulation, warm-up and evaluation, by comparing whole programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jspeed.errors import BadInput
from jspeed.parallel.mesh import batch_rows, make_mesh, parse_mesh, replicated
from jspeed.recipe import Context, Stage
from jspeed.run import evaluate, step
from jspeed.run.find import find

TINY = [
    "WIDTH=32",
    "LAYERS=2",
    "HEADS=2",
    "MLP_WIDTH=64",
    "LANES=8",
    "LANE_LEN=16",
    "STEPS=12",
    "EVAL_LEN=16",
]
TINY += ["EVAL_TOKENS=160"]
RECIPES = {"stdlib": TINY, "fineweb-cpu": [*TINY, "LOSS_CHUNK=8", "VOCAB=272", "BOS=5"]}


def toy(name="stdlib"):
    return find(name, RECIPES[name]).recipe


def mesh_of(count):
    return make_mesh({"data": count}, devices=jax.devices()[:count])


def batches(recipe, count, seed=0):
    rng = np.random.default_rng(seed)
    shape = (count, recipe.lanes, recipe.stages[0].lane_len + 1)
    return rng.integers(0, 257, size=shape, dtype=np.uint16)


def run(recipe, mesh, micro_batch, tokens, seed=1):
    program = step.compile_program(recipe, mesh, "dp", micro_batch, rows=10)
    state = program.init(jax.device_put(np.uint32(seed), replicated(mesh)))
    losses = []
    for batch in tokens:
        state, metrics = program.steps[0](state, jax.device_put(batch, batch_rows(mesh)))
        losses.append(float(jax.block_until_ready(metrics["loss"])))
    return program, state, losses


@functools.cache
def losses_on_one_device(name):
    recipe = toy(name)
    return run(recipe, mesh_of(1), 128, batches(recipe, 10))[2]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("devices", "micro_batch"), [(8, None), (2, 32), (1, 16)])
def test_any_devices_and_accumulation_give_the_same_losses(name, devices, micro_batch):
    recipe = toy(name)
    expected = losses_on_one_device(name)
    _, _, found = run(recipe, mesh_of(devices), micro_batch, batches(recipe, 10))
    assert expected[-1] != expected[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_same_seed_is_bit_equal_and_another_seed_is_not():
    recipe = toy()
    tokens = batches(recipe, 3)
    _, one, losses = run(recipe, mesh_of(1), None, tokens)
    _, two, again = run(recipe, mesh_of(1), None, tokens)
    _, _, other = run(recipe, mesh_of(1), None, tokens, seed=2)
    assert losses == again != other
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_step_is_gradient_descent_on_the_mean_loss():
    """Against value_and_grad of the plain mean and the recipe's optimizer, without any of the step's machinery."""
    recipe = toy()
    tokens = batches(recipe, 4)
    mesh = mesh_of(1)
    program, state, losses = run(recipe, mesh, None, tokens)
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
    recipe = toy()
    mesh = mesh_of(1)
    program, state, _ = run(recipe, mesh, None, batches(recipe, 1))
    old = jax.tree.leaves(state)
    program.steps[0](state, jax.device_put(batches(recipe, 1)[0], batch_rows(mesh)))
    assert all(leaf.is_deleted() for leaf in old)


def test_warm_up_leaves_no_trace():
    recipe = toy()
    mesh = mesh_of(2)
    program = step.compile_program(recipe, mesh, "dp", None, rows=10)
    validation = evaluate.place(batches(recipe, 1)[0], program.eval_rows, recipe, mesh)
    seed = jax.device_put(np.uint32(7), replicated(mesh))
    fresh = jax.device_get(program.init(seed))
    step.warm_up(program, recipe, mesh, validation.rows)
    jax.tree.map(np.testing.assert_array_equal, fresh, jax.device_get(program.init(seed)))


@pytest.mark.parametrize("name", RECIPES)
def test_validation_loss_depends_on_neither_devices_nor_batch(name):
    recipe = toy(name)
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 257, size=(10, recipe.eval_len + 1), dtype=np.uint16)
    params = step.init_state(recipe, jnp.uint32(1))["params"]
    params = jax.tree.map(lambda p: p + 0.05 * jax.random.normal(jax.random.key(0), p.shape), params)
    logits = recipe.forward(params, jnp.asarray(rows[:, :-1], jnp.int32), Context(step.eval_stage(recipe), False))
    log_p = np.asarray(jax.nn.log_softmax(logits, -1), np.float64)
    expected = -np.take_along_axis(log_p, rows[:, 1:, None].astype(int), -1).mean()
    for devices, micro_batch in [(1, 16), (8, 16)]:
        mesh = mesh_of(devices)
        program = step.compile_program(recipe, mesh, "dp", micro_batch, rows=len(rows))
        validation = evaluate.place(rows, program.eval_rows, recipe, mesh)
        placed = jax.device_put(params, replicated(mesh))
        assert evaluate.validation_loss(program.evaluate, placed, validation) == pytest.approx(expected, abs=1e-6)


def test_spread_keeps_rows_on_their_device_and_gather_undoes_it():
    mesh = mesh_of(4)
    rows = jnp.arange(24).reshape(24, 1)
    spread_out = step.spread(rows, 3, mesh)
    # Device d owns rows 6 d .. 6 d + 5 and takes them two at a time.
    np.testing.assert_array_equal(spread_out[0, :, 0], [0, 1, 6, 7, 12, 13, 18, 19])
    np.testing.assert_array_equal(step.gather(spread_out[..., 0], mesh), np.arange(24))


@pytest.mark.parametrize(("devices", "micro_batch"), [(3, None), (8, 32), (1, 20), (1, 48), (1, 0)])
def test_refuses_a_batch_that_does_not_divide(devices, micro_batch):
    recipe = toy()
    with pytest.raises(BadInput, match="128 tokens") as error:
        step.micro_batches(recipe, recipe.stages[0], mesh_of(devices), micro_batch)
    assert str(micro_batch if micro_batch is not None else devices) in str(error.value)


def test_cpu_takes_at_most_512_tokens_at_once_by_default():
    recipe = toy()
    assert step.micro_batches(recipe, Stage(steps=1, lane_len=256), mesh_of(1), None) == 4
    assert step.micro_batches(recipe, Stage(steps=1, lane_len=4096), mesh_of(1), None) == 8


@pytest.mark.parametrize("text", ["data", "data=x", "model=2", "data=0", "data=-1,model=-1"])
def test_refuses_mesh_text(text):
    with pytest.raises(BadInput, match=f"--mesh {text}"):
        parse_mesh(text)


def test_mesh_fills_minus_one_and_counts_devices():
    assert dict(make_mesh(parse_mesh("data=-1,model=2")).shape) == {"data": 4, "model": 2}
    with pytest.raises(BadInput, match="needs 3 devices but JAX has 8"):
        make_mesh(parse_mesh("data=3"))
