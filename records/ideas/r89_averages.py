"""r89-averages: record 89 with record 92's averages of weights, and rates that fall less.

What        The model, the optimizer and the stages of r89. Rates fall to 0.30, not to 0.15, and after the last step
            averages over the last quarter of the run take the weights' place, with their norm.
Source      r89; record 92's averages, there worth 20 millinats with a floor of 0.30 (n = 2). Evidence at small size,
            five seeds: benchmarks/quality.md.
Hardware    8xH100: not run here.
Parent      r89
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
from jspeed.model.attention import attention, find_documents, without_own_value
from jspeed.model.layers import lookup, rms_norm, scaled, sparse_gate, uniform, zero_every
from jspeed.model.losses import (
    asymmetric_cap,
    cross_entropy,
    multi_token_targets,
    softcap,
    with_prefix,
)
from jspeed.model.mlp import MARGIN, fp8_forward_mlp, mlp
from jspeed.model.positions import frequencies, offset_keys, rotate, smear, yarn
from jspeed.model.prefixes import gpt2_prefixes
from jspeed.optim.averages import Average, rates_of
from jspeed.optim.schedules import staged, through
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Stage, groups
from jspeed.speedrun.heads import attention_in_pairs, composed, pair_positions
from jspeed.speedrun.mudd import blend, coefficients, named, padded, slots
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
FINAL_RATE = 0.30
LAST_STEPS = (322, 270)  # that the slower averages and the faster ones see
FORGET = 0.212  # of those, after which a weight counts 1 / e in the faster ones
WORDS_BLEND = 0.65  # share of an average at the end
BANKS_BLEND = 0.55
FASTER = 0.2007  # so much less where a faster average is there already

# Evaluation
TARGET_LOSS = 3.28  # nats per token
EVAL_EVERY = 250
EVAL_TOKENS = 10_485_760
EVAL_LEN = 262_144
EVAL_WINDOW = 20  # blocks in LONG_LAYERS

STARTS, TOTAL = (0, *accumulate(STEPS)), sum(STEPS)
ATTENDING, LAST = tuple(layer for layer in range(LAYERS) if layer != NO_ATTENTION), LAYERS - 1
CAP = asymmetric_cap(23.0, 5.0, 7.5)
# Gates: layers that have it, how many numbers it is, what they start at.
KINDS = {
    "own value": (XSA_LAYERS, HEADS, 0.0),
    "heads": (LONG_LAYERS, HEADS, 0.25),
    "skip": ((NO_ATTENTION,), 1, 0.5),
}
KINDS |= {"start": (ATTENDING[:-1], 1, 0.0), "bigram": (ATTENDING[:-1], 1, 0.05)}
KINDS |= {"take": ((LAST,), HEADS, 1.0), "give": ((LAST,), HEADS, 0.0)}
GATES, GATE_STARTS = slots(KINDS, (range(GATES_FROM), range(GATES_FROM, LAYERS)))
# What the last layer mixes, in the order of use, and what is added after it.
GAIN = 1.1**0.5
MIX_STARTS = padded(
    [0.0] * 6 + [2.0, 2.0, GAIN, 1.0, 0.0, 0.05, GAIN, 1.0], [0.0, -0.5, 0.0, 0.0, 0.0]
)
HEAD_SCALES = fp8.Scales(x=100 / 448, w=1.6 / 448, grad=0.75 / 448)
rate = staged(RATES, STARTS[:-1], fall=COOLDOWN, floor=FINAL_RATE)
small, tiny, zeros = initializers.normal(0.01), initializers.normal(0.005), initializers.zeros


def bank(init: initializers.Initializer, group: str, count: int, *shape: int) -> ParamSpec:
    """Matrices of one shape for NorMuon, ``[n, in, out]``, padded so that LANES devices can share them."""
    padding = -count % LANES
    return ParamSpec(
        (count + padding, *shape), ("matrix", "in", "out"), init, group, COMPUTE, padding
    )


def slow(start: Any, group: str, *shape: int) -> ParamSpec:
    """Anything smaller: weights in the compute dtype by how they are drawn, or fp32 numbers by where they start."""
    init, compute = (
        (start, COMPUTE) if callable(start) else (initializers.constant(np.array(start)), None)
    )
    return ParamSpec(shape, ("layer", "in", "out")[: len(shape)], init, group, compute, every=2)


# Bank "queries_keys": the queries of each pair of heads, then their keys, of the first layer that attends, of the next,
# ...; bank "values_outs": value and output of each; bank "mlp": up and down of every layer, down transposed.
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
        uniform(0.5), "queries_keys", HEADS * len(ATTENDING), WIDTH, 2 * WIDTH // HEADS
    ),
    "values_outs": bank(uniform(0.5), "values_outs", 2 * len(ATTENDING), WIDTH, WIDTH),
    "mlp": bank(zero_every(2, uniform(0.5)), "mlp", 2 * LAYERS, WIDTH, MLP_WIDTH),
    "value_gates": slow(zeros, "value_gates", len(VALUE_OF), GATE_WIDTH, HEADS),
    "smear_gate": slow(zeros, "smear", 1, GATE_WIDTH),
    "attention_scales": slow((0.5, 1.0), "scalars", LAYERS, 2),
    "smear_scale": slow(0.0, "scalars"),
    "skip_scale": slow(-1.5, "scalars"),
    "layer_scales": slow(GAIN, "layer_scales", LAYERS, 2),
    "post_scales": slow(1.0, "post_scales", LAYERS, 2),
    "mudd_up": slow(uniform(3**-0.5), "mudd", 2, WIDTH, MUDD_WIDTH),
    "mudd_down": slow(zeros, "mudd", 2, MUDD_WIDTH, MIX_STARTS.shape[1]),
    "mudd_bias": slow(MIX_STARTS / MUDD_SCALE, "mudd_bias", *MIX_STARTS.shape),
    "gates_up": slow(uniform(3**-0.5), "gates", 2, WIDTH, MUDD_WIDTH),
    "gates_down": slow(zeros, "gates", 2, MUDD_WIDTH, GATE_STARTS.shape[1]),
    "gates_bias": slow(GATE_STARTS / MUDD_SCALE, "gates_bias", *GATE_STARTS.shape),
    "gates_scale": slow(MUDD_SCALE, "gates_bias"),
    # No parameter: the largest activation in each MLP in the step before, for FP8. Every scale starts at 1.
    "largest": ParamSpec((LAYERS,), ("layer",), initializers.constant(448 / MARGIN), "largest"),
}


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads: ``[B, T, D]``."""
    stage, length = ctx.stage.own, tokens_BT.shape[1]
    heads = (*tokens_BT.shape, HEADS, WIDTH // HEADS)
    documents, windows = (
        find_documents(tokens_BT, BOS, ctx.stage.max_docs, ctx.stage.max_doc_len),
        ctx.stage.windows,
    )
    values = [lookup(table, tokens_BT) for table in params["values"]]
    angles, scale = yarn(
        frequencies(heads[3] // 4), ATTENTION_SCALE, [BLOCK * n for n in LONG_WINDOWS[: stage + 1]]
    )
    largest = params["largest"] if ctx.use_fp8(FP8) else [None] * LAYERS
    matrices, share = (
        params["mlp"].reshape(-1, 2, WIDTH, MLP_WIDTH),
        tokens_BT.shape[0] / (LANES * ctx.sub_lanes),
    )

    def feed(x_BTD: jax.Array, layer: int, scale: Any = None) -> jax.Array:
        up, down = matrices[layer]
        a_BTD, down = rms_norm(x_BTD), scaled(down, scale)
        if largest[layer] is None:
            return mlp(a_BTD, up, down)
        return fp8_forward_mlp(a_BTD, up, down, largest[layer], share)

    def attend(
        a_BTD: jax.Array,
        layer: int,
        gate_BTH: jax.Array | None,
        more: Any = 0.0,
        scale_out: Any = None,
    ) -> jax.Array:
        number, paired = ATTENDING.index(layer), layer in PAIRED_LAYERS
        queries_keys = params["queries_keys"][HEADS * number : HEADS * (number + 1)]
        value, out = params["values_outs"][2 * number : 2 * number + 2]
        own_scale, out_scale = params["attention_scales"][layer].astype(a_BTD.dtype)
        positions_TP = pair_positions(length) if paired else jnp.arange(length)[:, None]
        q, k = jnp.split(jnp.einsum("btd,gdk->btgk", a_BTD, own_scale * queries_keys), 2, axis=2)
        q_BTHK, k_BTHK = (rotate(rms_norm(x.reshape(heads)), angles, positions_TP) for x in (q, k))
        v_BTHK = (a_BTD @ (own_scale * value)).reshape(heads) + more
        if layer in LONG_LAYERS:
            k_BTHK = offset_keys(k_BTHK)
        if gate_BTH is not None:
            v_BTHK += gate_BTH[..., None] * values[VALUE_OF[layer]].reshape(heads)
        y_BTHK = (attention_in_pairs if paired else attention)(
            q_BTHK,
            k_BTHK,
            v_BTHK,
            scale=scale,
            documents=documents,
            window=windows[layer],
            backend=ctx.attention,
        )
        if layer in XSA_LAYERS:
            y_BTHK = without_own_value(y_BTHK, v_BTHK, gates["own value", layer])
        if layer == LAST:
            mixing = gates["take", layer], gates["give", layer]
            y_BTHK += composed(
                q_BTHK, k_BTHK, v_BTHK, *mixing, scale=scale, documents=documents, window=DC_WINDOW
            )
        if layer in LONG_LAYERS:
            y_BTHK *= gates["heads", layer][..., None]
        return y_BTHK.reshape(a_BTD.shape) @ scaled(out_scale * out, scale_out)

    def value_gate(x_BTD: jax.Array, layer: int) -> jax.Array | None:
        # Normalised on its own: the gradient of a few channels is then no term of the sum that matmuls add up.
        if layer not in VALUE_OF:
            return None
        read = [x[..., : GATE_WIDTH // 2] for x in (rms_norm(x_BTD), values[VALUE_OF[layer]])]
        gate = params["value_gates"][list(VALUE_OF).index(layer)]
        return 2 * sparse_gate(jnp.concatenate(read, axis=-1), gate)

    e_BTD = lookup(params["head" if STARTS[stage + 1] - 1 <= LAST_TIED else "embed"], tokens_BT)
    start_BTD = rms_norm(
        smear(e_BTD, params["smear_scale"] * sparse_gate(e_BTD, params["smear_gate"][0]))
    )
    bigram_BTD = ctx.fetch(params["bigrams"], bigram_rows(tokens_BT, BIGRAMS)) * signs(
        tokens_BT, WIDTH, e_BTD.dtype
    )
    gates = named(coefficients(start_BTD, params, "gates", 0, params["gates_scale"]), GATES[0])
    x_BTD = first_BTD = blend((1, start_BTD), (gates["bigram", 0], bigram_BTD))
    outputs: list[jax.Array] = []
    for layer in range(LAST):
        if layer == GATES_FROM:
            gates |= named(coefficients(x_BTD, params, "gates", 1, params["gates_scale"]), GATES[1])
        before, after = params["layer_scales"][layer], params["post_scales"][layer]
        if layer == NO_ATTENTION:
            skip_BT = jax.nn.sigmoid(params["skip_scale"]) * gates["skip", layer]
            x_BTD = blend((1, x_BTD), (skip_BT, outputs[SKIP_FROM]))
        else:
            if layer <= SHARED_FROM:
                from_BTD, a_BTD = x_BTD, rms_norm(x_BTD)
            y_BTD = attend(a_BTD, layer, value_gate(from_BTD, layer), scale_out=after[0])
            bigram = [(gates["bigram", layer], bigram_BTD)] if layer else []
            x_BTD = blend(
                (before[0], x_BTD), (1, y_BTD), (gates["start", layer], start_BTD), *bigram
            )
        x_BTD = blend((before[1], x_BTD), (1, feed(x_BTD, layer, after[1])))
        outputs.append(x_BTD)
        if layer == SHARED_FROM:  # what all later layers attend from
            from_BTD, a_BTD = x_BTD, rms_norm(x_BTD)

    shared_BTD, input_BTD = outputs[SHARED_FROM], x_BTD
    c = jnp.moveaxis(coefficients(x_BTD, params, "mudd", 0, MUDD_SCALE), -1, 0)
    more_BTHK = blend((c[0], first_BTD), (c[1], shared_BTD), (c[2], x_BTD)).reshape(heads)
    x_BTD = blend((1 + c[5], x_BTD), (c[3], first_BTD), (c[4], shared_BTD))
    gate_BTH = jnp.repeat(jnp.moveaxis(c[6:8], 0, -1), HEADS // 2, axis=-1)
    y_BTD = attend(a_BTD, LAST, gate_BTH, more_BTHK)
    x_BTD = blend((c[8], x_BTD), (c[9], y_BTD), (c[10], first_BTD), (c[11], bigram_BTD))
    x_BTD = blend((c[12], x_BTD), (c[13], feed(x_BTD, LAST)))
    c = jnp.moveaxis(coefficients(x_BTD, params, "mudd", 1, MUDD_SCALE), -1, 0)
    added = first_BTD, shared_BTD, input_BTD, values[0], outputs[SKIP_FROM]
    return rms_norm(blend((1, x_BTD), *zip(c, added, strict=False)))


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
    # FP8 scales, Adam's epsilon and what it remembers of smaller batches are meant for the sum over a lane.
    shares = jnp.stack(
        [through(points)(ctx.step) for points in SHARES[: TARGETS[ctx.stage.own]]]
    )
    targets_BT, weights_BT = multi_token_targets(targets_BT, ctx.stage.lane_len * weights_BT, shares)
    if STARTS[ctx.stage.own] < max(PREFIX_SHARE, default=0):
        prefixes, share = (
            jnp.asarray(gpt2_prefixes(BOS, VOCAB)),
            through(PREFIX_SHARE)(ctx.step),
        )
        targets_BT, weights_BT = with_prefix(targets_BT, weights_BT, prefixes, share)
    x_BTD = hidden(params, tokens_BT, ctx)
    return cross_entropy(head, params["head"], x_BTD, targets_BT, weights_BT, cap=CAP, chunk=ctx.head_chunk)


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


def averages() -> tuple[Average, ...]:
    """Averages over the last quarter of the run, in the order in which they take the weights' place."""
    left, (long, short) = TOTAL - 1 - np.arange(TOTAL), LAST_STEPS
    of_two = np.where(left == 0, 2 / (long + 1), 1 - (1 - 2 / (long + 1)) ** 2)
    words = rates_of(left % 2 == 0, of_two, long)
    banks = rates_of(left % 4 == 0, 4 / (FORGET * short), short)
    blended = rates_of((left % 4 == 0) | (left < 2), 8 / (long + 2), long)
    less = BANKS_BLEND - FASTER
    return (
        Average(words, {"head": WORDS_BLEND, "embed": WORDS_BLEND}),
        Average(banks, {"values_outs": 1.0, "mlp": 1.0, "values": 1.0, "bigrams": 1.0}),
        Average(blended, {"queries_keys": BANKS_BLEND, "values_outs": less, "mlp": less}),
    )


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
    name="r89-averages",
    parent="r89",
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
    averages=averages(),
    keep_norm=("embed", "head", "mlp", "queries_keys", "values_outs"),
)
