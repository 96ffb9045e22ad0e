"""r89: record 89. Each token decides what enters its residual stream; the MLP multiplies in FP8
too.

What        Against r62: each token computes, from its embedding and before layer 4 again, how much
            of its first state and its bigram enters each layer, how loud heads are, how much of
            their own value goes (XSA); it mixes the last layer's input, values and output from
            earlier states (MUDD), and that layer's probabilities over heads (DC); scales before and
            after every part; five value tables; more bigrams, with signs; one input for three
            attentions; the next token's longest prefix as a target; Muon on queries and keys two
            heads at a time.
Departures  r62's. Matrices, gates and biases of MUDD are fp32, in the original bf16, where biases
            of 2 and more never move (here by up to 0.12 in the mixture, 0.05 in the gates). Targets
            past the end of a lane weigh nothing, in the original 6e-5 of the first stage's
            gradient. FP8 scales of weights are current; delayed ones of activations are means over
            lanes.
Source      modded-nanogpt record 89, 1.23 minutes on 8xH100 (57 ms a step): the repository's code
            on 1 August 2026 (f411b3d3). No log of it is public: those in the record's folder
            (3.2784, n = 13) are of an older base with 1,390 steps, and the share of the cooldown is
            marked in the code as to be confirmed.
Hardware    8xH100: compiled for it, not run here.
Parent      r62
"""

from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.nn import initializers

from jspeed.model import fp8, layers, losses
from jspeed.model.attention import Documents, attention, find_documents, without_own_value
from jspeed.model.losses import multi_token_targets, with_prefix
from jspeed.model.mlp import MARGIN, fp8_forward_mlp, mlp
from jspeed.model.positions import frequencies, offset_keys, rotate, smear, yarn
from jspeed.model.prefixes import gpt2_prefixes
from jspeed.optim.schedules import staged, through
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Stage, groups
from jspeed.speedrun import mudd
from jspeed.speedrun.heads import attention_in_pairs, composed, pair_positions
from jspeed.speedrun.ngrams import bigram_rows, signs
from jspeed.speedrun.normuon import normuon
from jspeed.speedrun.slow import delayed_scaling, slow_adams, tied

# Model
VOCAB = 50_304  # 50,257 rounded up to a multiple of 128
BOS = 50_256
BIGRAMS = 377_280  # rows, 7.5 x VOCAB
WIDTH = 768
LAYERS = 11
HEADS = 6
MLP_WIDTH = 3072
NO_ATTENTION = 6  # the layer without; the output of SKIP_FROM enters before it
SKIP_FROM = 3
SHARED_FROM = 7  # the layer whose output all later ones attend from
GATES_FROM = 4  # the layer before which gates are computed again
XSA_LAYERS = (1, 3, 4, 7)
PAIRED_LAYERS = (0, 2, 5, 9)
LONG_LAYERS = (3, 10)  # with the long window and keys that look back
VALUE_TABLES = 5
VALUE_OF = {1: 0, 2: 1, 8: 2, 9: 3, 10: 4}  # layer: table
GATE_WIDTH = 12  # channels that a gate reads; of values, half of them
MUDD_WIDTH = 64
MUDD_SCALE = 0.1
DC_WINDOW = 112  # tokens
ATTENTION_SCALE = 0.1  # in the first stage
COMPUTE = "bfloat16"  # dtype of activations, of the weights they meet, and of Polar Express
FP8 = "auto"  # head and MLP in training: auto (where it is native), on, off

# Stages
LANES = 8
STEPS = (423, 424, 423, 15)
LANE_LENS = (16_384, 32_768, 49_152, 49_152)
MAX_DOC_LENS = (896, 2048, 2048, 2048)
MAX_DOCS = (64, 96, 128, 128)  # documents in one lane
BLOCK = 128  # tokens
LONG_WINDOWS = (3, 7, 11, 13)  # blocks
SHORT_WINDOWS = (1, 3, 5, 6)
RATES = (1.0, 1.52, 1.73, 1.73)  # of all learning rates, for the larger batches
TARGETS = (3, 2, 1, 1)  # tokens ahead that a token predicts
SHARES = ({0: 1.0}, {423: 0.5, 847: 0.0}, {0: 0.25, 423: 0.0})  # of each, lines between steps
PREFIX_SHARE = {423: 0.25, 847: 0.0}  # of the longest prefix of the next token
LAST_TIED = 847  # step in which embedding and head are one table

