"""microgpt-names: a model of 202,240 parameters that learns first names, letter by letter, and
invents some.

What        microgpt: four layers of width 64, RMS norm without gain, learned positions, ReLU, no
            biases, an untied head and no norm before it. A row is one name, BOS before and after
            it, then PAD, which the loss leaves out.
Source      skyward's "Distributed MicroGPT with JAX" (batch 64, Adam 3e-4 falling linearly to 0
            over 2,000 steps), after Karpathy's microgpt; names.txt of makemore. Here names come in
            seeded passes, without replacement.
Hardware    two CPU cores, about two minutes: a training loss of 2.104, the mean of the last 50
            steps, and of 2.164 on held-out names (seed 1). `python scripts/prepare.py names`
            fetches the data.
Parent      none
"""

import jax
import jax.numpy as jnp
import optax
from jax.nn import initializers

from jspeed.model.attention import attention
from jspeed.model.fp8 import matmul
from jspeed.model.layers import positions, rms_norm
from jspeed.model.losses import cross_entropy, softcap
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Sample, Stage

# Model
VOCAB = 28  # 26 letters, BOS, PAD
BOS = 26
PAD = 27
WIDTH = 64
LAYERS = 4
HEADS = 4
MLP_WIDTH = 256
INIT_STD = 0.08

# Batch: lanes x lane length tokens a step
LANES = 64
LANE_LEN = 32  # the row that prepare.py writes
STEPS = 2000

# Optimizer
LEARNING_RATE = 3e-4
BETA1 = 0.85
BETA2 = 0.99
EPS = 1e-8

# Evaluation
TARGET_LOSS = 2.2  # nats per letter
EVAL_EVERY = 250
EVAL_TOKENS = 10_528
EVAL_LEN = 32

normal = initializers.normal(INIT_STD)


def bank(**axes: int) -> ParamSpec:
    """One matrix per layer, its axes with their sizes."""
    return ParamSpec((LAYERS, *axes.values()), ("matrix", *axes), normal, "all")


PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("token", "model"), normal, "all"),
    "positions": ParamSpec((LANE_LEN, WIDTH), ("position", "model"), normal, "all"),
    "query": bank(model=WIDTH, heads=WIDTH),
    "key": bank(model=WIDTH, heads=WIDTH),
    "value": bank(model=WIDTH, heads=WIDTH),
    "out": bank(heads=WIDTH, model=WIDTH),
    "up": bank(model=WIDTH, mlp=MLP_WIDTH),
    "down": bank(mlp=MLP_WIDTH, model=WIDTH),
    "head": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), normal, "all"),
}


def block(p: dict[str, jax.Array], x_BTD: jax.Array) -> jax.Array:
    """One layer, its parameters in ``p``."""
    heads = (*x_BTD.shape[:2], HEADS, WIDTH // HEADS)
    a_BTD = rms_norm(x_BTD)
    q_BTHK, k_BTHK, v_BTHK = (
        (a_BTD @ p[name]).reshape(heads) for name in ("query", "key", "value")
    )
    y_BTHK = attention(q_BTHK, k_BTHK, v_BTHK, scale=(WIDTH // HEADS) ** -0.5)
    x_BTD += y_BTHK.reshape(x_BTD.shape) @ p["out"]
    return x_BTD + jax.nn.relu(rms_norm(x_BTD) @ p["up"]) @ p["down"]


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads: fp32 ``[B, T, D]``."""
    x_BTD = rms_norm(
        params["embed"][tokens_BT] + positions(params["positions"], tokens_BT.shape[1])
    )
    return ctx.blocks(block, PARAMETERS, LAYERS, params, x_BTD)


def head(head_VD: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Return logits ``[B, T, V]``."""
    return matmul(x_BTD, head_VD, scales=None)


def forward(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return fp32 logits ``[B, T, V]``."""
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


def weigh(tokens_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Count letters and the BOS that ends a name, not PAD nor what follows it."""
    return ((tokens_BT != PAD) & (targets_BT != PAD)).astype(jnp.float32)


def optimizer() -> optax.GradientTransformation:
    """Adam on everything, its rate falling linearly to 0."""
    return optax.adam(optax.linear_schedule(LEARNING_RATE, 0.0, STEPS), b1=BETA1, b2=BETA2, eps=EPS)


STAGES = (Stage(steps=STEPS, lane_len=LANE_LEN),)

RECIPE = Recipe(
    name="microgpt-names",
    parent=None,
    data=Data("names", vocab_size=VOCAB, bos_id=BOS, shuffle_block=LANE_LEN),
    target_loss=TARGET_LOSS,
    parameters=PARAMETERS,
    forward=forward,
    loss=loss,
    optimizer=optimizer,
    stages=STAGES,
    lanes=LANES,
    eval_every=EVAL_EVERY,
    eval_tokens=EVAL_TOKENS,
    eval_len=EVAL_LEN,
    attention_width=WIDTH,
    layers=LAYERS,
    alike=True,
    weigh=weigh,
    sample=Sample(number=20, tokens=LANE_LEN - 1, temperature=0.5),
)
