"""r29: record 29. r21 on whole documents, with three windows and gated attention heads.

What        Against r21: every lane is filled with documents from their start, cut at 2,048 tokens;
            windows of 3, 7 and 11 blocks, a third of the run each; each head's output is multiplied
            by a gate that reads the first twelve channels; FP8 scales for the summed loss, as
            Adam's epsilon is; a longer cooldown; 1,670 steps.
Departures  r21's, its mask apart; Adam's epsilon is added after bias correction, in the record
            before: its rows of tables whose gradients are near 1e-9 move up to 1.3 % (norm) less in
            the first step, none below 1e-4.
Source      modded-nanogpt record 29: 2.731 minutes on 8xH100 (98 ms a step), 3.2769 (n = 7).
Hardware    8xH100: compiled for it, not run here.
Parent      r21
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import optax
from jax.nn import initializers

from jspeed.model import fp8
from jspeed.model.attention import attention, find_documents
from jspeed.model.layers import lookup, mix, relu_squared, rms_norm, rotary, zero_every
from jspeed.model.losses import Head, cross_entropy, sigmoid_cap, softcap
from jspeed.optim.muon import NEWTON_SCHULZ_5, muon
from jspeed.optim.schedules import through
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Stage, groups

# Model
VOCAB = 50_304  # 50,257 rounded up to a multiple of 128
BOS = 50_256
WIDTH = 768
LAYERS = 12
HEADS = 6
MLP_WIDTH = 3072
NO_ATTENTION = 7  # the layer without
VALUE_TABLES = 3
GATE_WIDTH = 12  # channels that the attention gate reads
ATTENTION_SCALE = 0.12
SOFTCAP = 15.0
COMPUTE = "bfloat16"  # dtype of activations, of the weights they meet, and of Newton-Schulz
FP8 = "auto"  # the head in training: auto (where it is native), on, off
# the attention bank is padded to a multiple of this, so that as many devices own equal parts
BANK = 8

# Batch: lanes x lane length tokens a step
LANES = 8
LANE_LEN = 49_152
MAX_DOC_LEN = 2048
MAX_DOCS = 192  # documents in one lane
STEPS = 1670

# Attention windows
BLOCK = 128  # tokens
WINDOWS = (3, 7, 11)  # blocks in the long window, for an equal part of the run each
LONG_LAYERS = (0, 4, 7, 11)

# Optimizer
MUON_LR = 0.05
MOMENTUM_START = 0.85
MOMENTUM_END = 0.95
MOMENTUM_WARMUP = 300  # steps
EMBED_LR = 0.6
HEAD_LR = 0.008
SCALAR_LR = 0.04
ADAM_BETA1 = 0.8
ADAM_BETA2 = 0.95
ADAM_EPS = 1e-10
COOLDOWN = 0.45  # fraction of the steps
FINAL_LR = 0.1  # fraction of the peak

# Evaluation
TARGET_LOSS = 3.28  # nats per token
EVAL_EVERY = 125
EVAL_TOKENS = 10_485_760
EVAL_LEN = 262_144

# std 0.5 / sqrt(fan_in)
scaled = initializers.variance_scaling(
    0.25, "fan_in", "uniform", in_axis=-2, out_axis=-1, batch_axis=(0,)
)
normal, ones, zeros = initializers.normal(1.0), initializers.ones, initializers.zeros
CAP = sigmoid_cap(SOFTCAP)

HALF = LAYERS // 2
MATRICES = 4 * (LAYERS - (NO_ATTENTION < LAYERS))
PADDING = -MATRICES % BANK
HEAD_SCALES = fp8.Scales(x=WIDTH**0.5 / 448, w=2**-9, grad=1 / 448)


def bank(init: initializers.Initializer, group: str, *shape: int, padding: int = 0) -> ParamSpec:
    """Matrices of one shape for Muon, ``[n, in, out]``."""
    return ParamSpec(shape, ("matrix", "in", "out"), init, group, COMPUTE, padding)


def pairs(*start: float) -> ParamSpec:
    """Two scalars for every layer."""
    return ParamSpec(
        (LAYERS, 2),
        ("layer", "pair"),
        lambda _, shape, dtype: jnp.array([start] * shape[0], dtype),
        "scalars",
    )


# The bank "attention" holds query, key, value and output of the first layer that attends, then of
# the next, ...; the bank "mlp" up and down of every layer, down transposed.
PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("token", "model"), normal, "embed", COMPUTE),
    "values": ParamSpec(
        (VALUE_TABLES, VOCAB, WIDTH), ("table", "token", "model"), normal, "embed", COMPUTE
    ),
    "block_scales": pairs(1.0, 0.0),
    "value_scales": pairs(0.5, 0.5),
    "skip_scales": ParamSpec((HALF,), ("layer",), ones, "scalars"),
    "attention": bank(
        zero_every(4, scaled), "attention", MATRICES + PADDING, WIDTH, WIDTH, padding=PADDING
    ),
    "mlp": bank(zero_every(2, scaled), "mlp", 2 * LAYERS, WIDTH, MLP_WIDTH),
    "gate": bank(zeros, "gate", LAYERS, GATE_WIDTH, HEADS),
    "head": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), zeros, "head", COMPUTE),
}


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads: ``[B, T, D]``."""
    heads = (*tokens_BT.shape, HEADS, WIDTH // HEADS)
    documents = find_documents(tokens_BT, BOS, ctx.stage.max_docs, ctx.stage.max_doc_len)
    windows = ctx.stage.windows or (None,) * LAYERS
    values = [lookup(table, tokens_BT).reshape(heads) for table in params["values"]]
    value_of = {layer: values[layer] for layer in range(VALUE_TABLES)}
    value_of |= {LAYERS - VALUE_TABLES + n: value for n, value in enumerate(values)}
    attending = [layer for layer in range(LAYERS) if layer != NO_ATTENTION]

    x_BTD = start_BTD = rms_norm(lookup(params["embed"], tokens_BT))
    first_half: list[jax.Array] = []
    for layer in range(LAYERS):
        if layer >= HALF:
            x_BTD = mix(x_BTD, first_half.pop(), 1.0, params["skip_scales"][layer - HALF])
        x_BTD = mix(x_BTD, start_BTD, *params["block_scales"][layer])
        if layer in attending:
            row = 4 * attending.index(layer)
            query, key, value, out = params["attention"][row : row + 4]
            a_BTD = rms_norm(x_BTD)
            q_BTHK = rotary(rms_norm((a_BTD @ query).reshape(heads)))
            k_BTHK = rotary(rms_norm((a_BTD @ key).reshape(heads)))
            v_BTHK = (a_BTD @ value).reshape(heads)
            v_BTHK = mix(v_BTHK, value_of.get(layer, 0.0), *params["value_scales"][layer])
            y_BTHK = attention(
                q_BTHK,
                k_BTHK,
                v_BTHK,
                scale=ATTENTION_SCALE,
                documents=documents,
                window=windows[layer],
                backend=ctx.attention,
            )
            gate_BTH = jax.nn.sigmoid(a_BTD[..., :GATE_WIDTH] @ params["gate"][layer])
            x_BTD += (y_BTHK * gate_BTH[..., None]).reshape(x_BTD.shape) @ out
        up, down = params["mlp"][2 * layer : 2 * layer + 2]
        x_BTD += relu_squared(rms_norm(x_BTD) @ up) @ down.T
        if layer < HALF:
            first_half.append(x_BTD)
    return rms_norm(x_BTD)


def logits(params: dict[str, jax.Array], x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """Return softcapped fp32 logits ``[B, T, V]``."""
    return softcap(fp8.matmul(x_BTD, params["head"], None), CAP)


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
    scales = HEAD_SCALES if ctx.use_fp8(FP8) else None
    x_BTD = hidden(params, tokens_BT, ctx)

    def head(head_VD: jax.Array, x_BTD: jax.Array) -> jax.Array:
        return fp8.matmul(x_BTD, head_VD, scales)

    return cross_entropy(
        Head(head, ctx.head_chunk), params["head"], x_BTD, targets_BT, weights_BT, cap=CAP
    )


def falling(peak: float) -> optax.Schedule:
    """Constant at ``peak``, then linear to ``FINAL_LR * peak`` over the last ``COOLDOWN`` of the
    steps."""
    return through({(1 - COOLDOWN) * STEPS: peak, STEPS: FINAL_LR * peak})


def momentum(step: jax.Array) -> jax.Array:
    """Muon's momentum, warmed up linearly."""
    return optax.linear_schedule(MOMENTUM_START, MOMENTUM_END, MOMENTUM_WARMUP)(step)


def adam(peak: float) -> optax.GradientTransformation:
    """Adam with the recipe's constants and schedule."""
    return optax.adam(falling(peak), b1=ADAM_BETA1, b2=ADAM_BETA2, eps=ADAM_EPS)


def optimizer() -> optax.GradientTransformation:
    """Muon on the blocks' matrices, Adam on the rest."""
    # No shape has a rate of its own: the record stores up, like down, with fewer rows than columns.
    matrices = muon(
        falling(MUON_LR), momentum, polynomial=NEWTON_SCHULZ_5, scale=1.0, dtype=COMPUTE
    )
    by_group = {
        "attention": matrices,
        "mlp": matrices,
        "gate": matrices,
        "embed": adam(EMBED_LR),
        "head": adam(HEAD_LR),
        "scalars": adam(SCALAR_LR),
    }
    # ADAM_EPS is meant for gradients of the summed loss of a lane.
    return optax.chain(optax.scale(LANE_LEN), optax.partition(by_group, groups(PARAMETERS)))


def windows_of(blocks: int) -> tuple[int, ...]:
    """The window of every layer in tokens, itself and so many blocks before it; half of them but in
    LONG_LAYERS."""
    return tuple(
        1 + BLOCK * (blocks if layer in LONG_LAYERS else blocks // 2) for layer in range(LAYERS)
    )


STARTS = [-(-STEPS * n // len(WINDOWS)) for n in range(len(WINDOWS) + 1)]
STAGES = tuple(
    Stage(stop - start, LANE_LEN, MAX_DOC_LEN, MAX_DOCS, windows_of(blocks))
    for blocks, (start, stop) in zip(WINDOWS, pairwise(STARTS), strict=True)
)

RECIPE = Recipe(
    name="r29",
    parent="r21",
    track="fineweb/8xH100",
    data=Data("fineweb", vocab_size=50_257, bos_id=BOS, align="bos"),
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
)