# Optimizer
MUON_LR = 0.023
MUON_BETA2 = 0.9
MUON_DECAY = 1.2
MOMENTUM = {0: 0.85, 300: 0.95, 1235: 0.95, 1285: 0.85}  # lines between steps
ADAM = {  # rate, betas, decay in units of ADAM_DECAY
    "words": (0.008, 0.5, 0.95, 150),
    "tables": (0.6, 0.75, 0.95, 5),
    "value_gates": (0.008, 0.9, 0.99, 1),
    "smear": (8e-5, 0.9, 0.99, 0),
    "scalars": (0.04, 0.9, 0.99, 0),
    "layer_scales": (0.04, 0.9, 0.95, 0),
    "post_scales": (0.008, 0.9, 0.95, 0),
    "mudd": (0.002, 0.9, 0.99, 1),
    "mudd_bias": (0.002, 0.9, 0.99, 0),
    "gates": (8e-4, 0.9, 0.99, 1),
    "gates_bias": (8e-4, 0.9, 0.99, 0),
}
ADAM_EPS = 1e-10
ADAM_DECAY = 0.005
COOLDOWN = {508: 0.0, 1270: 1.0}  # how far rates have fallen, lines between steps
FINAL_RATE = 0.15

# Evaluation
TARGET_LOSS = 3.28  # nats per token
EVAL_EVERY = 250
EVAL_TOKENS = 10_485_760
EVAL_LEN = 262_144
EVAL_WINDOW = 20  # blocks in LONG_LAYERS

STARTS = (0, *accumulate(STEPS))
ATTENDING, LAST = tuple(layer for layer in range(LAYERS) if layer != NO_ATTENTION), LAYERS - 1
CAP = losses.asymmetric_cap(23.0, 5.0, 7.5)
# Gates: layers that have it, how many numbers it is, what they start at.
KINDS = {
    "own value": (XSA_LAYERS, HEADS, 0.0),
    "heads": (LONG_LAYERS, HEADS, 0.25),
    "skip": ((NO_ATTENTION,), 1, 0.5),
}
KINDS |= {"start": (ATTENDING[:-1], 1, 0.0), "bigram": (ATTENDING[:-1], 1, 0.05)}
KINDS |= {"take": ((LAST,), HEADS, 1.0), "give": ((LAST,), HEADS, 0.0)}
GATES, GATE_STARTS = mudd.slots(KINDS, (range(GATES_FROM), range(GATES_FROM, LAYERS)))
# Sums of the last layer: their terms, and where the coefficients start that tokens weigh them by.
GAIN = 1.1**0.5
MIX = {
    "values": {"first": 0.0, "shared": 0.0, "state": 0.0},
    "state": {"first": 0.0, "shared": 0.0, "state": 0.0},  # 1 is added to the last
    "table": {"low heads": 2.0, "high heads": 2.0},  # of values
    "MLP": {"state": GAIN, "attention": 1.0, "first": 0.0, "bigrams": 0.05},
    "end": {"state": GAIN, "MLP": 1.0},
}
SLOTS = [(to, of) for to, terms in MIX.items() for of in terms]
# Likewise in the sum that the head reads.
ADDED = dict.fromkeys(("first", "shared", "input", "values 0", "skip"), 0.0) | {"shared": -0.5}
MIX_STARTS = mudd.padded([MIX[to][of] for to, of in SLOTS], list(ADDED.values()))
HEAD_SCALES = fp8.Scales(x=100 / 448, w=1.6 / 448, grad=0.75 / 448)
rate = staged(RATES, STARTS[:-1], fall=COOLDOWN, floor=FINAL_RATE)
uniform, uniform_up = layers.uniform(0.5), layers.uniform(3**-0.5)
small, tiny, zeros = initializers.normal(0.01), initializers.normal(0.005), initializers.zeros
Params = dict[str, Array]


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
    init = start if callable(start) else initializers.constant(np.array(start))
    compute = COMPUTE if callable(start) else None
    return ParamSpec(shape, ("layer", "in", "out")[: len(shape)], init, group, compute, every=2)


