"""stdlib-adamw: the stdlib recipe with AdamW instead of Muon on the matrices of the blocks.

What        The baseline that says what Muon is worth: same architecture, data, batch, Adam groups and shape of the
            schedule. AdamW has a warm-up and its own rate; rates 0.002 to 0.008 were tried at two lengths of run. The
            steps are as many as it needs to reach the target.
Hardware    two CPU cores, about two minutes. Expected: see benchmarks/cpu.md.
Parent      none
"""

import jax
import optax
from jax.nn import initializers

from jspeed.model.attention import attention
from jspeed.model.fp8 import matmul
from jspeed.model.layers import relu_squared, rms_norm, rotary
from jspeed.model.losses import cross_entropy, sigmoid_cap, softcap
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
LANES = 16
LANE_LEN = 128
STEPS = 540

# Optimizer
ADAMW_LR = 0.003
ADAMW_BETA1 = 0.9
ADAMW_BETA2 = 0.95
WEIGHT_DECAY = 0.1
WARMUP = 40  # steps
HEAD_LR = 0.008
EMBED_LR = 0.3
ADAM_BETA1 = 0.8
ADAM_BETA2 = 0.95
ADAM_EPS = 1e-10
COOLDOWN = 0.6  # fraction of the steps
FINAL_LR = 0.0  # fraction of the peak

# Evaluation
TARGET_LOSS = 1.4  # nats per byte
EVAL_EVERY = 54
EVAL_TOKENS = 65_536
EVAL_LEN = 128

# std 0.5 / sqrt(fan_in), as in record 21
scaled = initializers.variance_scaling(0.25, "fan_in", "uniform", in_axis=-2, out_axis=-1, batch_axis=(0,))
zeros = initializers.zeros

PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("token", "model"), initializers.normal(1.0), "embed"),
    "query": ParamSpec((LAYERS, WIDTH, WIDTH), ("layer", "model", "heads"), scaled, "blocks"),
    "key": ParamSpec((LAYERS, WIDTH, WIDTH), ("layer", "model", "heads"), scaled, "blocks"),
    "value": ParamSpec((LAYERS, WIDTH, WIDTH), ("layer", "model", "heads"), scaled, "blocks"),
    "out": ParamSpec((LAYERS, WIDTH, WIDTH), ("layer", "heads", "model"), zeros, "blocks"),
    "up": ParamSpec((LAYERS, WIDTH, MLP_WIDTH), ("layer", "model", "mlp"), scaled, "blocks"),
    "down": ParamSpec((LAYERS, MLP_WIDTH, WIDTH), ("layer", "mlp", "model"), zeros, "blocks"),
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


def adam(peak: float) -> optax.GradientTransformation:
    """Adam with the recipe's constants and schedule."""
    return optax.adam(falling(peak), b1=ADAM_BETA1, b2=ADAM_BETA2, eps=ADAM_EPS)


def optimizer() -> optax.GradientTransformation:
    """AdamW with a linear warm-up on the blocks, Adam on embedding and head."""
    warm = optax.linear_schedule(0.0, 1.0, WARMUP)

    def rate(step: jax.Array) -> jax.Array:
        return warm(step + 1) * falling(ADAMW_LR)(step)

    by_group = {
        "blocks": optax.adamw(rate, b1=ADAMW_BETA1, b2=ADAMW_BETA2, weight_decay=WEIGHT_DECAY),
        "embed": adam(EMBED_LR),
        "head": adam(HEAD_LR),
    }
    return optax.partition(by_group, groups(PARAMETERS))


STAGES = (Stage(steps=STEPS, lane_len=LANE_LEN),)

RECIPE = Recipe(
    name="stdlib-adamw",
    parent=None,
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
