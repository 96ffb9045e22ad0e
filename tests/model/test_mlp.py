"""SwiGLU: its parameter count, its output scale at initialisation, its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.model.layers import uniform
from jspeed.model.mlp import swiglu, swiglu_width
from jspeed.record.sizes import parameter_count
from jspeed.run.find_recipe import find

from ..run.compute.steps import mesh_of, run
from ..toys import TOYS


def drawn(width, hidden):
    shapes = [(1, width, hidden), (1, width, hidden), (1, hidden, width)]
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        uniform(1.0)(key, shape, jnp.float32)[0] for key, shape in zip(keys, shapes, strict=True)
    ]


def test_three_matrices_have_the_parameters_of_two_wide_ones():
    assert swiglu_width(384) == 1024 and 3 * 384 * 1024 == 2 * 384 * 4 * 384
    assert [swiglu_width(128), swiglu_width(64, 64), swiglu_width(768)] == [344, 192, 2048]
    recipe = find("nanogpt", trace=False).recipe
    attention, gains, tables = 4 * 384 * 384, 2 * 384, (65 + 256) * 384
    assert (
        parameter_count(recipe.parameters)
        == 6 * (attention + 3 * 384 * 1024 + gains) + tables + 384
    )


def test_it_starts_with_an_output_of_the_size_of_its_input():
    """Drawn N(0, 1), as the port that SwiGLU was taken from had it, the output is 709 times as
    large at width 768."""
    width = 256
    x = jax.random.normal(jax.random.key(1), (1, 512, width))
    assert 0.5 < float(jnp.std(swiglu(x, *drawn(width, swiglu_width(width))))) < 2


def test_value_and_gradient_by_numpy_in_float64():
    x, gate, up, down = (
        np.asarray(a, np.float64)
        for a in (jax.random.normal(jax.random.key(2), (5, 8)), *drawn(8, 24))
    )

    def value(x, gate, up, down):
        g = x @ gate
        return (g / (1 + np.exp(-g)) * (x @ up)) @ down

    def loss(*weights):
        return jnp.sum(jnp.sin(swiglu(jnp.asarray(x[None], jnp.float32), *weights)))

    weights = [gate, up, down]
    np.testing.assert_allclose(
        swiglu(jnp.asarray(x[None]), gate, up, down)[0], value(x, *weights), atol=1e-5
    )
    grads = jax.grad(loss, argnums=(0, 1, 2))(*(jnp.asarray(w, jnp.float32) for w in weights))
    rng = np.random.default_rng(0)
    for index, grad in enumerate(grads):
        direction = rng.standard_normal(grad.shape)
        ends = []
        for sign in (1, -1):
            moved = [
                w + sign * 1e-5 * direction if n == index else w for n, w in enumerate(weights)
            ]
            ends.append(np.sum(np.sin(value(x, *moved))))
        assert float(np.sum(grad * direction)) == pytest.approx(
            (ends[0] - ends[1]) / 2e-5, rel=1e-3
        )


@pytest.mark.slow
def test_it_learns_as_well_as_squared_relu(tmp_path):
    """200 steps of one toy on tokens with a pattern, its MLP replaced by that of stdlib at as many
    parameters."""
    source = find("nanogpt", trace=False).source
    call = 'swiglu(norm(x_BTD, p["mlp_gain"]), p["gate"], p["up"], p["down"])'
    other = (
        'relu_squared(norm(x_BTD, p["mlp_gain"]) @ jnp.concatenate([p["gate"], p["up"]], 1)[:, : 4'
        " * WIDTH])"
    )
    other += ' @ jnp.concatenate([p["down"], p["gate"].T], 0)[: 4 * WIDTH]'
    assert source.count(call) == 1
    plain = source.replace(call, other).replace(
        "import swiglu, swiglu_width", "import swiglu_width"
    )
    plain = plain.replace("lookup, positions", "lookup, positions, relu_squared")
    (tmp_path / "relu.py").write_text(plain)
    losses = []
    for name in ("nanogpt", str(tmp_path / "relu.py")):
        sets = [
            *TOYS["nanogpt"],
            *"STEPS=200 COOLDOWN=200 DROPOUT=0.0 WARMUP=10 LEARNING_RATE=0.01".split(),
        ]
        recipe = find(name, sets).recipe
        tokens = [(3 * first + np.arange(17) ** 2) % 97 for first in range(8)]
        tokens = [np.roll(np.stack(tokens), n, 0).astype(np.uint16) for n in range(200)]
        losses.append(np.mean(run(recipe, mesh_of(1), None, tokens)[1][-10:]))
    assert losses[0] < 1 and abs(losses[0] - losses[1]) < 0.1
