"""The step on one to eight devices, accumulation, warm-up and evaluation, by comparing whole
programs."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.nn.initializers import normal

from jspeed.base.jax_versions import scan_sizes
from jspeed.model.layers import look_up_all
from jspeed.parallel import layout as layouts
from jspeed.parallel.mesh import batch_lanes, replicated
from jspeed.recipe import Context, ParamSpec, leaves
from jspeed.run import evaluate
from jspeed.run.compute import accumulators, division, program, step
from jspeed.run.compute.device import Placement, device_of
from jspeed.run.compute.division import place
from jspeed.run.compute.warm_up import warm_up
from jspeed.run.find_recipe import find

from ...refusals import refused
from ...toys import SAME, TOYS, moved_parameters
from .steps import batches, mesh_of, run, start


@pytest.fixture(autouse=True)
def cut_small_arrays_too(monkeypatch):
    monkeypatch.setattr(layouts, "SMALL", 0)


def toy(name="stdlib", *sets):
    return find(name, [*TOYS[name], *sets]).recipe


def with_table(parameters, loss, rate, *sets):
    """stdlib with other parameters, another loss and plain gradient descent."""
    sgd = lambda: optax.sgd(rate)
    return replace(toy("stdlib", *sets), parameters=parameters, loss=loss, optimizer=sgd)


def placed(recipe, devices):
    mesh = mesh_of(devices)
    return place(recipe, mesh, "zero1", device_of(mesh))


@functools.cache
def losses_on_one_device(name):
    recipe = toy(name)
    return run(recipe, mesh_of(1), None, batches(recipe, 10))[1]


# Every recipe on four devices that accumulate two micro-batches, one on other numbers of them.
WAYS = {"stdlib": ((4, 1), (8, 1), (2, 4))}
ALL = [(name, *way) for name in TOYS if name not in SAME for way in WAYS.get(name, ((4, 1),))]


@pytest.mark.parametrize(
    ("name", "devices", "lanes_at_once"),
    [case if case == ALL[0] else pytest.param(*case, marks=pytest.mark.slow) for case in ALL],
)
def test_any_devices_and_accumulation_give_the_same_losses(name, devices, lanes_at_once):
    recipe = toy(name)
    expected = losses_on_one_device(name)
    _, found = run(recipe, mesh_of(devices), lanes_at_once, batches(recipe, 10))
    assert abs(expected[-1] - expected[0]) > 1e-3
    # Eigenbases of first gradients, which have null spaces, magnify what sums round.
    bound = 1e-4 if name == "track3-soap" else 1e-5
    np.testing.assert_allclose(found, expected, atol=bound)


@pytest.mark.slow
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
    recipe = toy("stdlib", "LAYERS=1")
    tokens = batches(recipe, 3)
    one, losses = run(recipe, mesh_of(1), None, tokens)
    two, again = run(recipe, mesh_of(1), None, tokens)
    assert losses == again
    jax.tree.map(np.testing.assert_array_equal, one, two)
    first, other = (start(recipe, mesh_of(1), seed=n)["params"]["embed"] for n in (1, 2))
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    "name",
    ["stdlib", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llmc", "track3", "r21"))],
)
def test_step_is_gradient_descent_on_the_mean_loss(name):
    """Against value_and_grad of the plain mean and the recipe's optimizer, without any of the
    step's machinery."""
    recipe = toy(name)
    tokens = batches(recipe, 2)
    _, losses = run(recipe, mesh_of(1), None, tokens)
    plain = start(recipe, mesh_of(1))
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
        params = optax.apply_updates(plain["params"], updates)
        return {"params": params, "optimizer": optimizer_state}, loss

    for batch, loss in zip(tokens, losses, strict=True):
        plain, expected = update(plain, jnp.asarray(batch, jnp.int32))
        assert loss == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.slow