# Bank "queries_keys": the queries of each pair of heads, then their keys, of the first layer that
# attends, of the next, ...; bank "values_outs": value and output of each; bank "mlp": up and down
# of every layer, down transposed.
PARAMETERS = {
    "embed": ParamSpec(
        (VOCAB, WIDTH), ("token", "model"), tiny, "words", COMPUTE, every=2, init_like="head"
    ),
    "head": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), tiny, "words", COMPUTE, every=2),
    "values": ParamSpec(
        (VALUE_TABLES, VOCAB, WIDTH), ("table", "token", "model"), small, "tables", COMPUTE, every=2
    ),
    "bigrams": ParamSpec((BIGRAMS, WIDTH), ("row", "model"), zeros, "tables", COMPUTE, every=2),
    "queries_keys": bank(
        uniform, "queries_keys", HEADS * len(ATTENDING), WIDTH, 2 * WIDTH // HEADS
    ),
    "values_outs": bank(uniform, "values_outs", 2 * len(ATTENDING), WIDTH, WIDTH),
    "mlp": bank(layers.zero_every(2, uniform), "mlp", 2 * LAYERS, WIDTH, MLP_WIDTH),
    "value_gates": slow(zeros, "value_gates", len(VALUE_OF), GATE_WIDTH, HEADS),
    "smear_gate": slow(zeros, "smear", 1, GATE_WIDTH),
    "attention_scales": slow((0.5, 1.0), "scalars", LAYERS, 2),
    "smear_scale": slow(0.0, "scalars"),
    "skip_scale": slow(-1.5, "scalars"),
    "layer_scales": slow(GAIN, "layer_scales", LAYERS, 2),
    "post_scales": slow(1.0, "post_scales", LAYERS, 2),
    "mudd_up": slow(uniform_up, "mudd", 2, WIDTH, MUDD_WIDTH),
    "mudd_down": slow(zeros, "mudd", 2, MUDD_WIDTH, MIX_STARTS.shape[1]),
    "mudd_bias": slow(MIX_STARTS / MUDD_SCALE, "mudd_bias", *MIX_STARTS.shape),
    "gates_up": slow(uniform_up, "gates", 2, WIDTH, MUDD_WIDTH),
    "gates_down": slow(zeros, "gates", 2, MUDD_WIDTH, GATE_STARTS.shape[1]),
    "gates_bias": slow(GATE_STARTS / MUDD_SCALE, "gates_bias", *GATE_STARTS.shape),
    "gates_scale": slow(MUDD_SCALE, "gates_bias"),
    # No parameter: the largest activation in each MLP in the step before, for FP8. Every scale
    # starts at 1.
    "largest": ParamSpec((LAYERS,), ("layer",), initializers.constant(448 / MARGIN), "largest"),
}


class Common(NamedTuple):
    """What all layers of a forward pass read."""

    params: Params
    ctx: Context
    documents: Documents
    values: list[Array]  # [B, T, D] of each value table: the tokens' rows
    mlp: Array  # [layers, 2, D, F]: up and down
    largest: Array | list[None]  # amax of each MLP's activation; None: FP8 is off
    share: float  # of the batch, that this pass has
    start_BTD: Array  # the state of words alone
    bigram_BTD: Array
    gates: dict[tuple[str, int], Array]  # [B, T] or [B, T, H], by kind and layer (KINDS)


def hidden(params: Params, tokens_BT: Array, ctx: Context) -> Array:
    """Return what the head reads: ``[B, T, D]``.

    A layer, with ``g`` that each token computes (gates) and ``b`` that all share; fields say which
    layers have each part::

        a = rms_norm(x)  # after SHARED_FROM: of the state after that layer
        q, k, v = rotated(a @ Wq), rotated(a @ Wk), a @ Wv + g * rows of a value table
        y = g * (attention(q, k, v) - tanh(g) * its part along v) @ Wo
        x = b * x + y + g * start + g * bigrams
        x = b * x + relu(rms_norm(x) @ Wup)**2 @ Wdown

    In the last one, and in the sum that the head reads, tokens weigh every term (MIX, ADDED).
    """
    # --- Before all layers ---
    common = prepared(params, tokens_BT, ctx)
    gates, start_BTD = common.gates, common.start_BTD
    x_BTD = first_BTD = mudd.blend((1, start_BTD), (gates["bigram", 0], common.bigram_BTD))
    # --- Layers ---
    outputs: list[Array] = []
    shared = None
    for layer in range(LAST):
        if layer == GATES_FROM:  # anew, from a state that knows its context
            c_BTN = mudd.coefficients(x_BTD, params, "gates", 1, params["gates_scale"])
            gates |= mudd.named(c_BTN, GATES[1])
        x_BTD = after_layer(layer, x_BTD, common, outputs, shared)
        outputs.append(x_BTD)
        if layer == SHARED_FROM:  # one state for the attention of all later layers
            shared = x_BTD, layers.rms_norm(x_BTD)
    # --- Last layer ---
    assert shared
    input_BTD = x_BTD
    x_BTD = after_last(x_BTD, first_BTD, *shared, common)
    # --- What the head reads: earlier states once more ---
    c_NBT = jnp.moveaxis(mudd.coefficients(x_BTD, params, "mudd", 1, MUDD_SCALE), -1, 0)
    added = {"first": first_BTD, "shared": shared[0], "input": input_BTD}
    added |= {"values 0": common.values[0], "skip": outputs[SKIP_FROM]}
    terms = zip(c_NBT, (added[name] for name in ADDED), strict=False)
    return layers.rms_norm(mudd.blend((1, x_BTD), *terms))


