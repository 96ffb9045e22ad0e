"""parent: an honest recipe of sixty lines, of which the attacks are edits.

Parent      none
"""

import jax
import jax.numpy as jnp
import optax
from jax.nn import initializers

from jspeed.model.losses import cross_entropy, softcap
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Stage

VOCAB = 257
WIDTH = 16
LANES = 8
LANE_LEN = 32
STEPS = 4
EVAL_TOKENS = 256
EVAL_LEN = 32
TARGET_LOSS = 9.0

normal = initializers.normal(0.5)
PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("token", "model"), normal, "all"),
    "head": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), normal, "all"),
}


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads: each token and half of the one before it."""
    x_BTD = params["embed"][tokens_BT]
    return x_BTD + 0.5 * jnp.pad(x_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def head(head_VD: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Return raw logits ``[B, T, V]``."""
    return x_BTD @ head_VD.T


def forward(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return logits ``[B, T, V]``."""
    return softcap(head(params["head"], hidden(params, tokens_BT, ctx)), None)


def loss(
    params: dict[str, jax.Array],
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    ctx: Context,
) -> tuple[jax.Array, jax.Array]:
    """Return (weighted sum, loss of every token in nats)."""
    x_BTD = hidden(params, tokens_BT, ctx)
    return cross_entropy(head, params["head"], x_BTD, targets_BT, weights_BT, cap=None)


def optimizer() -> optax.GradientTransformation:
    """Adam on everything."""
    return optax.adam(0.01)


RECIPE = Recipe(
    name="parent",
    parent=None,
    data=Data("toy", vocab_size=VOCAB, bos_id=256),
    target_loss=TARGET_LOSS,
    parameters=PARAMETERS,
    forward=forward,
    loss=loss,
    optimizer=optimizer,
    stages=(Stage(steps=STEPS, lane_len=LANE_LEN),),
    lanes=LANES,
    eval_every=STEPS,
    eval_tokens=EVAL_TOKENS,
    eval_len=EVAL_LEN,
    attention_width=WIDTH,
    layers=1,
)
