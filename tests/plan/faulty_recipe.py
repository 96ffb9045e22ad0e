"""bad: a small recipe with faults that its fields switch on, to test findings: an embedding, a Muon
bank, a head.

WIDE_LOGITS keeps the logits in fp32 for a plain gradient; MATRICES that 8 does not divide cannot be
cut.
"""

import jax
import jax.numpy as jnp
import optax
from jax.nn import initializers

from jspeed.model.losses import cross_entropy
from jspeed.optim.muon import muon
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Stage, groups

VOCAB = 4096
WIDTH = 128
MATRICES = 8
LANES = 8
LANE_LEN = 512
WIDE_LOGITS = False
COMPUTE = "bfloat16"

normal = initializers.normal(0.1)
PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("token", "model"), normal, "rest", COMPUTE),
    "bank": ParamSpec((MATRICES, WIDTH, WIDTH), ("matrix", "in", "out"), normal, "bank", COMPUTE),
    "head": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), normal, "rest", COMPUTE),
}


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array) -> jax.Array:
    x_BTD = params["embed"][tokens_BT]
    for matrix in params["bank"]:
        x_BTD += jax.nn.relu(x_BTD @ matrix)
    return x_BTD


def head(head_VD: jax.Array, x_BTD: jax.Array) -> jax.Array:
    return x_BTD @ head_VD.T


def forward(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    return head(params["head"], hidden(params, tokens_BT)).astype(jnp.float32)


def loss(params, tokens_BT, targets_BT, weights_BT, ctx: Context) -> tuple[jax.Array, jax.Array]:
    x_BTD = hidden(params, tokens_BT)
    if not WIDE_LOGITS:
        return cross_entropy(head, params["head"], x_BTD, targets_BT, weights_BT, cap=None)
    logits_BTV = head(params["head"], x_BTD).astype(jnp.float32)
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    return jnp.sum(loss_BT * weights_BT), jax.lax.stop_gradient(loss_BT)


def optimizer() -> optax.GradientTransformation:
    by_group = {"bank": muon(0.02, lambda _: 0.9, dtype=COMPUTE), "rest": optax.adam(1e-3)}
    return optax.partition(by_group, groups(PARAMETERS))


RECIPE = Recipe(
    name="bad",
    parent=None,
    track="stdlib/cpu",
    data=Data("stdlib", vocab_size=257, bos_id=256),
    target_loss=1.0,
    parameters=PARAMETERS,
    forward=forward,
    loss=loss,
    optimizer=optimizer,
    stages=(Stage(steps=10, lane_len=LANE_LEN),),
    lanes=LANES,
    eval_every=10,
    eval_tokens=LANE_LEN,
    eval_len=LANE_LEN,
    attention_width=WIDTH,
    layers=1,
)