def test_slow_parameters_take_all_gradients_since_their_update():
    """Against the recipe's loss and optimizer and one sum, without any of the step's machinery,
    through both stages."""
    recipe = toy("r62")
    tokens = batches(recipe, 10)
    _, losses = run(recipe, mesh_of(8), None, tokens)
    plain, optimizer = step.init_state(recipe, jnp.uint32(1)), recipe.optimizer()
    params, moments = plain["params"], plain["optimizer"]
    held = jax.tree.map(jnp.zeros_like, params)

    @functools.partial(jax.jit, static_argnames=("stage", "due"))
    def update(params, moments, held, batch, number, *, stage, due):
        ctx = Context(stage, training=True, step=number)
        weights = jnp.full((recipe.lanes, stage.lane_len), 1 / recipe.tokens_per_step(stage))

        def loss(params):
            total, loss_BT = recipe.loss(params, batch[:, :-1], batch[:, 1:], weights, ctx)
            return total, loss_BT.mean()

        grads, mean = jax.grad(loss, has_aux=True)(params)
        sums = jax.tree.map(jnp.add, held, grads)
        specs = recipe.parameters.items()
        chosen = {name: (sums if spec.every == 2 else grads)[name] for name, spec in specs}
        updates, moments = optimizer.update(chosen, moments, params, due=1 + due)
        held = jax.tree.map(jnp.zeros_like, sums) if due else sums
        return optax.apply_updates(params, updates), moments, held, mean

    stages = [stage for stage in recipe.stages for _ in range(stage.steps)]
    for number, (stage, batch, loss) in enumerate(zip(stages, tokens, losses, strict=False)):
        batch = jnp.asarray(batch, jnp.int32)
        which = dict(stage=stage, due=number % 2 == 1)
        params, moments, held, mean = update(params, moments, held, batch, number, **which)
        assert loss == pytest.approx(float(mean), abs=1e-5)
        # Step 5 is the last in which the tables are one; an even step updates neither.
        assert np.array_equal(params["embed"], params["head"]) == (number < 7)


def test_a_parameter_that_is_its_own_copy_is_not_carried():
    recipe = toy("r92")
    carry = accumulators.zeros(recipe, "zero1", mesh_of(8))
    assert {"head", "smear_gate"} <= carry["whole"].keys()  # cut; in another dtype
    assert {"smear_scale", "skip_scale"} <= carry["sums"].keys() - carry["whole"].keys()


@pytest.mark.parametrize(("devices", "lanes_at_once"), [(1, None), (4, 1)])
def test_summed_tables_train_as_others_do(devices, lanes_at_once):
    """Over two updates, with one micro-batch and with two, that must not count what earlier steps
    left twice."""

    def loss(params, tokens_BT, targets_BT, weights_BT, ctx):
        one, two = (rows[..., 0] for rows in look_up_all(params["values"], tokens_BT))
        loss_BT = jnp.square(one + jnp.sin(two) - targets_BT / 256)
        return jnp.sum(weights_BT * loss_BT), loss_BT

    def trained(summed):
        axes = ("token", "table", "model")
        spec = ParamSpec((264, 2, 8), axes, normal(1.0), "values", every=2, grad_accum_fp32=summed)
        recipe = with_table({"values": spec}, loss, 0.1)
        state, losses = run(recipe, mesh_of(devices), lanes_at_once, batches(recipe, 4))
        return state["params"]["values"], losses

    (values, losses), (other, expected) = map(trained, (True, False))
    assert losses == pytest.approx(expected, abs=1e-6) and losses[3] < losses[0]
    np.testing.assert_allclose(values, other, atol=1e-6)


def test_state_is_donated():
    recipe, mesh = toy(), mesh_of(1)
    compiled, *_ = program.fit(recipe, placed(recipe, 1), 0)
    state = start(recipe, mesh)
    old = jax.tree.leaves(state)
    compiled(state, jax.device_put(batches(recipe, 1)[0], batch_lanes(mesh)))
    assert all(leaf.is_deleted() for leaf in old)
    # The new state is written over the old one: there are never two of it.
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(leaf.nbytes for leaf in old)


def bigrams():
    """A table from each token to the logits of the next: few operations, since without jit each
    compiles by itself."""

    def loss(params, tokens_BT, targets_BT, weights_BT, ctx):
        logits_BTV = params["embed"][tokens_BT]
        loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
        return jnp.sum(loss_BT * weights_BT), loss_BT

    spec = ParamSpec((272, 272), ("token", "vocab"), normal(1.0), "all")
    return with_table({"embed": spec}, loss, 50.0)


