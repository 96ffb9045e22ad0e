"""r62: record 62. Rows for pairs of tokens, several targets a token, paired heads, NorMuon, slow
tables, three batches.

What        Against r29: eleven layers; a hashed row for each pair of tokens enters every layer;
            each token predicts also the two after the next, less and less; batch, windows and rates
            grow in three stages, and rotary frequencies with the windows (YaRN); heads attend in
            pairs in four layers, keys look back one token in two; tokens are smeared; one skip and
            one layer taken back out replace the U-net; embedding and head are one table for two
            thirds of the run; NorMuon with Polar Express and cautious decay; all that Adam updates,
            every other step; another softcap and other FP8 scales; 1,600 steps.
Departures  Tables and their Adam moments are stored in fp32; cosines and sines are fp32 (1e-4 nats
            a token, rms); validation on the way uses the last windows and frequencies.
Source      modded-nanogpt record 62: 1.655 minutes on 8xH100 (61.3 ms a step), 3.2776 (n = 6).
Hardware    8xH100: compiled for it, not run here.
Parent      r29
"""

from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.nn import initializers

from jspeed.model import fp8
from jspeed.model.attention import attention, find_documents
from jspeed.model.layers import lookup, rms_norm, sparse_gate, uniform, zero_every
from jspeed.model.losses import Head, asymmetric_cap, cross_entropy, multi_token_targets, softcap
from jspeed.model.mlp import mlp
from jspeed.model.positions import frequencies, offset_keys, rotate, smear, yarn
from jspeed.optim.schedules import staged, through
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Stage, groups
from jspeed.speedrun.heads import attention_in_pairs, pair_positions
from jspeed.speedrun.ngrams import bigram_rows
from jspeed.speedrun.normuon import normuon
from jspeed.speedrun.slow import slow_adams, tied

# Model
VOCAB = 50_304  # 50,257 rounded up to a multiple of 128
BOS = 50_256
BIGRAMS = 251_520  # rows, 5 x VOCAB
WIDTH = 768
LAYERS = 11
HEADS = 6
MLP_WIDTH = 3072
NO_ATTENTION = 6  # the layer without; the output of SKIP_FROM enters before it
SKIP_FROM = 3
BACKOUT = 7  # the layer whose output is taken away again before the head
PAIRED_LAYERS = (0, 2, 5, 9)
LONG_LAYERS = (3, 10)  # with the long window and keys that look back
VALUE_TABLES = 3
VALUE_OF = {0: 1, 1: 2, 8: 0, 9: 1, 10: 2}  # layer: table
GATE_WIDTH = 12  # channels that a gate reads
ATTENTION_SCALE = 0.1  # in the first stage
COMPUTE = "bfloat16"  # dtype of activations, of the weights they meet, and of Polar Express
FP8 = "auto"  # the head in training: auto (where it is native), on, off

# Stages
LANES = 8
STEPS = (520, 520, 520, 40)
LANE_LENS = (16_384, 32_768, 49_152, 49_152)
MAX_DOC_LENS = (2048, 2048, 2048, 2048)
MAX_DOCS = (128, 128, 192, 192)  # documents in one lane
BLOCK = 128  # tokens
LONG_WINDOWS = (3, 7, 11, 13)  # blocks
SHORT_WINDOWS = (1, 3, 5, 6)
RATES = (1.0, 1.52, 1.73, 1.73)  # of all learning rates, for the larger batches
TARGETS = (3, 2, 1, 1)  # tokens ahead that a token predicts
SHARES = ({0: 1.0}, {520: 0.5, 1040: 0.0}, {0: 0.25, 520: 0.0})  # of each, lines between steps
LAST_TIED = 1041  # step in which embedding and head are one table

# Optimizer
MUON_LR = 0.023
MUON_BETA2 = 0.95
MUON_DECAY = 1.2
MOMENTUM = {0: 0.85, 300: 0.95, 1550: 0.95, 1600: 0.85}  # lines between steps
ADAM = {  # rate, betas, decay in units of ADAM_DECAY
    "words": (0.008, 0.5, 0.95, 150),
    "tables": (0.6, 0.75, 0.95, 5),
    "gates": (0.008, 0.9, 0.99, 1),
    "smear": (8e-5, 0.9, 0.99, 0),
    "skip": (4e-4, 0.9, 0.99, 0),
    "scalars": (0.04, 0.9, 0.99, 0),
    "start": (0.04, 0.65, 0.95, 0),
}
ADAM_EPS = 1e-10
ADAM_DECAY = 0.005
COOLDOWN = {702: 0.0, 1560: 1.0}  # how far rates have fallen, lines between steps
FINAL_RATE = 0.1

