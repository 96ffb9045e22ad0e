"""microgpt-names: its size, its first loss, and that padding has no weight on any number of
devices."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed import recipe as r
from jspeed.corpus import named_data_sets
from jspeed.inference.generate import Sampling, sample
from jspeed.inference.trained import load_model
from jspeed.parallel.mesh import batch_lanes, make_mesh
from jspeed.recipes import microgpt_names as names
from jspeed.record import sizes
from jspeed.run.compute import gradients, program, step
from jspeed.run.compute.device import device_of
from jspeed.run.compute.division import place
from jspeed.run.find_recipe import find

from ..multi_process import ended, environment, metrics, start

RECIPE = find("microgpt-names", ["LANES=8", "LAYERS=2"], trace=False).recipe
BOS, PAD = names.BOS, names.PAD
CTX = r.Context(RECIPE.stages[0], training=True)


@jax.jit
def params():
    return r.init_parameters(RECIPE.parameters, jax.random.key(0))


def rows(lengths, width=32, seed=0):
    """Names of these lengths as prepare.py writes them, each row with the BOS that begins the next:
    [n, width + 1]."""
    rng, found = np.random.default_rng(seed), np.full((len(lengths), width + 1), PAD)
    for row, length in zip(found, lengths, strict=True):
        row[: length + 2] = [BOS, *rng.integers(0, 26, length), BOS]
        row[-1] = BOS
    return found.astype(np.uint16)


def mean_of(parameters, tokens):
    """The definition: log-softmax of ``forward``, summed over letters and ends of names, over their
    number."""
    inputs, targets = tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)
    log_p = jax.nn.log_softmax(RECIPE.forward(parameters, inputs, CTX))
    loss = -jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    counts = [
        [place <= sum(token < 26 for token in row) for place in range(len(row))] for row in inputs
    ]
    return jnp.sum(loss * jnp.asarray(counts)) / np.sum(counts)


def microgpt(p, tokens_BT):
    """Mean loss over letters and ends of names, in float64 from the original's formulas, its
    epsilon of 1e-5 too."""

    def norm(x):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5)

    inputs, targets = tokens_BT[:, :-1].astype(int), tokens_BT[:, 1:].astype(int)
    batch, length = inputs.shape
    x = norm(p["embed"][inputs] + p["positions"][:length])
    for layer in range(4):
        parts = (norm(x) @ p[name][layer] for name in ("query", "key", "value"))
        q, k, v = (part.reshape(batch, length, 4, 16).swapaxes(1, 2) for part in parts)
        scores = np.where(np.tri(length, dtype=bool), q @ k.swapaxes(2, 3) / 4, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = weights / weights.sum(-1, keepdims=True) @ v
        x = x + y.swapaxes(1, 2).reshape(x.shape) @ p["out"][layer]
        x = x + np.maximum(norm(x) @ p["up"][layer], 0) @ p["down"][layer]
    logits = x @ p["head"].T
    loss = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    )
    return loss[(inputs != PAD) & (targets != PAD)].mean()


def test_size_and_first_loss():
    """seeds.md: 202,240 parameters; a first loss of 3.673, within 3.5 to 3.8, which was one draw of
    the weights."""
    assert sizes.parameter_count(names.PARAMETERS) == 202_240 and names.INIT_STD == 0.08
    assert names.RECIPE.steps == 2000 and names.RECIPE.lanes == 64
    tokens = rows(np.arange(3, 11))

    @jax.jit
    def drawn():
        whole = r.init_parameters(names.PARAMETERS, jax.random.key(0))
        loss_BT = names.loss(whole, tokens[:, :-1], tokens[:, 1:], jnp.ones((8, 32)), CTX)[1]
        mean = jnp.mean(gradients.weigh(RECIPE, tokens, loss_BT)) / step.mean_weight(RECIPE, tokens)
        return whole, mean

    whole, mean = drawn()
    first = float(mean)
    assert first == pytest.approx(microgpt(jax.tree.map(np.asarray, whole), tokens), abs=1e-3)
    assert 3.5 < first < 3.8
    # Other draws of the original, on names: 3.88 with a deviation of 0.18; 37 % of 64 lie within
    # 3.5 to 3.8.
    rng = np.random.default_rng(0)
    draws = [
        microgpt({n: rng.normal(0, 0.08, s.shape) for n, s in names.PARAMETERS.items()}, tokens)
        for _ in range(16)
    ]
    assert np.mean(draws) == pytest.approx(3.87, abs=0.15) and 0.1 < np.std(draws) < 0.25
    assert abs(first - np.mean(draws)) < 3 * np.std(draws)


def test_the_optimizer_is_adam_and_its_rate_falls_to_zero():
    """Kingma and Ba's formulas in float64, betas 0.85 and 0.99, and 3e-4 falling linearly over
    2,000 steps."""
    optimizer, rng = names.optimizer(), np.random.default_rng(0)
    params, expected = jnp.zeros((5, 3)), np.zeros((5, 3))
    state, m, v = optimizer.init(params), 0, 0
    update = jax.jit(optimizer.update)
    for step_ in range(10):
        g = rng.normal(size=(5, 3))
        m, v = 0.85 * m + 0.15 * g, 0.99 * v + 0.01 * g**2
        corrected = m / (1 - 0.85 ** (step_ + 1)) / (np.sqrt(v / (1 - 0.99 ** (step_ + 1))) + 1e-8)
        expected -= 3e-4 * (1 - step_ / 2000) * corrected
        updates, state = update(jnp.asarray(g, jnp.float32), state)
        params += updates
        np.testing.assert_allclose(params, expected, atol=1e-6)
    counts = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.int32]
    assert [int(count) for count in counts] == [10, 10]
    for at, rate in ((0, 3e-4), (1000, 1.5e-4), (2000, 0.0)):
        moments, schedule = optimizer.init(params)
        schedule = jax.tree.map(lambda x, at=at: jnp.full_like(x, at), schedule)
        moved = update(jnp.ones((5, 3)), (moments, schedule))[0]
        np.testing.assert_allclose(moved, np.full((5, 3), -rate), rtol=1e-4, atol=1e-9)


@pytest.mark.slow
def test_two_thousand_steps_on_names(tmp_path):
    """seeds.md: the mean of the last 50 training losses is below 2.2 (seen: 2.104), of the original
    2.06 to 2.11."""
    text = Path(__file__).parents[3] / "shared" / "data" / "classics" / "names.txt"
    if not text.exists():
        pytest.skip(f"the 32,033 names are not in {text}")
    data = named_data_sets.prepare_names(tmp_path / "data", text)
    optimized = environment(XLA_FLAGS="")  # two thousand steps are worth the compiler's time
    words = "microgpt-names --no-progress --no-sample --run-dir run --data".split()
    code, _, err = ended([start(tmp_path, optimized, *words, data)], 1800)[0]
    assert code == 0, err
    losses = list(metrics(tmp_path / "run").values())
    assert len(losses) == 2000
    assert 2.0 < sum(losses[-50:]) / 50 < 2.2
    invented = sample(load_model(tmp_path / "run"), [""] * 20, 31, Sampling(0.5, seed=1))
    assert sum(0 < len(name) < 31 for name in invented) >= 15  # the others came to no end


def one_step(tokens, devices, parts):
    mesh = make_mesh({"data": devices}, jax.devices()[:devices])
    _, shardings = program.state_shardings(RECIPE, "zero1", mesh)
    state = jax.jit(lambda s: step.init_state(RECIPE, s), out_shardings=shardings)(np.uint32(0))
    micro = RECIPE.lanes // devices // parts * RECIPE.stages[0].lane_len
    execute, *_ = program.fit(
        RECIPE, place(RECIPE, mesh, "zero1", device_of(mesh, micro_batch=micro)), 0
    )
    state, metrics = execute(state, jax.device_put(tokens, batch_lanes(mesh)))
    return state["params"], float(metrics["loss"])


# the second half of the devices has five times the letters of the first
LENGTHS = [2, 2, 3, 2, 15, 14, 15, 13]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "parts"), [(2, 2), (8, 1)])
def test_the_mean_is_over_the_whole_batch(devices, parts):
    tokens = rows(LENGTHS)
    after, loss = one_step(tokens, devices, parts)
    mean, grads = jax.jit(jax.value_and_grad(lambda p: mean_of(p, tokens)))(params())
    assert loss == pytest.approx(float(mean), abs=1e-6)
    halves = [
        float(jax.jit(lambda p, half=half: mean_of(p, half))(params()))
        for half in (tokens[:4], tokens[4:])
    ]
    assert abs(loss - np.mean(halves)) > 1e-3  # the mean of the devices' means is another number
    # Adam's first step is the rate times the sign of the gradient, where that is not tiny.
    for name, grad in grads.items():
        large = np.abs(grad) > 1e-4
        moved = np.asarray(after[name] - params()[name])[large]
        np.testing.assert_allclose(moved, -names.LEARNING_RATE * np.sign(grad[large]), rtol=2e-3)


@pytest.mark.slow
def test_a_hundred_columns_of_padding_change_nothing():
    wide = find(
        "microgpt-names", ["LANES=8", "LAYERS=2", "LANE_LEN=132", "EVAL_LEN=132"], trace=False
    ).recipe
    drawn, losses = r.init_parameters(wide.parameters, jax.random.key(0)), []
    for tokens in (rows(LENGTHS), rows(LENGTHS, width=132)):
        loss_BT = wide.loss(
            drawn, tokens[:, :-1], tokens[:, 1:], jnp.ones(tokens[:, 1:].shape), CTX
        )[1]
        losses.append(
            jnp.mean(gradients.weigh(wide, tokens, loss_BT)) / step.mean_weight(wide, tokens)
        )
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-6)


def test_nothing_but_padding_is_a_loss_of_zero():
    tokens = np.full((8, 33), PAD, np.uint16)
    after, loss = one_step(tokens, 2, 1)
    assert loss == 0
    jax.tree.map(
        lambda found, before: np.testing.assert_allclose(found, before, atol=1e-7), after, params()
    )
