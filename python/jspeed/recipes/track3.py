"""track3: one fixed architecture for comparing optimizers. RoPE, QK-norm, squared ReLU, Muon +
AdamW.

What        Against llmc: rotary positions instead of learned ones, RMS norm, QK-norm, squared ReLU,
            six heads of 128, an untied head, softcapped logits, output projections and head that
            start at zero; Muon on the matrices of the blocks; a constant learning rate that falls
            linearly over the last 70 % of 3,250 steps.
Departures  The embedding and its Adam moments are stored in fp32, in the original in bf16;
            gradients of matrices and head are sent in bf16, in the original in fp32.
Source      modded-nanogpt's track 3 (optimization benchmark) and its tuned Muon baseline, entry 36:
            3.2787 (n = 10) at 155 ms a step on 8xH100.
Hardware    8xH100: not run here. On CPU at a small size: benchmarks/quality.md.
Parent      llmc
"""

import jax
import numpy as np
import optax
from jax.nn import initializers

from jspeed.model import fp8
from jspeed.model.attention import attention
from jspeed.model.layers import lookup, relu_squared, rms_norm, rotary, zero_every
from jspeed.model.losses import Head, cross_entropy, root_cap, softcap
from jspeed.optim.muon import NEWTON_SCHULZ_12, muon
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Stage, groups

# Model
VOCAB = 50_304  # 50,257 rounded up to a multiple of 128
BOS = 50_256
WIDTH = 768
LAYERS = 12
HEADS = 6
MLP_WIDTH = 3072
ATTENTION_SCALE = 0.12
SOFTCAP = 15.0
COMPUTE = "bfloat16"  # dtype of activations, of the weights they meet, and of Newton-Schulz
INIT_VARIANCE = 0.33  # over fan-in

# Batch: lanes x lane length tokens a step
LANES = 512
LANE_LEN = 1024
STEPS = 3250

# Optimizer
MUON_LR = 0.025
MUON_DECAY = 0.05
MOMENTUM = 0.95
EMBED_LR = 0.7
HEAD_LR = 0.004
VECTOR_LR = 0.015
ADAM_BETA1 = 0.8
ADAM_BETA2 = 0.95
ADAM_EPS = 1e-10
ADAM_DECAY = 0.001
COOLDOWN = 0.7  # fraction of the steps
FINAL_LR = 0.0  # fraction of the peak

# Evaluation
TARGET_LOSS = 3.28  # nats per token
EVAL_EVERY = 125
EVAL_TOKENS = 10_485_760
EVAL_LEN = 1024

scaled = initializers.variance_scaling(
    INIT_VARIANCE, "fan_in", "normal", in_axis=-2, out_axis=-1, batch_axis=(0,)
)
normal, ones, zeros = initializers.normal(1.0), initializers.ones, initializers.zeros
CAP = root_cap(SOFTCAP)


def bank(init: initializers.Initializer, group: str, size: int, **axes: int) -> ParamSpec:
    """Matrices of one shape for Muon: so many, and their axes with the sizes of these."""
    return ParamSpec((size, *axes.values()), ("matrix", *axes), init, group, COMPUTE)


def vector(*shape: int, init: initializers.Initializer) -> ParamSpec:
    """Gains or biases of all layers."""
    return ParamSpec(shape, ("layer", "hidden")[-len(shape) :], init, "vectors", COMPUTE)


# The bank "attention" holds query, key, value and output of layer 0, then of layer 1, ...; the bank
# "mlp" up and down. Output and down are stored transposed, so that the columns of all belong to
# heads, or to hidden units.
PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("token", "model"), normal, "embed", COMPUTE),
    "embed_gain": vector(WIDTH, init=ones),
    "attention_gain": vector(LAYERS, WIDTH, init=ones),
    "attention": bank(zero_every(4, scaled), "attention", 4 * LAYERS, model=WIDTH, heads=WIDTH),
    "attention_bias": vector(4 * LAYERS, WIDTH, init=zeros),
    "mlp_gain": vector(LAYERS, WIDTH, init=ones),
    "mlp": bank(zero_every(2, scaled), "mlp", 2 * LAYERS, model=WIDTH, mlp=MLP_WIDTH),
    "up_bias": vector(LAYERS, MLP_WIDTH, init=zeros),
    "down_bias": vector(LAYERS, WIDTH, init=zeros),
    "final_gain": vector(WIDTH, init=ones),
    "head": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), zeros, "head", COMPUTE),
    "head_bias": vector(VOCAB, init=zeros),
}