def test_a_constant_loss_stays_what_it_is():
    """5.0 for 100,000 rows, in training and evaluation: a mean that is kept in bf16 stops growing
    at a few hundred."""

    def loss(params, tokens_BT, targets_BT, weights_BT, ctx):
        loss_BT = jnp.full(tokens_BT.shape, 5.0)
        return jnp.sum(params["embed"].astype(jnp.float32)) * jnp.sum(loss_BT * weights_BT), loss_BT

    spec = ParamSpec((2, 2), ("token", "vocab"), jax.nn.initializers.ones, "all", "bfloat16")
    sets = "LANES=100000", "LANE_LEN=1", "EVAL_LEN=1"
    recipe = with_table({"embed": spec}, loss, 0.0, *sets)
    _, losses = run(recipe, mesh_of(1), 1000, batches(recipe, 2))
    assert losses == [5.0, 5.0]
    rows = jnp.zeros((100_000, 2), jnp.uint16)
    validation = evaluate.ValidationSet(rows, rows[:, 1:], 99_999, 99_999)
    fives = lambda _, rows, *more: jnp.full((len(rows), 1), 5.0)
    assert evaluate.validation_loss(fives, {}, validation) == 5.0


def test_gradients_of_micro_batches_are_summed_in_fp32():
    recipe = find("llmc", [*TOYS["llmc"], "COMPUTE=bfloat16", "LAYERS=1"]).recipe
    first = lambda: step.init_state(recipe, jnp.uint32(1))["params"]
    params = jax.eval_shape(lambda: step.to_compute_dtype(recipe, first()))
    tokens = jax.ShapeDtypeStruct((8, recipe.stages[0].lane_len + 1), jnp.uint16)
    ctx = Context(recipe.stages[0], training=True)
    gradients = lambda p, t: step.gradients(recipe, ctx, 4, (0, 0), 1.0, p, t, {})
    made = jax.make_jaxpr(gradients)(params, tokens)
    (scan,) = (eqn for eqn in made.eqns if eqn.primitive.name == "scan")
    _, carried = scan_sizes(scan)
    sums, (losses,) = scan.outvars[:carried], scan.outvars[carried:]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert len(sums) == len(params)
    assert {array.aval.dtype.name for array in (*sums, losses)} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nanogpt", "track3"])
def test_bf16_trains_as_fp32_does(name):
    found = []
    for dtype in ("float32", "bfloat16"):
        sets = [f"COMPUTE={dtype}", "STEPS=200", "HEADS=4"]
        sets += ["LEARNING_RATE=0.003", "COOLDOWN=200"] if name == "nanogpt" else []
        recipe = toy(name, *sets)
        n, first, t = np.ogrid[:200, : recipe.lanes, :17]
        tokens = ((3 * first + t**2 + 7 * n) % 97).astype(np.uint16)
        found.append(np.mean(run(recipe, mesh_of(1), None, list(tokens))[1][-10:]))
    assert found[0] < 4.6 and abs(found[0] - found[1]) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("make", [bigrams, toy])
def test_without_jit_three_steps_are_the_same(make):
    recipe = make()
    mesh, tokens, losses = mesh_of(1), batches(recipe, 3), []
    state, compiled = run(recipe, mesh, None, tokens)
    seed = jax.device_put(np.uint32(1), replicated(mesh))
    with jax.disable_jit():
        built = program.compile_program(recipe, placed(recipe, 1), lanes=10)
        plain = built.init(seed)
        for batch in tokens:
            plain, metrics = built.steps[0][0](plain, jax.device_put(batch, batch_lanes(mesh)))
            losses.append(float(metrics["loss"]))
        words, eight = "JAX_DISABLE_JIT .* the mesh is {'data': 8}", placed(recipe, 8)
        refused(words, program.compile_program, recipe, eight, lanes=10)
    assert compiled[0] != compiled[2]
    np.testing.assert_allclose(losses, compiled, atol=1e-5)
    np.testing.assert_allclose(plain["params"]["embed"], state["params"]["embed"], atol=1e-5)