def prepared(params: Params, tokens_BT: Array, ctx: Context) -> Common:
    """Return what all layers read."""
    # --- Documents, values, matrices ---
    documents = find_documents(tokens_BT, BOS, ctx.stage.max_docs, ctx.stage.max_doc_len)
    values = [layers.lookup(table, tokens_BT) for table in params["values"]]
    largest = params["largest"] if ctx.use_fp8(FP8) else [None] * LAYERS
    mlp, share = params["mlp"].reshape(-1, 2, WIDTH, MLP_WIDTH), len(tokens_BT)
    banks = mlp, largest, share / (LANES * ctx.sub_lanes)
    # --- First state: the word, and some of the word before ---
    tied = STARTS[ctx.stage.own + 1] - 1 <= LAST_TIED
    e_BTD = layers.lookup(params["head" if tied else "embed"], tokens_BT)
    gate_BT = params["smear_scale"] * layers.sparse_gate(e_BTD, params["smear_gate"][0])
    start_BTD = layers.rms_norm(smear(e_BTD, gate_BT))
    # --- Bigrams: those that collide in a row differ in signs, and do not add up ---
    found_BTD = ctx.fetch(params["bigrams"], bigram_rows(tokens_BT, BIGRAMS))
    bigram_BTD = found_BTD * signs(tokens_BT, WIDTH, e_BTD.dtype)
    c_BTN = mudd.coefficients(start_BTD, params, "gates", 0, params["gates_scale"])
    gates = mudd.named(c_BTN, GATES[0])
    return Common(params, ctx, documents, values, *banks, start_BTD, bigram_BTD, gates)


def after_layer(
    layer: int,
    x_BTD: Array,
    common: Common,
    outputs: list[Array],
    shared: tuple[Array, Array] | None,
) -> Array:
    """Return the state after ``layer``, ``[B, T, D]``; ``outputs`` are those of earlier layers.
    ``shared`` is what it attends from, also normalised, if not from the state."""
    params, gates = common.params, common.gates
    before, after = params["layer_scales"][layer], params["post_scales"][layer]
    # --- Attention, words, bigrams ---
    if layer == NO_ATTENTION:
        skip_BT = jax.nn.sigmoid(params["skip_scale"]) * gates["skip", layer]
        x_BTD = mudd.blend((1, x_BTD), (skip_BT, outputs[SKIP_FROM]))
    else:
        from_BTD, a_BTD = shared or (x_BTD, layers.rms_norm(x_BTD))
        gate_BTH = value_gate(from_BTD, layer, common)
        y_BTD = attend(a_BTD, layer, common, gate_BTH, scale_out=after[0])
        # They are in what layer 0 gets.
        bigram = [(gates["bigram", layer], common.bigram_BTD)] if layer else []
        start = gates["start", layer], common.start_BTD
        x_BTD = mudd.blend((before[0], x_BTD), (1, y_BTD), start, *bigram)
    # --- MLP ---
    return mudd.blend((before[1], x_BTD), (1, feed(x_BTD, layer, common, after[1])))