def norm(x_BTD: jax.Array, gain_D: jax.Array) -> jax.Array:
    """RMS norm with a gain."""
    return rms_norm(x_BTD) * gain_D[None, None]


def block(p: dict[str, jax.Array], x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """One layer, its parameters in ``p``."""
    heads = (*x_BTD.shape[:2], HEADS, WIDTH // HEADS)
    query, key, value, out = p["attention"]
    bias = p["attention_bias"][:, None, None]
    a_BTD = norm(x_BTD, p["attention_gain"])
    q_BTHK = rotary(rms_norm((a_BTD @ query + bias[0]).reshape(heads)))
    k_BTHK = rotary(rms_norm((a_BTD @ key + bias[1]).reshape(heads)))
    v_BTHK = (a_BTD @ value + bias[2]).reshape(heads)
    y_BTHK = attention(q_BTHK, k_BTHK, v_BTHK, scale=ATTENTION_SCALE, backend=ctx.attention)
    x_BTD += y_BTHK.reshape(x_BTD.shape) @ out.T + bias[3]
    up, down = p["mlp"]
    h_BTF = relu_squared(norm(x_BTD, p["mlp_gain"]) @ up + p["up_bias"][None, None])
    return x_BTD + h_BTF @ down.T + p["down_bias"][None, None]


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads: ``[B, T, D]``."""
    x_BTD = norm(lookup(params["embed"], tokens_BT), params["embed_gain"])
    x_BTD = ctx.blocks(lambda p, x_BTD: block(p, x_BTD, ctx), PARAMETERS, LAYERS, params, x_BTD)
    return norm(x_BTD, params["final_gain"])


def head(params: dict[str, jax.Array], x_BTD: jax.Array) -> jax.Array:
    """Return logits ``[B, T, V]`` before the softcap."""
    return fp8.matmul(x_BTD, params["head"], None) + params["head_bias"][None, None]


def logits(params: dict[str, jax.Array], x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """Return softcapped fp32 logits ``[B, T, V]``."""
    return softcap(head(params, x_BTD), CAP)


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
    head_params = {name: params[name] for name in ("head", "head_bias")}
    return cross_entropy(
        Head(head, ctx.head_chunk), head_params, x_BTD, targets_BT, weights_BT, cap=CAP
    )


def falling(peak: float) -> optax.Schedule:
    """Constant at ``peak``, then linear to ``FINAL_LR * peak`` over the last ``COOLDOWN`` of the
    steps."""
    steps = round(COOLDOWN * STEPS)
    return optax.linear_schedule(peak, FINAL_LR * peak, steps, transition_begin=STEPS - steps)


def momentum(step: jax.Array) -> float:
    """Muon's momentum: constant."""
    return MOMENTUM


def muon_on(scale: float | np.ndarray) -> optax.GradientTransformation:
    """Muon with the recipe's constants, its updates times ``scale``."""
    return muon(
        falling(MUON_LR),
        momentum,
        polynomial=NEWTON_SCHULZ_12,
        scale=scale,
        weight_decay=MUON_DECAY,
        dtype=COMPUTE,
    )


def adam(peak: float) -> optax.GradientTransformation:
    """AdamW with the recipe's constants and schedule."""
    return optax.adamw(
        falling(peak), b1=ADAM_BETA1, b2=ADAM_BETA2, eps=ADAM_EPS, weight_decay=ADAM_DECAY
    )


def optimizer() -> optax.GradientTransformation:
    """Muon on the blocks' matrices, AdamW on the rest."""
    up_and_down = np.tile([(MLP_WIDTH / WIDTH) ** 0.5, 1.0], LAYERS)[:, None, None]
    by_group = {
        "attention": muon_on(1.0),
        "mlp": muon_on(up_and_down.astype(np.float32)),
        "embed": adam(EMBED_LR),
        "head": adam(HEAD_LR),
        "vectors": adam(VECTOR_LR),
    }
    # ADAM_EPS is meant for gradients of the summed loss.
    return optax.chain(optax.scale(LANES * LANE_LEN), optax.partition(by_group, groups(PARAMETERS)))


STAGES = (Stage(steps=STEPS, lane_len=LANE_LEN),)

RECIPE = Recipe(
    name="track3",
    parent="llmc",
    track="fineweb/steps",
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
