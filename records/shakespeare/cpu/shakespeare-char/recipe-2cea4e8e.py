"""shakespeare-char: Shakespeare letter by letter; what the last five letters are is looked up, not computed.

What        Every letter brings the sum of five vectors, its own and one for each hash of the last 2 to 5 letters;
            one layer of the parts of stdlib makes the most of them (RoPE, QK-norm, squared ReLU, RMS norm without gain,
            zero-init output projections and head, softcapped logits). Muon on its matrices, Adam on table and head.
            A ninth of one pass over the text suffices. The whole held-out tenth validates.
Source      nanoGPT's setting for a CPU has the target: 1.88 after 2,000 steps of 12 rows of 64, with 4 layers of 128.
            modded-nanogpt for the parts; hashes of n-grams after its record 62. Sizes and rates tuned here.
Hardware    two CPU cores, two to three seconds. `python scripts/prepare.py shakespeare-char` fetches the data.
Parent      stdlib
"""

import jax
import jax.numpy as jnp
import optax
from jax.nn import initializers

from jspeed.model.attention import attention
from jspeed.model.fp8 import matmul
from jspeed.model.layers import relu_squared, rms_norm, rotary
from jspeed.model.losses import cross_entropy, sigmoid_cap, softcap
from jspeed.model.ngrams import ngram_rows
from jspeed.optim.muon import muon
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Sample, Stage, groups

# Model
VOCAB = 65
WIDTH = 64
LAYERS = 1
HEADS = 2
MLP_WIDTH = 256
ORDERS = (2, 3, 4, 5)  # letters that are hashed together
ROWS = 65_536  # of all of them
ATTENTION_SCALE = 0.12
SOFTCAP = 15.0

# Batch: lanes x lane length tokens a step
LANES = 64
LANE_LEN = 64
STEPS = 28

# Optimizer
MUON_LR = 0.06
HEAD_LR = 0.05
TABLE_LR = 0.2
ADAM_BETA1 = 0.6
ADAM_BETA2 = 0.95
ADAM_EPS = 1e-10
MOMENTUM = 0.85
COOLDOWN = 0.5  # fraction of the steps
FINAL_LR = 0.0  # fraction of the peak

# Evaluation
TARGET_LOSS = 1.88  # nats per character
EVAL_EVERY = 7
EVAL_TOKENS = 111_488
EVAL_LEN = 64

# std 0.5 / sqrt(fan_in), as in record 21
scaled = initializers.variance_scaling(0.25, "fan_in", "uniform", in_axis=-2, out_axis=-1, batch_axis=(0,))
zeros = initializers.zeros

PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("token", "model"), initializers.normal(1.0), "tables"),
    "ngrams": ParamSpec((ROWS, WIDTH), ("row", "model"), zeros, "tables"),
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
    x_BTD = params["embed"][tokens_BT]
    for order in ORDERS:
        x_BTD += ctx.fetch(params["ngrams"], ngram_rows(tokens_BT, order, ROWS))
    return rms_norm(ctx.blocks(block, PARAMETERS, LAYERS, params, rms_norm(x_BTD)))


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
    """Muon on the blocks, Adam on tables and head."""
    by_group = {
        "blocks": muon(falling(MUON_LR), lambda step: MOMENTUM, dtype=jnp.float32),
        "tables": adam(TABLE_LR),
        "head": adam(HEAD_LR),
    }
    return optax.partition(by_group, groups(PARAMETERS))


STAGES = (Stage(steps=STEPS, lane_len=LANE_LEN),)

RECIPE = Recipe(
    name="shakespeare-char",
    parent="stdlib",
    track="shakespeare/cpu",
    data=Data("shakespeare-char", vocab_size=VOCAB, bos_id=0, shuffle_block=LANE_LEN),
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
    sample=Sample(tokens=300, prompt="\n"),
)