def after_last(
    x_BTD: Array, first_BTD: Array, shared_BTD: Array, a_BTD: Array, common: Common
) -> Array:
    """Return the state after the last layer, ``[B, T, D]``; ``a_BTD`` is ``shared_BTD``,
    normalised."""
    c_NBT = jnp.moveaxis(mudd.coefficients(x_BTD, common.params, "mudd", 0, MUDD_SCALE), -1, 0)
    c = lambda to, of: c_NBT[SLOTS.index((to, of))]
    mixed = lambda to, **states: mudd.blend(*((c(to, of), x) for of, x in states.items()))
    # --- Attention: reads the shared state, and has values of three ---
    more_BTD = mixed("values", first=first_BTD, shared=shared_BTD, state=x_BTD)
    more_BTHK = more_BTD.reshape(*x_BTD.shape[:2], HEADS, -1)
    kept = 1 + c("state", "state"), x_BTD
    x_BTD = mudd.blend(kept, (c("state", "first"), first_BTD), (c("state", "shared"), shared_BTD))
    first = SLOTS.index(("table", "low heads"))
    gate_BT2 = jnp.moveaxis(c_NBT[first : first + len(MIX["table"])], 0, -1)
    gate_BTH = jnp.repeat(gate_BT2, HEADS // 2, axis=-1)
    y_BTD = attend(a_BTD, LAST, common, gate_BTH, more_BTHK)
    # --- MLP ---
    x_BTD = mixed("MLP", state=x_BTD, attention=y_BTD, first=first_BTD, bigrams=common.bigram_BTD)
    return mudd.blend((c("end", "state"), x_BTD), (c("end", "MLP"), feed(x_BTD, LAST, common)))


def attend(
    a_BTD: Array,
    layer: int,
    common: Common,
    gate_BTH: Array | None,
    more_BTHK: Array | float = 0.0,
    scale_out: Array | None = None,
) -> Array:
    """Return ``scale_out`` times what attention of ``layer`` makes of ``a_BTD``: ``[B, T, D]``.
    ``more_BTHK`` is added to its values, and ``gate_BTH`` times the rows of its value table."""
    ctx, params, gates = common.ctx, common.params, common.gates
    number, paired, long = ATTENDING.index(layer), layer in PAIRED_LAYERS, layer in LONG_LAYERS
    heads = *a_BTD.shape[:2], HEADS, WIDTH // HEADS
    # --- Queries, keys, values: weights are scaled, since activations would need a pass ---
    queries_keys = params["queries_keys"][HEADS * number : HEADS * (number + 1)]
    value, out = params["values_outs"][2 * number : 2 * number + 2]
    own_scale, out_scale = params["attention_scales"][layer].astype(a_BTD.dtype)
    # Paired heads interleave to one sequence, in which each sees the other's keys too.
    positions_TP = pair_positions(heads[1]) if paired else jnp.arange(heads[1])[:, None]
    windows = [BLOCK * n for n in LONG_WINDOWS[: ctx.stage.own + 1]]
    angles, scale = yarn(frequencies(heads[3] // 4), ATTENTION_SCALE, windows)
    q, k = jnp.split(jnp.einsum("btd,gdk->btgk", a_BTD, own_scale * queries_keys), 2, axis=2)
    q_BTHK, k_BTHK = (
        rotate(layers.rms_norm(x.reshape(heads)), angles, positions_TP) for x in (q, k)
    )
    v_BTHK = (a_BTD @ (own_scale * value)).reshape(heads) + more_BTHK
    if long:
        k_BTHK = offset_keys(k_BTHK)
    if gate_BTH is not None:
        v_BTHK += gate_BTH[..., None] * common.values[VALUE_OF[layer]].reshape(heads)
    # --- Attention ---
    y_BTHK = (attention_in_pairs if paired else attention)(
        q_BTHK,
        k_BTHK,
        v_BTHK,
        scale=scale,
        documents=common.documents,
        window=ctx.stage.windows[layer],
        backend=ctx.attention,
    )
    # --- Heads: without their own token's value, which the state has already; some louder ---
    if layer in XSA_LAYERS:
        y_BTHK = without_own_value(y_BTHK, v_BTHK, gates["own value", layer])
    if layer == LAST:  # and what tokens close by say to all heads
        qkv, mixing = (q_BTHK, k_BTHK, v_BTHK), (gates["take", layer], gates["give", layer])
        near = partial(composed, documents=common.documents, window=DC_WINDOW)
        y_BTHK += near(*qkv, *mixing, scale=scale)
    if long:
        y_BTHK *= gates["heads", layer][..., None]
    return y_BTHK.reshape(a_BTD.shape) @ layers.scaled(out_scale * out, scale_out)


def value_gate(x_BTD: Array, layer: int, common: Common) -> Array | None:
    """Return what heads take of their value table, by a few channels of state and rows: 0 to 2,
    ``[B, T, H]``."""
    if layer not in VALUE_OF:
        return None
    # Normalised on its own: the gradient of a few channels is then no term of the sum that matmuls
    # add up.
    states = layers.rms_norm(x_BTD), common.values[VALUE_OF[layer]]
    read = [x[..., : GATE_WIDTH // 2] for x in states]
    gate = common.params["value_gates"][list(VALUE_OF).index(layer)]
    return 2 * layers.sparse_gate(jnp.concatenate(read, axis=-1), gate)


def feed(x_BTD: Array, layer: int, common: Common, scale: Array | None = None) -> Array:
    """Return ``scale`` times what the layer's MLP makes of ``x_BTD``, normalised."""
    up, down = common.mlp[layer]
    a_BTD, down = layers.rms_norm(x_BTD), layers.scaled(down, scale)
    largest = common.largest[layer]
    if largest is None:
        return mlp(a_BTD, up, down)
    return fp8_forward_mlp(a_BTD, up, down, largest, common.share)


def logits(params: Params, x_BTD: Array, ctx: Context) -> Array:
    """Return softcapped fp32 logits ``[B, T, V]``."""
    return losses.softcap(fp8.matmul(x_BTD, params["head"], None), CAP)


def forward(params: Params, tokens_BT: Array, ctx: Context) -> Array:
    """Return the logits of every position."""
    return logits(params, hidden(params, tokens_BT, ctx), ctx)


def loss(
    params: Params, tokens_BT: Array, targets_BT: Array, weights_BT: Array, ctx: Context
) -> tuple[Array, Array]:
    """Return (weighted sum of all targets' losses over a lane, loss of every token in nats)."""
    # --- Targets ---
    # The sum over a lane, for which FP8 scales, Adam's epsilon and its memory of smaller batches
    # are meant.
    stage = ctx.stage.own
    shares = jnp.stack([through(points)(ctx.step) for points in SHARES[: TARGETS[stage]]])
    targets_NBT, weights_NBT = multi_token_targets(
        targets_BT, ctx.stage.lane_len * weights_BT, shares
    )
    if STARTS[stage] < max(PREFIX_SHARE, default=0):
        prefixes, share = jnp.asarray(gpt2_prefixes(BOS, VOCAB)), through(PREFIX_SHARE)(ctx.step)
        targets_NBT, weights_NBT = with_prefix(targets_NBT, weights_NBT, prefixes, share)
    # --- Scores ---
    x_BTD = hidden(params, tokens_BT, ctx)
    scales = HEAD_SCALES if ctx.use_fp8(FP8) else None
    head = losses.Head(partial(fp8.head, scales=scales), ctx.head_chunk)
    score = partial(losses.cross_entropy, head, cap=CAP)
    return score(params["head"], x_BTD, targets_NBT, weights_NBT)


def optimizer() -> optax.GradientTransformation:
    """NorMuon on the blocks' matrices, Adam every other step on the rest."""
    by_group = slow_adams(ADAM, rate, period=2, eps=ADAM_EPS, decay=ADAM_DECAY)
    by_group["words"] = tied((LAST_TIED + 1) // 2, by_group["words"])
    by_group["largest"] = delayed_scaling()
    muon = partial(normuon, lambda step: MUON_LR * rate(step), through(MOMENTUM), beta2=MUON_BETA2)
    up_and_down = np.tile([2.0, 4.0], PARAMETERS["mlp"].shape[0] // 2)[:, None, None]
    for group, scale in {"queries_keys": 1.0, "values_outs": 1.0, "mlp": up_and_down}.items():
        by_group[group] = muon(weight_decay=MUON_DECAY, scale=scale, dtype=COMPUTE)
    return optax.partition(by_group, groups(PARAMETERS))


def windows_of(long: int, short: int) -> tuple[int, ...]:
    """The window of every layer in tokens, itself and so many blocks before it."""
    return tuple(1 + BLOCK * (long if layer in LONG_LAYERS else short) for layer in range(LAYERS))


WINDOWS = map(windows_of, LONG_WINDOWS, SHORT_WINDOWS)
ROWS = zip(STEPS, LANE_LENS, MAX_DOC_LENS, MAX_DOCS, WINDOWS, strict=True)
STAGES = tuple(Stage(*row, own=number) for number, row in enumerate(ROWS))

RECIPE = Recipe(
    name="r89",
    parent="r62",
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
