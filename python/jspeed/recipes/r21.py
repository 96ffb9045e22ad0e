"""r21: record 21. FP8 head, value embeddings, U-net skips, attention within documents and growing
windows.

What        Against track3: no biases and no gains; the embedding enters every layer again (block
            scales), three tables add to the values of the first and last three layers, the first
            half's outputs return in the second half (U-net), layer 7 has no attention; lanes of
            49,152 tokens with attention inside documents and windows that grow from 128 to 1,792
            tokens, half of that outside LONG_LAYERS; another softcap; the head in FP8; momentum
            warm-up, no weight decay, rates that end at a tenth; 384 Ki tokens a step, 1,770 steps.
Departures  A window of n blocks shows every query 128 n - 63 keys; the record's mask of blocks
            shows 128 (n - 1) + 1 to 128 n, by the query's place in its block, 128 n - 63.5 in the
            mean; tables and their Adam moments are stored in fp32, in the record in bf16; gradients
            of matrices and head are sent in bf16, not in fp32; the FP8 head quantises weights
            rounded to bf16, not fp32 ones: one in 32 gets its other neighbour, which moves logits
            by 1.6 % (rms; FP8 itself by 3.5 %); validation on the way uses the last stage's
            windows.
Source      modded-nanogpt record 21: 2.933 minutes on 8xH100 (100 ms a step), 3.2787 (n = 81).
Hardware    8xH100: compiled for it, not run here. On CPU at a small size: benchmarks/quality.md.
Parent      track3
"""

from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
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
ATTENTION_SCALE = 0.12
SOFTCAP = 15.0
COMPUTE = "bfloat16"  # dtype of activations, of the weights they meet, and of Newton-Schulz
FP8 = "auto"  # the head in training: auto (where it is native), on, off
# the attention bank is padded to a multiple of this, so that as many devices own equal parts
BANK = 8

# Batch: lanes x lane length tokens a step
LANES = 8
LANE_LEN = 49_152
MAX_DOCS = 192  # documents in one lane
STEPS = 1770

# Attention windows
BLOCK = 128  # tokens
WINDOW = 1728  # tokens that the window grows towards, rounded up to blocks
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
COOLDOWN = 0.4  # fraction of the steps
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
# The record multiplies by 2, 2^9 and, for the gradient of the mean over a lane, 2^19.
HEAD_SCALES = fp8.Scales(x=1 / 2, w=2**-9, grad=LANE_LEN / 2**19)


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

    def block(layer: int, x_BTD: jax.Array, skip_BTD: jax.Array | None) -> jax.Array:
        if skip_BTD is not None:
            x_BTD = mix(x_BTD, skip_BTD, 1.0, params["skip_scales"][layer - HALF])
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
            x_BTD += y_BTHK.reshape(x_BTD.shape) @ out
        up, down = params["mlp"][2 * layer : 2 * layer + 2]
        return x_BTD + relu_squared(rms_norm(x_BTD) @ up) @ down.T

    x_BTD = start_BTD = rms_norm(lookup(params["embed"], tokens_BT))
    first_half: list[jax.Array] = []
    for layer in range(LAYERS):
        x_BTD = ctx.layer(partial(block, layer))(x_BTD, first_half.pop() if layer >= HALF else None)
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


def muon_on(scale: float | np.ndarray) -> optax.GradientTransformation:
    """Muon with the recipe's constants, its updates times ``scale``."""
    return muon(falling(MUON_LR), momentum, polynomial=NEWTON_SCHULZ_5, scale=scale, dtype=COMPUTE)


def adam(peak: float) -> optax.GradientTransformation:
    """Adam with the recipe's constants and schedule."""
    return optax.adam(falling(peak), b1=ADAM_BETA1, b2=ADAM_BETA2, eps=ADAM_EPS)


def optimizer() -> optax.GradientTransformation:
    """Muon on the blocks' matrices, Adam on the rest."""
    up_and_down = np.tile([(MLP_WIDTH / WIDTH) ** 0.5, 1.0], LAYERS)[:, None, None]
    by_group = {
        "attention": muon_on(1.0),
        "mlp": muon_on(up_and_down.astype(np.float32)),
        "embed": adam(EMBED_LR),
        "head": adam(HEAD_LR),
        "scalars": adam(SCALAR_LR),
    }
    return optax.partition(by_group, groups(PARAMETERS))


def blocks_at(step: int) -> int:
    """Blocks in the long window at ``step``: linear to ``WINDOW`` tokens, rounded up, at least
    one."""
    return max(1, -(-WINDOW * step // (STEPS * BLOCK)))


def windows_of(blocks: int) -> tuple[int, ...]:
    """The window of every layer in tokens: ``blocks`` in LONG_LAYERS, half of them elsewhere, the
    newest half full."""
    most = [blocks if layer in LONG_LAYERS else max(1, blocks // 2) for layer in range(LAYERS)]
    return tuple(BLOCK * n - BLOCK // 2 + 1 for n in most)


STAGES = tuple(
    Stage(steps=len(list(steps)), lane_len=LANE_LEN, max_docs=MAX_DOCS, windows=windows_of(blocks))
    for blocks, steps in groupby(range(STEPS), blocks_at)
)

RECIPE = Recipe(
    name="r21",
    parent="track3",
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
)
