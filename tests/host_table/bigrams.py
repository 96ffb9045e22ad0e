"""bigrams: a recipe of sixty lines with a table that is updated row by row.

Parent      none
"""

import jax
import jax.numpy as jnp
import optax
from jax.nn import initializers

from jspeed.model.losses import cross_entropy
from jspeed.optim.rows import RowTransformation, row_adam
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Stage, groups
from jspeed.speedrun.ngrams import bigram_rows

VOCAB = 257
WIDTH = 16
ROWS = 4096
LANES = 8
LANE_LEN = 32
STEPS = (4, 56)  # of which the first update the table every second step, the others every fourth
COMPUTE = "bfloat16"  # of the table
EVAL_EVERY = 20
EVAL_TOKENS = 320
EVAL_LEN = 32
TARGET_LOSS = 9.0

normal, zeros = initializers.normal(0.5), initializers.zeros
PARAMETERS = {
    "head": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), normal, "all"),
    "rows": ParamSpec(
        (ROWS, WIDTH), ("row", "model"), zeros, "rows", dtype=COMPUTE, every=4, sparse_rows=1
    ),
    "zero": ParamSpec((VOCAB, WIDTH), ("token", "model"), normal, "all", every=4),
}


def rows_of(tokens_BT: jax.Array) -> jax.Array:
    """Return the row of each pair of tokens, ``[B, T]``."""
    return bigram_rows(tokens_BT, ROWS)


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads."""
    found_BTD = ctx.fetch(params["rows"], rows_of(tokens_BT))
    return found_BTD.astype(jnp.float32) + params["zero"][tokens_BT]


def head(head_VD: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Return raw logits ``[B, T, V]``."""
    return x_BTD @ head_VD.T


def logits(params: dict[str, jax.Array], x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """Return logits ``[B, T, V]``."""
    return head(params["head"], x_BTD)


def forward(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return logits ``[B, T, V]``."""
    return logits(params, hidden(params, tokens_BT, ctx), ctx)


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
    """Adam on everything but the rows."""
    adam = optax.with_extra_args_support(optax.adam(0.01))
    return optax.partition({"all": adam}, groups(PARAMETERS))


def row_optimizers() -> dict[str, RowTransformation]:
    """Adam on the rows that tokens have named."""
    falling = lambda update: 0.1 * 0.95**update  # noqa: E731
    betas = lambda update: jnp.where(update < 2, 0.9, 0.95)  # noqa: E731
    return {"rows": row_adam(falling, betas, eps=1e-8, weight_decay=lambda update: 2.0)}


RECIPE = Recipe(
    name="bigrams",
    parent=None,
    data=Data("toy", vocab_size=VOCAB, bos_id=256),
    target_loss=TARGET_LOSS,
    parameters=PARAMETERS,
    forward=forward,
    hidden=hidden,
    logits=logits,
    loss=loss,
    optimizer=optimizer,
    row_optimizers=row_optimizers,
    named_rows={"rows": rows_of},
    stages=(Stage(STEPS[0], LANE_LEN, every=2), Stage(STEPS[1], LANE_LEN)),
    lanes=LANES,
    eval_every=EVAL_EVERY,
    eval_tokens=EVAL_TOKENS,
    eval_len=EVAL_LEN,
    attention_width=WIDTH,
    layers=1,
)
