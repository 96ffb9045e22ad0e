"""nanogpt: nanoGPT's Shakespeare letter by letter: LayerNorm, dropout, random windows, AdamW; the
MLP is SwiGLU.

What        The settings of nanoGPT's train_shakespeare_char.py: 6 layers of 384, 5,000 steps of 64
            windows of 256 letters that start anywhere, dropout 0.2, a warm-up and a cosine to a
            tenth of the rate. In place of GELU's MLP one of SwiGLU with as many parameters, after
            nanoJAXGPT.
Departures  Attention's probabilities are not dropped, since no fused attention of JAX drops them:
            dropout is on embeddings and on what attention and MLP add. The loss is that of the last
            step, nanoGPT's the best.
Source      nanoGPT, which reaches 1.4697 in 3 minutes on an A100; nanoJAXGPT for SwiGLU.
Hardware    one GPU: not run here. nanoGPT's README gives a setting for a CPU, "I only have a
            macbook": 1.88 in about 3 minutes. Here, on two cores (benchmarks/cpu.md):
            --set WIDTH=128 LAYERS=4 HEADS=4 DROPOUT=0.0 COMPUTE=float32 LANES=12 LANE_LEN=64
            EVAL_LEN=64 STEPS=2000 COOLDOWN=2000 TARGET_LOSS=1.88
Parent      gpt2
"""

import jax
import jax.numpy as jnp
import optax
from jax.nn import initializers

from jspeed.model import fp8
from jspeed.model.attention import attention
from jspeed.model.layers import dropout, lane_keys, layer_norm, lookup, positions
from jspeed.model.losses import Head, cross_entropy, softcap
from jspeed.model.mlp import swiglu, swiglu_width
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Sample, Stage, map_specs

# Model
VOCAB = 65
WIDTH = 384
LAYERS = 6
HEADS = 6
DROPOUT = 0.2  # probability that an element is zero, in training
DROPOUT_SEED = 0  # of the masks; --seed is that of weights and windows
COMPUTE = "bfloat16"  # dtype of activations and of the weights they meet
INIT_STD = 0.02

# Batch: lanes x lane length tokens a step
LANES = 64
LANE_LEN = 256
STEPS = 5000

# Optimizer
LEARNING_RATE = 1e-3
FINAL_RATE = 1e-4  # where the cosine ends
WARMUP = 100  # steps
COOLDOWN = 5000  # the step at which the cosine ends, from the start; 0 keeps the rate
BETA1 = 0.9
BETA2 = 0.99
EPS = 1e-8
WEIGHT_DECAY = 0.1  # on matrices and tables
CLIP = 1.0  # norm of the whole gradient; 0 does not clip

# Evaluation
TARGET_LOSS = 1.47  # nats per character
EVAL_EVERY = 250
EVAL_TOKENS = 111_488
EVAL_LEN = 256

MLP_WIDTH = swiglu_width(WIDTH)

normal = initializers.normal(INIT_STD)
residual = initializers.normal(INIT_STD / (2 * LAYERS) ** 0.5)


def matrix(init: initializers.Initializer, **axes: int) -> ParamSpec:
    """One matrix per layer, its axes with their sizes."""
    return ParamSpec((LAYERS, *axes.values()), ("layer", *axes), init, "decay", COMPUTE)


# "qkv" goes head by head, each its query, key and value, so that heads can be spread over devices.
PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), normal, "decay", COMPUTE),
    "positions": ParamSpec((LANE_LEN, WIDTH), ("position", "model"), normal, "decay", COMPUTE),
    "attention_gain": ParamSpec(
        (LAYERS, WIDTH), ("layer", "hidden"), initializers.ones, "vectors", COMPUTE
    ),
    "qkv": matrix(normal, model=WIDTH, heads=3 * WIDTH),
    "out": matrix(residual, heads=WIDTH, model=WIDTH),
    "mlp_gain": ParamSpec(
        (LAYERS, WIDTH), ("layer", "hidden"), initializers.ones, "vectors", COMPUTE
    ),
    "gate": matrix(normal, model=WIDTH, mlp=MLP_WIDTH),
    "up": matrix(normal, model=WIDTH, mlp=MLP_WIDTH),
    "down": matrix(residual, mlp=MLP_WIDTH, model=WIDTH),
    "final_gain": ParamSpec((WIDTH,), ("model",), initializers.ones, "vectors", COMPUTE),
}

Rows = tuple[jax.Array, jax.Array]
"""Activations ``[B, T, D]`` and the keys of their rows for the next dropout, ``[B, 2]``."""


def norm(x_BTD: jax.Array, gain_D: jax.Array) -> jax.Array:
    """LayerNorm without bias."""
    return layer_norm(x_BTD, gain_D, jnp.zeros_like(gain_D))


def block(p: dict[str, jax.Array], x: Rows, ctx: Context) -> Rows:
    """One layer, its parameters in ``p``."""
    x_BTD, keys_B2 = x
    rate = DROPOUT if ctx.training else 0.0
    width = WIDTH // HEADS
    qkv_BTHNK = (norm(x_BTD, p["attention_gain"]) @ p["qkv"]).reshape(
        *x_BTD.shape[:2], HEADS, 3, width
    )
    y_BTHK = attention(*jnp.moveaxis(qkv_BTHNK, 3, 0), scale=width**-0.5, backend=ctx.attention)
    y_BTD, keys_B2 = dropout(y_BTHK.reshape(x_BTD.shape) @ p["out"], keys_B2, rate)
    x_BTD += y_BTD
    y_BTD, keys_B2 = dropout(
        swiglu(norm(x_BTD, p["mlp_gain"]), p["gate"], p["up"], p["down"]), keys_B2, rate
    )
    return x_BTD + y_BTD, keys_B2


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads: ``[B, T, D]``."""
    keys_B2 = lane_keys(DROPOUT_SEED, ctx.step, ctx.first_lane, len(tokens_BT))
    x_BTD = lookup(params["embed"], tokens_BT) + positions(params["positions"], tokens_BT.shape[1])
    x = dropout(x_BTD, keys_B2, DROPOUT if ctx.training else 0.0)
    x_BTD, _ = ctx.blocks(lambda p, x: block(p, x, ctx), PARAMETERS, LAYERS, params, x)
    return norm(x_BTD, params["final_gain"])


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
    """Linear from 0 over ``WARMUP`` steps, then a cosine to ``FINAL_RATE`` at step ``COOLDOWN``,
    which stays."""
    if not COOLDOWN:
        return optax.warmup_constant_schedule(0.0, LEARNING_RATE, WARMUP)
    return optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, WARMUP, COOLDOWN, FINAL_RATE)


def optimizer() -> optax.GradientTransformation:
    """AdamW after clipping the whole gradient; decay on matrices and tables only."""
    decayed = map_specs(lambda spec: spec.group == "decay", PARAMETERS)
    adamw = optax.adamw(
        schedule(), b1=BETA1, b2=BETA2, eps=EPS, weight_decay=WEIGHT_DECAY, mask=decayed
    )
    return optax.chain(optax.clip_by_global_norm(CLIP) if CLIP else optax.identity(), adamw)


STAGES = (Stage(steps=STEPS, lane_len=LANE_LEN),)

RECIPE = Recipe(
    name="nanogpt",
    parent="gpt2",
    data=Data("shakespeare-char", vocab_size=VOCAB, bos_id=0, windows="random"),
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
    sample=Sample(tokens=300, prompt="\n"),
)