# Evaluation
TARGET_LOSS = 3.28  # nats per token
EVAL_EVERY = 250
EVAL_TOKENS = 10_485_760
EVAL_LEN = 262_144
EVAL_WINDOW = 20  # blocks in LONG_LAYERS

STARTS = (0, *accumulate(STEPS))
ATTENDING = [layer for layer in range(LAYERS) if layer != NO_ATTENTION]
CAP = asymmetric_cap(23.0, 5.0, 7.5)
HEAD_SCALES = fp8.Scales(x=100 / 448, w=1.6 / 448, grad=0.75 / 448)
# Rates rise a step after the batch: the record asks for more than a third, and two thirds, of the
# steps.
rate = staged(
    RATES, [start and start + 1 for start in STARTS[:-1]], fall=COOLDOWN, floor=FINAL_RATE
)
normal, zeros = initializers.normal(0.005), initializers.zeros


def bank(init: initializers.Initializer, group: str, count: int, *shape: int) -> ParamSpec:
    """Matrices of one shape for NorMuon, ``[n, in, out]``, padded so that LANES devices can share
    them."""
    padding = -count % LANES
    return ParamSpec(
        (count + padding, *shape), ("matrix", "in", "out"), init, group, COMPUTE, padding
    )


def slow(start: Any, group: str, *shape: int) -> ParamSpec:
    """Anything smaller: weights in the compute dtype by how they are drawn, or fp32 numbers by
    where they start."""
    init, compute = (
        (start, COMPUTE) if callable(start) else (initializers.constant(np.array(start)), None)
    )
    return ParamSpec(shape, ("layer", "in", "out")[: len(shape)], init, group, compute, every=2)


