"""llmc: record 1, the GPT-2 of llm.c. LayerNorm, GELU, learned positions, biases, tied head, AdamW.

What        The point of departure: GPT-2 124M as llm.c trains it, with llm.c's published settings.
            One change: the padded rows of the vocabulary are part of the softmax, as in every later
            record.
Departures  Shards are read in order; llm.c shuffles them, and the batches in each.
Source      llm.c's GPT-2 124M settings and modded-nanogpt record 1: 45 minutes on 8xH100, 3.2722.
Hardware    8xH100: not run here. On CPU at a small size: benchmarks/quality.md.
Parent      none
"""

import jax
import jax.numpy as jnp
import optax
from jax.nn import initializers

from jspeed.model import fp8
from jspeed.model.attention import attention
from jspeed.model.layers import layer_norm, lookup, positions
from jspeed.model.losses import Head, cross_entropy, softcap
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Stage, map_specs

# Model
VOCAB = 50_304  # 50,257 rounded up to a multiple of 128
BOS = 50_256
WIDTH = 768
LAYERS = 12
HEADS = 12
MLP_WIDTH = 3072
COMPUTE = "bfloat16"  # dtype of activations and of the weights they meet
INIT_STD = 0.02

# Batch: lanes x lane length tokens a step
LANES = 512
LANE_LEN = 1024
STEPS = 19_560

# Optimizer
LEARNING_RATE = 6e-4
WARMUP = 700  # steps
BETA1 = 0.9
BETA2 = 0.95
EPS = 1e-8
WEIGHT_DECAY = 0.1  # on matrices and tables
CLIP = 1.0  # norm of the whole gradient; 0 does not clip

# Evaluation
TARGET_LOSS = 3.28  # nats per token
EVAL_EVERY = 250
EVAL_TOKENS = 10_485_760
EVAL_LEN = 1024

normal = initializers.normal(INIT_STD)
residual = initializers.normal(INIT_STD / (2 * LAYERS) ** 0.5)
ones, zeros = initializers.ones, initializers.zeros


def matrix(init: initializers.Initializer, **axes: int) -> ParamSpec:
    """One matrix per layer, its axes with their sizes."""
    return ParamSpec((LAYERS, *axes.values()), ("layer", *axes), init, "decay", COMPUTE)


def vector(width: int, init: initializers.Initializer) -> ParamSpec:
    """One vector per layer."""
    return ParamSpec((LAYERS, width), ("layer", "hidden"), init, "vectors", COMPUTE)


# "qkv" goes head by head, each its query, key and value, so that heads can be spread over devices.
PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), normal, "decay", COMPUTE),
    "positions": ParamSpec((LANE_LEN, WIDTH), ("position", "model"), normal, "decay", COMPUTE),
    "attention_gain": vector(WIDTH, ones),
    "attention_bias": vector(WIDTH, zeros),
    "qkv": matrix(normal, model=WIDTH, heads=3 * WIDTH),
    "qkv_bias": vector(3 * WIDTH, zeros),
    "out": matrix(residual, heads=WIDTH, model=WIDTH),
    "out_bias": vector(WIDTH, zeros),
    "mlp_gain": vector(WIDTH, ones),
    "mlp_bias": vector(WIDTH, zeros),
    "up": matrix(normal, model=WIDTH, mlp=MLP_WIDTH),
    "up_bias": vector(MLP_WIDTH, zeros),
    "down": matrix(residual, mlp=MLP_WIDTH, model=WIDTH),
    "down_bias": vector(WIDTH, zeros),
    "final_gain": ParamSpec((WIDTH,), ("model",), ones, "vectors", COMPUTE),
    "final_bias": ParamSpec((WIDTH,), ("model",), zeros, "vectors", COMPUTE),
}


def block(p: dict[str, jax.Array], x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """One layer, its parameters in ``p``."""
    width = WIDTH // HEADS
    a_BTD = layer_norm(x_BTD, p["attention_gain"], p["attention_bias"])
    qkv_BTHNK = (a_BTD @ p["qkv"] + p["qkv_bias"][None, None]).reshape(
        *x_BTD.shape[:2], HEADS, 3, width
    )
    y_BTHK = attention(*jnp.moveaxis(qkv_BTHNK, 3, 0), scale=width**-0.5, backend=ctx.attention)
    x_BTD += y_BTHK.reshape(x_BTD.shape) @ p["out"] + p["out_bias"][None, None]
    a_BTD = layer_norm(x_BTD, p["mlp_gain"], p["mlp_bias"])
    h_BTF = jax.nn.gelu(a_BTD @ p["up"] + p["up_bias"][None, None], approximate=True)
    return x_BTD + h_BTF @ p["down"] + p["down_bias"][None, None]


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads: ``[B, T, D]``."""
    x_BTD = lookup(params["embed"], tokens_BT) + positions(params["positions"], tokens_BT.shape[1])
    x_BTD = ctx.blocks(lambda p, x_BTD: block(p, x_BTD, ctx), PARAMETERS, LAYERS, params, x_BTD)
    return layer_norm(x_BTD, params["final_gain"], params["final_bias"])


def head(embed_VD: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Return logits ``[B, T, V]``: the embedding read backwards."""
    return fp8.matmul(x_BTD, embed_VD, None)


def logits(params: dict[str, jax.Array], x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """Return fp32 logits ``[B, T, V]``."""
    return softcap(head(params["embed"], x_BTD), None)


def forward(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return the logits of every position."""
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
    return cross_entropy(
        Head(head, ctx.head_chunk), params["embed"], x_BTD, targets_BT, weights_BT, cap=None
    )


def schedule() -> optax.Schedule:
    """Linear over ``WARMUP`` steps, then a cosine to 0."""
    warm_up = optax.linear_schedule(LEARNING_RATE / WARMUP, LEARNING_RATE, WARMUP - 1)
    return optax.join_schedules(
        [warm_up, optax.cosine_decay_schedule(LEARNING_RATE, STEPS - WARMUP)], [WARMUP]
    )


def optimizer() -> optax.GradientTransformation:
    """AdamW after clipping the whole gradient; decay on matrices and tables only."""
    decayed = map_specs(lambda spec: spec.group == "decay", PARAMETERS)
    adamw = optax.adamw(
        schedule(), b1=BETA1, b2=BETA2, eps=EPS, weight_decay=WEIGHT_DECAY, mask=decayed
    )
    return optax.chain(optax.clip_by_global_norm(CLIP) if CLIP else optax.identity(), adamw)


STAGES = (Stage(steps=STEPS, lane_len=LANE_LEN),)

RECIPE = Recipe(
    name="llmc",
    parent=None,
    track="fineweb/8xH100",
    data=Data("fineweb", vocab_size=50_257, bos_id=BOS),
    target_loss=TARGET_LOSS,
    parameters=PARAMETERS,
    forward=forward,
    loss=loss,
    hidden=hidden,
    logits=logits,
    optimizer=optimizer,
    stages=STAGES,
    lanes=LANES,
    eval_every=EVAL_EVERY,
    eval_tokens=EVAL_TOKENS,
    eval_len=EVAL_LEN,
    attention_width=WIDTH,
    layers=LAYERS,
    alike=True,
)