@pytest.mark.parametrize("name", ["stdlib", pytest.param("r29", marks=pytest.mark.slow)])
def test_warm_up_leaves_no_trace(name):
    recipe, mesh = toy(name), mesh_of(2)
    built = program.compile_program(recipe, placed(recipe, 2), lanes=10)
    rows = np.concatenate(batches(recipe, 2))[:10]
    validation = evaluate.to_devices(rows, built.eval_lanes, recipe, mesh)
    seed = jax.device_put(np.uint32(7), replicated(mesh))
    fresh = jax.device_get(built.init(seed))
    assert {"params", "optimizer", "step"} <= fresh.keys()
    seen = []
    counted = tuple(
        tuple(lambda *given, do=do: seen.append(given[1]) or do(*given) for do in own)
        for own in built.steps
    )
    warm_up(replace(built, steps=counted), built.init(0), recipe, mesh, *validation.evaluated)
    assert len(seen) == sum(map(len, built.steps)) and not any(np.any(tokens) for tokens in seen)
    jax.tree.map(np.testing.assert_array_equal, fresh, jax.device_get(built.init(seed)))


@pytest.mark.parametrize(
    "name",
    ["fineweb-cpu", "shakespeare-char"]
    + [pytest.param(n, marks=pytest.mark.slow) for n in ("r29", "llmc")],
)
def test_validation_loss_depends_on_neither_devices_nor_batch(name, monkeypatch):
    recipe = toy(name)
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 257, size=(10, recipe.eval_len + 1), dtype=np.uint16)
    params, ctx = moved_parameters(recipe), program.eval_context(recipe, device_of(mesh_of(1)))
    forward = jax.jit(functools.partial(recipe.forward, ctx=ctx))
    logits = np.asarray(forward(params, rows[:, :-1].astype(np.int32)), np.float64)
    own = np.take_along_axis(logits, rows[:, 1:, None].astype(int), -1)
    expected = np.mean(np.log(np.exp(logits).sum(-1, keepdims=True)) - own)
    tables = any("row" in spec.axes for _, spec in leaves(recipe.parameters))
    # on a CPU small tables are gathered; without room rows come from their owners, as on GPUs
    for devices, room in ((1, division.CPU_REPLICAS), (8, division.CPU_REPLICAS), (8, 0)):
        monkeypatch.setattr(division, "CPU_REPLICAS", room)
        mesh = mesh_of(devices)
        device = device_of(mesh)
        padded, traced = program.trace_evaluation(
            recipe, Placement(mesh, "zero1", device), recipe.eval_len, len(rows)
        )
        validation = evaluate.to_devices(rows, padded, recipe, mesh)
        spread = jax.device_put(params, program.state_shardings(recipe, "zero1", mesh)[1]["params"])
        compiled = traced.lower().compile()
        assert ("all-to-all" in compiled.as_text()) == (tables and not room)
        found = evaluate.validation_loss(compiled, spread, validation)
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("devices", [1, 8])
def test_accuracy_is_the_weighted_share_of_argmax_targets(devices):
    recipe, mesh = toy("microgpt-names"), mesh_of(devices)
    # 27 is PAD
    rows = np.random.default_rng(3).integers(0, 28, size=(10, recipe.eval_len + 1), dtype=np.uint16)
    params, device = moved_parameters(recipe), device_of(mesh)
    params["head"] = params["head"].at[28:].set(0)  # so that some targets are hit
    forward = functools.partial(recipe.forward, ctx=program.eval_context(recipe, device))
    logits = jax.jit(forward)(params, rows[:, :-1].astype(np.int32))
    found = np.argmax(np.asarray(logits)[..., : recipe.vocab_size], -1) == rows[:, 1:]
    counted = (rows[:, :-1] != 27) & (rows[:, 1:] != 27)
    _, padded = program.eval_parts(recipe, len(rows), mesh, 4 * recipe.eval_len)
    validation = evaluate.to_devices(rows, padded, recipe, mesh)
    spread = jax.device_put(params, program.state_shardings(recipe, "zero1", mesh)[1]["params"])
    measured = evaluate.compile_accuracy(recipe, Placement(mesh, "zero1", device), padded)
    built = program.Program(None, (), None, None, 0, padded, accuracy=measured)
    wanted = found[counted].mean()
    accuracy = evaluate.validation_accuracy(built, spread, validation)
    assert accuracy == pytest.approx(wanted, abs=1e-6) and 0 < wanted < 1
    assert evaluate.validation_accuracy(replace(built, accuracy=None), spread, validation) is None
