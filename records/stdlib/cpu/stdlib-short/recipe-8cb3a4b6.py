"""stdlib-short: rows of 64 bytes instead of 128, because attention and its rows of keys are then half as long.

What        The idea: at this width attention is a small part of a step, but every position of a row that is not there
            need not be attended to, and growing windows bought time at GPU size (records 13 and 17). So twice as many
            rows of half the length: the same tokens a step and the same number of steps. What speaks against it:
            a byte sees 32 bytes before it on average instead of 64, half a line of code.
Source      own
Hardware    two CPU cores. Result: see the board, stdlib/cpu.
Parent      stdlib: LANES, LANE_LEN and EVAL_LEN
"""

import jax
import jax.numpy as jnp
import optax
from jax.nn import initializers

from jspeed.model.attention import attention
from jspeed.model.fp8 import matmul
from jspeed.model.layers import relu_squared, rms_norm, rotary
from jspeed.model.losses import cross_entropy, sigmoid_cap, softcap
from jspeed.optim.muon import muon
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Stage, groups

# Model
VOCAB = 272  # 256 bytes and the document start, rounded up to a multiple of 16
WIDTH = 192
LAYERS = 4
HEADS = 3
MLP_WIDTH = 768
ATTENTION_SCALE = 0.12
SOFTCAP = 15.0

# Batch: lanes x lane length tokens a step
LANES = 32
LANE_LEN = 64
STEPS = 250

# Optimizer
MUON_LR = 0.035
HEAD_LR = 0.008
EMBED_LR = 0.3
ADAM_BETA1 = 0.8
ADAM_BETA2 = 0.95
ADAM_EPS = 1e-10
MOMENTUM_START = 0.8
MOMENTUM_END = 0.9
MOMENTUM_WARMUP = 250  # steps
COOLDOWN = 0.6  # fraction of the steps
FINAL_LR = 0.0  # fraction of the peak

# Evaluation
TARGET_LOSS = 1.4  # nats per byte
EVAL_EVERY = 25
EVAL_TOKENS = 65_536
EVAL_LEN = 64

# std 0.5 / sqrt(fan_in), as in record 21
scaled = initializers.variance_scaling(0.25, "fan_in", "uniform", in_axis=-2, out_axis=-1, batch_axis=(0,))
zeros = initializers.zeros

PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("token", "model"), initializers.normal(1.0), "embed"),
    "query": ParamSpec((LAYERS, WIDTH, WIDTH), ("matrix", "model", "heads"), scaled, "blocks"),
    "key": ParamSpec((LAYERS, WIDTH, WIDTH), ("matrix", "model", "heads"), scaled, "blocks"),
    "value": ParamSpec((LAYERS, WIDTH, WIDTH), ("matrix", "model", "heads"), scaled, "blocks"),
    "out": ParamSpec((LAYERS, WIDTH, WIDTH), ("matrix", "heads", "model"), zeros, "blocks"),
    "up": ParamSpec((LAYERS, WIDTH, MLP_WIDTH), ("matrix", "model", "mlp"), scaled, "blocks"),
    "down": ParamSpec((LAYERS, MLP_WIDTH, WIDTH), ("matrix", "mlp", "model"), zeros, "blocks"),
    "head": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), zeros, "head"),
}


def block(p: dict[str, jax.Array], x_BTD: jax.Array) -> jax.Array:
    """One layer, its parameters in ``p``."""
    heads = (*x_BTD.shape[:2], HEADS, WIDTH // HEADS)
    a_BTD = rms_norm(x_BTD)
    q_BTHK = rotary(rms_norm((a_BTD @ p["query"]).reshape(heads)))
    k_BTHK = rotary(rms_norm((a_BTD @ p["key"]).reshape(heads)))
    v_BTHK = (a_BTD @ p["value"]).reshape(heads)
    x_BTD += attention(q_BTHK, k_BTHK, v_BTHK, scale=ATTENTION_SCALE).reshape(x_BTD.shape) @ p["out"]
    return x_BTD + relu_squared(rms_norm(x_BTD) @ p["up"]) @ p["down"]


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads: fp32 ``[B, T, D]``."""
    return rms_norm(ctx.blocks(block, PARAMETERS, LAYERS, params, rms_norm(params["embed"][tokens_BT])))


def head(head_VD: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Return raw logits ``[B, T, V]``."""
    return matmul(x_BTD, head_VD, scales=None)


def forward(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return softcapped logits ``[B, T, V]``."""
    return softcap(head(params["head"], hidden(params, tokens_BT, ctx)), sigmoid_cap(SOFTCAP))


def loss(
    params: dict[str, jax.Array],
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    ctx: Context,
) -> tuple[jax.Array, jax.Array]:
    """Return (weighted sum, loss of every token in nats)."""
    x_BTD = hidden(params, tokens_BT, ctx)
    cap = sigmoid_cap(SOFTCAP)
    return cross_entropy(head, params["head"], x_BTD, targets_BT, weights_BT, cap=cap)


def falling(peak: float) -> optax.Schedule:
    """Constant at ``peak``, then linear to ``FINAL_LR * peak`` over the last ``COOLDOWN`` of the steps."""
    steps = round(COOLDOWN * STEPS)
    return optax.linear_schedule(peak, FINAL_LR * peak, steps, transition_begin=STEPS - steps)


def momentum(step: jax.Array) -> jax.Array:
    """Muon's momentum, warmed up linearly."""
    return optax.linear_schedule(MOMENTUM_START, MOMENTUM_END, MOMENTUM_WARMUP)(step)


def adam(peak: float) -> optax.GradientTransformation:
    """Adam with the recipe's constants and schedule."""
    return optax.adam(falling(peak), b1=ADAM_BETA1, b2=ADAM_BETA2, eps=ADAM_EPS)


def optimizer() -> optax.GradientTransformation:
    """Muon on the blocks, Adam on embedding and head."""
    by_group = {
        "blocks": muon(falling(MUON_LR), momentum, dtype=jnp.float32),
        "embed": adam(EMBED_LR),
        "head": adam(HEAD_LR),
    }
    return optax.partition(by_group, groups(PARAMETERS))


STAGES = (Stage(steps=STEPS, lane_len=LANE_LEN),)

RECIPE = Recipe(
    name="stdlib-short",
    parent="stdlib",
    track="stdlib/cpu",
    data=Data("stdlib", vocab_size=257, bos_id=256, shuffle_block=LANE_LEN),
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
)