# The bank "attention" holds query, key, value and output of the first layer that attends, then of
# the next, ...; the bank "mlp" up and down of every layer, down transposed.
PARAMETERS = {
    "embed": ParamSpec(
        (VOCAB, WIDTH), ("token", "model"), normal, "words", COMPUTE, every=2, init_like="head"
    ),
    "head": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), normal, "words", COMPUTE, every=2),
    "values": ParamSpec(
        (VALUE_TABLES, VOCAB, WIDTH), ("table", "token", "model"), zeros, "tables", COMPUTE, every=2
    ),
    "bigrams": ParamSpec((BIGRAMS, WIDTH), ("row", "model"), zeros, "tables", COMPUTE, every=2),
    "attention": bank(zero_every(4, uniform(1.0)), "attention", 4 * len(ATTENDING), WIDTH, WIDTH),
    "mlp": bank(zero_every(2, uniform(0.5)), "mlp", 2 * LAYERS, WIDTH, MLP_WIDTH),
    "attention_gates": slow(zeros, "gates", len(ATTENDING), GATE_WIDTH, HEADS),
    "value_gates": slow(zeros, "gates", len(VALUE_OF), GATE_WIDTH, HEADS),
    "smear_gate": slow(zeros, "smear", 1, GATE_WIDTH),
    "skip_gate": slow(zeros, "skip", 1, GATE_WIDTH),
    "layer_scales": slow(1.1, "scalars", LAYERS),
    "start_scales": slow(0.0, "start", LAYERS),
    "bigram_scales": slow(0.1, "scalars", LAYERS),
    "attention_scales": slow((0.5, 1.0), "scalars", LAYERS, 2),
    "smear_scale": slow(0.0, "scalars"),
    "skip_scale": slow(-1.5, "scalars"),
    "backout_scale": slow(0.5, "scalars"),
}


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads: ``[B, T, D]``."""
    stage, length = ctx.stage.own, tokens_BT.shape[1]
    heads = (*tokens_BT.shape, HEADS, WIDTH // HEADS)
    documents, windows = (
        find_documents(tokens_BT, BOS, ctx.stage.max_docs, ctx.stage.max_doc_len),
        ctx.stage.windows,
    )
    values = [lookup(table, tokens_BT).reshape(heads) for table in params["values"]]
    angles, scale = yarn(
        frequencies(heads[3] // 4), ATTENTION_SCALE, [BLOCK * n for n in LONG_WINDOWS[: stage + 1]]
    )

    def attend(a_BTD: jax.Array, layer: int) -> jax.Array:
        number, paired = ATTENDING.index(layer), layer in PAIRED_LAYERS
        query, key, value, out = params["attention"][4 * number : 4 * number + 4]
        own_scale, out_scale = params["attention_scales"][layer].astype(a_BTD.dtype)
        positions_TP = pair_positions(length) if paired else jnp.arange(length)[:, None]
        q_BTHK = rotate(
            rms_norm((a_BTD @ (own_scale * query)).reshape(heads)), angles, positions_TP
        )
        k_BTHK = rotate(rms_norm((a_BTD @ (own_scale * key)).reshape(heads)), angles, positions_TP)
        v_BTHK = (a_BTD @ (own_scale * value)).reshape(heads)
        if layer in LONG_LAYERS:
            k_BTHK = offset_keys(k_BTHK)
        if layer in VALUE_OF:
            gate_BTH = 2 * sparse_gate(a_BTD, params["value_gates"][list(VALUE_OF).index(layer)])
            v_BTHK += gate_BTH[..., None] * values[VALUE_OF[layer]]
        y_BTHK = (attention_in_pairs if paired else attention)(
            q_BTHK,
            k_BTHK,
            v_BTHK,
            scale=scale,
            documents=documents,
            window=windows[layer],
            backend=ctx.attention,
        )
        y_BTHK *= sparse_gate(a_BTD, params["attention_gates"][number])[..., None]
        return y_BTHK.reshape(a_BTD.shape) @ (out_scale * out)

    e_BTD = lookup(params["head" if STARTS[stage + 1] - 1 <= LAST_TIED else "embed"], tokens_BT)
    x_BTD = start_BTD = rms_norm(
        smear(e_BTD, params["smear_scale"] * sparse_gate(e_BTD, params["smear_gate"][0]))
    )
    bigram_BTD = ctx.fetch(params["bigrams"], bigram_rows(tokens_BT, BIGRAMS))
    outputs: list[jax.Array] = []
    for layer in range(LAYERS):
        if layer == NO_ATTENTION:
            skip_BT = (
                2
                * jax.nn.sigmoid(params["skip_scale"])
                * sparse_gate(start_BTD, params["skip_gate"][0])
            )
            x_BTD += (skip_BT[..., None] * outputs[SKIP_FROM]).astype(x_BTD.dtype)
        own, start, bigram = (
            params[f"{part}_scales"][layer] for part in ("layer", "start", "bigram")
        )
        x_BTD = (own * x_BTD + start * start_BTD + bigram * bigram_BTD).astype(x_BTD.dtype)
        if layer != NO_ATTENTION:
            x_BTD += attend(rms_norm(x_BTD), layer)
        x_BTD += mlp(rms_norm(x_BTD), *params["mlp"][2 * layer : 2 * layer + 2])
        outputs.append(x_BTD)
    return rms_norm(x_BTD - params["backout_scale"].astype(x_BTD.dtype) * outputs[BACKOUT])


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
    """Return (weighted sum of all targets' losses over a lane, loss of every token in nats)."""
    head = partial(fp8.head, scales=HEAD_SCALES if ctx.use_fp8(FP8) else None)
    # FP8 scales, Adam's epsilon and what it remembers of smaller batches are meant for the sum
    # over a lane.
    shares = jnp.stack([through(points)(ctx.step) for points in SHARES[: TARGETS[ctx.stage.own]]])
    targets_BT, weights_BT = multi_token_targets(
        targets_BT, ctx.stage.lane_len * weights_BT, shares
    )
    x_BTD = hidden(params, tokens_BT, ctx)
    return cross_entropy(
        Head(head, ctx.head_chunk), params["head"], x_BTD, targets_BT, weights_BT, cap=CAP
    )


def optimizer() -> optax.GradientTransformation:
    """NorMuon on the blocks' matrices, Adam every other step on the rest."""
    by_group = slow_adams(ADAM, rate, period=2, eps=ADAM_EPS, decay=ADAM_DECAY)
    by_group["words"] = tied((LAST_TIED + 1) // 2, by_group["words"])
    muon = partial(normuon, lambda step: MUON_LR * rate(step), through(MOMENTUM), beta2=MUON_BETA2)
    up_and_down = np.tile([2.0, 4.0], PARAMETERS["mlp"].shape[0] // 2)[:, None, None]
    for group, scale in {"attention": 1.0, "mlp": up_and_down}.items():
        by_group[group] = muon(weight_decay=MUON_DECAY, scale=scale, dtype=COMPUTE)
    return optax.partition(by_group, groups(PARAMETERS))


def windows_of(long: int, short: int) -> tuple[int, ...]:
    """The window of every layer in tokens, itself and so many blocks before it."""
    return tuple(1 + BLOCK * (long if layer in LONG_LAYERS else short) for layer in range(LAYERS))


ROWS = zip(
    STEPS,
    LANE_LENS,
    MAX_DOC_LENS,
    MAX_DOCS,
    map(windows_of, LONG_WINDOWS, SHORT_WINDOWS),
    strict=True,
)
STAGES = tuple(Stage(*row, own=number) for number, row in enumerate(ROWS))

RECIPE = Recipe(
    name="r62",
    parent="r29",
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
    eval_windows=windows_of(EVAL_WINDOW, SHORT_WINDOWS[-1]),
)
