"""jspeed3: r92, where a token may also be copied from earlier in its document; n-grams of tokens of
like text.

What        Against r92: a pointer. One head of attention over the document's last 2,048 tokens says
            which of them is next, a padding id of the head how likely that is; their mixture is the
            distribution of the next token, in training and evaluation (over 8,192 tokens). N-grams
            are hashed from the first token of like text: Table, " table". From stage 2 on attention
            has gradients within 257 tokens. With RETRIEVAL it is told what followed its context
            before. Steps are 0.86 of r92's: see speed.md.
Departures  Keys lie within a window, not in two blocks (379); gradients end at one window, fixed
            beforehand (371).
Source      r92; PRs 379 (pointer), 375 (classes), 371 (gradients), 367 (cells) of modded-nanogpt,
            open in October 2026.
Hardware    8xH100: not run here.
Parent      r92
"""

from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.nn import initializers

from jspeed.model import fp8, pointer
from jspeed.model.attention import attention, find_documents
from jspeed.model.heads import attention_in_pairs, pair_positions, without_own_value
from jspeed.model.layers import (
    look_up_all,
    look_up_each,
    lookup,
    rms_norm,
    scaled,
    scaled_bank,
    sparse_gate,
    uniform,
    zero_every,
)
from jspeed.model.losses import (
    Copies,
    asymmetric_cap,
    cross_entropy,
    look_ahead,
    softcap,
    with_prefix,
)
from jspeed.model.mlp import MARGIN, mlp
from jspeed.model.mudd import (
    Term,
    Terms,
    add_normed,
    blend,
    coefficients,
    grouped_coefficients,
    named,
    normed_twice,
    padded,
    slots,
)
from jspeed.model.ngrams import bigram_and_trigram_rows, signs
from jspeed.model.positions import frequencies, queries_and_keys, smear, yarn
from jspeed.model.prefixes import gpt2_classes, gpt2_prefixes
from jspeed.model.sampled import candidates, over_candidates
from jspeed.optim.anvil import Rails, anvil
from jspeed.optim.averages import Average, rates_of
from jspeed.optim.cautious import cautious_adam
from jspeed.optim.rows import RowTransformation, row_adam
from jspeed.optim.schedules import jumps, shortened, staged, through
from jspeed.optim.slow import measured, slow_adams, tied, when_due
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Stage, groups
from jspeed.retrieval import Retrieval, inputs

# Model
VOCAB = 50_304  # 50,257 rounded up to a multiple of 128
BOS = 50_256
COPY = 50_257  # the id that stands for copying: no token
NGRAMS = 84_602_880  # rows: the first half for bigrams, the second for trigrams
WIDTH = 768
LAYERS = 11
HEADS = 6
MLP_WIDTH = 2816
ATTENDING = (0, 2, 5, 1, 8, 3, 10)  # layers with attention, as their matrices lie in the banks
PAIRED_LAYERS = (0, 2, 5)
HALF_LAYERS = (1, 8)  # values as narrow as queries and keys
LONG_LAYERS = (3, 10)  # wide queries and keys, the long window, keys that look back
XSA_LAYERS = (1, 3)
NO_MLP = (7,)
TWICE = 8  # the layer with two MLPs side by side
SKIP_INTO = 6  # the layer that the output of SKIP_FROM enters, instead of attention
SKIP_FROM = 3
SHARED_FROM = 7  # the layer whose output all later ones attend from
GATES_FROM = 4  # the layer before which gates are computed again
START_LAYERS = (0, 1, 2, 4, 5, 7)  # where the first state enters
NGRAM_LAYERS = (0, 1, 4, 5, 9)  # where n-grams enter
VALUE_TABLES = 4
VALUE_OF = {1: 0, 2: 1, 8: 2, 10: 3}  # layer: table
GATE_WIDTH = 12  # channels that a gate reads; of values, half of them
MUDD_WIDTH = 64
MUDD_SCALE = 0.1
MIX_GROUPS = 12  # of channels, that the last mixture weighs apart
# factors of the hashes that draw signs of bigrams and trigrams
SIGNS = (48271, 30011), (58699, 39779, 26801)
NARROW_SCALE = 0.13  # of attention, in the first stage
WIDE_SCALE = 0.085  # in LONG_LAYERS
POINTER_WIDTH = 128
LIKE = True  # whether n-grams of tokens of like text are one
# lengths of contexts to look for in earlier steps, in tokens, such as (2, 3, 4, 6, 10); (): none
RETRIEVAL = ()
# dtype of activations, of the weights they meet, of n-grams, and of the six maps
COMPUTE = "bfloat16"
FP8 = "auto"  # head, MLP and projections in training: auto (where it is native), on, off
# around FP8, attention, n-grams: auto (on Hopper, where the preflight passes them), on, off
OWN_KERNELS = "auto"

# Stages
LANES = 8
STEPS = (276, 12, 297, 244, 122, 58, 17)
# share of them that is made; all that follows in steps is moved with the borders of stages
LENGTH = 1.0
LANE_LENS = (16_384, 32_768, 32_768, 49_152, 49_152, 40_960, 16_384)
MAX_DOC_LENS = (896, 2048, 2048, 3072, 3072, 3072, 3072)
SEGMENT = 2560  # tokens of a document that attention takes as one
MAX_DOCS = (64, 96, 96, 128, 128, 128, 64)  # segments in one lane
BLOCK = 128  # tokens
LONG_WINDOWS = (3, 7, 7, 11, 11, 11, 13)  # blocks
SHORT_WINDOWS = (1, 3, 3, 5, 5, 5, 6)
# blocks within which attention has gradients; 0: all of its window
GRADIENT_WINDOWS = (0, 2, 2, 2, 2, 2, 2)
POINTER_WINDOWS = (896, 2048, 2048, 2048, 2048, 2048, 2048)  # tokens
# of all learning rates, by the size of a batch
RATES = (1.0, 1.52, 1.52, 1.73, 1.73, 1.579266707473229, 1.0)
TABLES_EVERY = (2, 2, 4, 4, 4, 4, 4)  # steps between two updates of tables
COLUMNS = (10_240, 10_240, 10_240, 14_336, 24_576, 50_304, 50_304)  # of the head that a lane scores
TARGETS = (3, 2, 2, 1, 1, 1, 1)  # tokens ahead that a token predicts
SHARES = ({0: 1.0}, {276: 0.5, 585: 0.0}, {0: 0.25, 276: 0.0})  # of each, lines between steps
PREFIX_SHARE = {0: 0.25, 276: 0.20, 354: 0.15, 431: 0.10, 508: 0.05, 585: 0.0}  # from each step on
LAST_TIED = 1009  # step in which embedding and head are one table

# Optimizer
ANVIL_LR = 0.023
ANVIL_BETA2 = 0.9
ANVIL_DECAY = 2.25
MOMENTUM = {0: 0.85, 206: 0.93, 983: 0.93, 1026: 0.85}  # lines between steps
# from which step; betas of fast and slow momentum; share of the fast one
RAILS = (442, 0.85, 0.98, 0.4385)
ADAM = {  # rate, betas, decay in units of ADAM_DECAY
    "words": (0.008, 0.5, 0.95, 150),
    "value_gates": (0.008, 0.9, 0.99, 1),
    "smear": (8e-5, 0.9, 0.99, 0),
    "scalars": (0.04, 0.9, 0.99, 0),
    "layer_scales": (0.04, 0.9, 0.95, 0),
    "post_scales": (0.008, 0.9, 0.95, 0),
    "mudd": (0.002, 0.9, 0.99, 1),
    "mudd_bias": (0.002, 0.9, 0.99, 0),
    "gates": (8e-4, 0.9, 0.99, 1),
    "gates_bias": (8e-4, 0.9, 0.99, 0),
    "pointer": (0.008, 0.9, 0.99, 0),
}
TABLES = (0.56, 0.75, 0.95, 5)  # likewise, per two steps; n-grams have no first moment
ADAM_EPS = 1e-10
ADAM_DECAY = 0.005
COOLDOWN = {201: 0.0, 1009: 1.0}  # how far rates have fallen, lines between steps
FINAL_RATE = 0.30
LAST_STEPS = (256, 215)  # that the slower averages and the faster ones see
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
EVAL_POINTER_WINDOW = 8192  # tokens

STEPS, moved = shortened(
    LENGTH, STEPS, (SHARES, PREFIX_SHARE, LAST_TIED, MOMENTUM, RAILS[0], COOLDOWN), period=4
)
SHARES, PREFIX_SHARE, LAST_TIED, MOMENTUM, RAILS_FROM, COOLDOWN = moved
STARTS = (0, *accumulate(STEPS))
TOTAL = sum(STEPS)
LAST = LAYERS - 1
HEAD_WIDTH = WIDTH // HEADS
NARROW = len(ATTENDING) - len(LONG_LAYERS)
# whose MLP is where in the bank
FEEDS = (*(layer for layer in range(LAYERS) if layer not in NO_MLP), TWICE)
CAP = asymmetric_cap(23.0, 5.0, 7.5)
# Gates: layers that have it, how many numbers it is, what they start at.
KINDS = {
    "own value": (XSA_LAYERS, HEADS, 0.0),
    "heads": (LONG_LAYERS, HEADS, 0.25),
    "skip": ((SKIP_INTO,), 1, 0.5),
}
KINDS |= {"start": (START_LAYERS, 1, 0.0), "ngram": (NGRAM_LAYERS, 1, 0.05)}
GATES, GATE_STARTS = slots(KINDS, (range(GATES_FROM), range(GATES_FROM, LAYERS)))
# What the last layer mixes, in the order of use, and what is added after it.
GAIN = 1.1**0.5
MIX_STARTS = padded(
    [0.0] * 6 + [2.0, 2.0, GAIN, 1.0, 0.0, 0.05, GAIN, 1.0], [0.0, -0.5] + [0.0] * 8
)
# any power of two but 1
HEAD_SCALES, LOGIT_SCALE = fp8.Scales(x=100 / 448, w=2.0 / 448, grad=0.75 / 8 / 448), 0.5
# FP8 scales: of rms_norm
LARGEST_NORMED, LARGEST = WIDTH**0.5 / 448, np.array([448 / MARGIN, 0.0, 0.0, 0.0, 0.0])
rate = staged(RATES, STARTS[:-1], fall=COOLDOWN, floor=FINAL_RATE)
small, tiny, zeros = initializers.normal(0.01), initializers.normal(0.005), initializers.zeros
STAGE_OF = np.repeat(np.arange(len(STEPS)), STEPS)
TABLE_UPDATES = np.array(
    [step for step in range(TOTAL) if (step + 1) % TABLES_EVERY[STAGE_OF[step]] == 0], np.int32
)

# Columns that are read of each matrix for queries and keys, and of each for values: half of every
# head, or all.
HALF = np.arange(2 * WIDTH) % HEAD_WIDTH < HEAD_WIDTH // 2
READ_KEYS = (
    np.repeat([layer in LONG_LAYERS for layer in ATTENDING], HEADS)[:, None]
    | HALF[: 2 * HEAD_WIDTH]
)
READ_VALUES = np.array([layer not in HALF_LAYERS for layer in ATTENDING])[:, None] | HALF[:WIDTH]


def bank(
    init: initializers.Initializer, group: str, count: int, *shape: int, halves: int = 0
) -> ParamSpec:
    """Matrices of one shape for ANVIL, ``[n, in, out]``, zeros after them so that LANES devices can
    share them. Of ``halves`` layers half is read, WIDTH^2 numbers."""
    padding, unread = -count % LANES, WIDTH**2 * halves

    def draw(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        return init(key, shape, dtype) * (jnp.arange(shape[0]) < count)[:, None, None]

    return ParamSpec(
        (count + padding, *shape),
        ("matrix", "in", "out"),
        draw,
        group,
        COMPUTE,
        padding,
        unread=unread,
    )


def slow(start: Any, group: str, *shape: int) -> ParamSpec:
    """Anything smaller: weights in the compute dtype by how they are drawn, or fp32 numbers by
    where they start."""
    init, compute = (
        (start, COMPUTE) if callable(start) else (initializers.constant(np.array(start)), None)
    )
    return ParamSpec(shape, ("layer", "in", "out")[: len(shape)], init, group, compute, every=2)


# Bank "queries_keys": the queries of each pair of heads, then their keys, of each layer in
# ATTENDING; narrow layers read the first half of each head. Bank "values_outs": value and output of
# each; bank "mlp": up and down of each in FEEDS, down transposed.
PARAMETERS = {
    "embed": ParamSpec(
        (VOCAB, WIDTH), ("token", "model"), tiny, "words", COMPUTE, every=2, twin="head"
    ),
    "head": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), tiny, "words", COMPUTE, every=2),
    "values": ParamSpec(
        (VOCAB, VALUE_TABLES, WIDTH),
        ("token", "table", "model"),
        small,
        "tables",
        COMPUTE,
        every=4,
        summed=True,
    ),
    "ngrams": ParamSpec(
        (NGRAMS, WIDTH), ("row", "model"), zeros, "ngrams", dtype=COMPUTE, every=4, lookups=2
    ),
    "queries_keys": bank(
        uniform(0.5), "queries_keys", HEADS * len(ATTENDING), WIDTH, 2 * HEAD_WIDTH, halves=NARROW
    ),
    "values_outs": bank(
        uniform(0.5), "values_outs", 2 * len(ATTENDING), WIDTH, WIDTH, halves=len(HALF_LAYERS)
    ),
    "mlp": bank(zero_every(2, uniform(0.5)), "mlp", 2 * len(FEEDS), WIDTH, MLP_WIDTH),
    "value_gates": slow(zeros, "value_gates", VALUE_TABLES - 1, GATE_WIDTH, HEADS),
    "smear_gate": slow(zeros, "smear", 1, GATE_WIDTH),
    "attention_scales": slow((0.5, 1.0), "scalars", LAYERS, 2),
    "smear_scale": slow(0.0, "scalars"),
    "skip_scale": slow(-1.5, "scalars"),
    "layer_scales": slow(GAIN, "layer_scales", LAYERS, 2),
    "post_scales": slow(1.0, "post_scales", LAYERS, 2),
    "mudd_up": slow(uniform(3**-0.5), "mudd", 2, WIDTH, MUDD_WIDTH),
    "mudd_down": slow(zeros, "mudd", 2, MUDD_WIDTH, MIX_STARTS.shape[1]),
    "mudd_groups": slow(zeros, "mudd", MUDD_WIDTH, 10, MIX_GROUPS),
    "mudd_bias": slow(MIX_STARTS / MUDD_SCALE, "mudd_bias", *MIX_STARTS.shape),
    "gates_up": slow(uniform(3**-0.5), "gates", 2, WIDTH, MUDD_WIDTH),
    "gates_down": slow(zeros, "gates", 2, MUDD_WIDTH, GATE_STARTS.shape[1]),
    "gates_bias": slow(GATE_STARTS / MUDD_SCALE, "gates_bias", *GATE_STARTS.shape),
    "gates_scale": slow(MUDD_SCALE, "gates_bias"),
    # Queries and keys of the pointer, how sharp it is, and the key of no token.
    "pointer": slow(uniform(1.0), "pointer", 2, WIDTH, POINTER_WIDTH),
    "pointer_gain": slow(1.0, "pointer"),
    "pointer_none": slow(initializers.normal(POINTER_WIDTH**-0.5), "pointer", POINTER_WIDTH),
    # No parameter: largest numbers in the step before, for FP8. Of each MLP its activation and the
    # gradients that enter its matmuls, of a layer's queries and keys, and of its values, their
    # gradient. Every scale starts at 1.
    "largest": ParamSpec(
        (len(FEEDS), 5), ("layer", "kind"), initializers.constant(LARGEST), "largest"
    ),
}
if RETRIEVAL:
    # how much of what followed a context the first state and the head get, by how sure it is
    PARAMETERS["retrieved"] = slow((0.5, 1.5), "scalars", inputs.number_of_cells(RETRIEVAL), 2)


def hidden(
    params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context, e_BTD: jax.Array | None = None
) -> jax.Array:
    """Return what the head reads: ``[B, T, D]``. ``e_BTD`` are the tokens' rows of the head where
    they are known."""
    stage, lanes = ctx.stage.own, tokens_BT.shape
    heads = (*lanes, HEADS, HEAD_WIDTH)
    segment = SEGMENT if ctx.training and SEGMENT < (ctx.stage.max_doc_len or 0) else None
    documents = find_documents(tokens_BT, BOS, ctx.stage.max_docs, ctx.stage.max_doc_len, segment)
    values = look_up_all(params["values"], tokens_BT)
    narrow, wide = (
        yarn(frequencies(HEAD_WIDTH // 4), scale, [BLOCK * n for n in windows[: stage + 1]])
        for scale, windows in ((NARROW_SCALE, SHORT_WINDOWS), (WIDE_SCALE, LONG_WINDOWS))
    )
    largest, own_kernel = (
        params["largest"] if ctx.use_fp8(FP8) else None,
        partial(ctx.kernel, OWN_KERNELS),
    )
    casts, rotary, normed = (
        own_kernel("FP8 casts"),
        own_kernel("queries and keys"),
        own_kernel("gradient of a norm"),
    )
    matrices = params["mlp"].reshape(-1, 2, WIDTH, MLP_WIDTH)
    share = lanes[0] / (LANES * ctx.pieces)
    # Scales of all layers at once; the last one has none after it.
    layers = np.array(ATTENDING)
    own = params["attention_scales"][layers].astype(matrices.dtype)
    after = jnp.where((np.arange(LAYERS) == LAST)[:, None], 1.0, params["post_scales"])
    heads_in = scaled_bank(params["queries_keys"], jnp.repeat(own[:, 0], HEADS))
    heads_out = scaled_bank(params["values_outs"], own.reshape(-1))
    heads_out = scaled_bank(
        heads_out, jnp.stack([jnp.ones(len(layers)), after[layers, 0]], axis=1).reshape(-1)
    )
    if largest is not None:
        after_feed = jnp.stack([jnp.ones(len(FEEDS)), after[np.array(FEEDS), 1]], axis=1).reshape(
            -1
        )
        feed_scales = fp8.scales_of(params["mlp"][: len(after_feed)], after_feed).reshape(-1, 2)
        in_scales = jnp.max(
            fp8.scales_of(heads_in[: len(READ_KEYS)], read_NO=READ_KEYS).reshape(-1, HEADS), axis=1
        )
        value_scales = fp8.scales_of(heads_out[: 2 * len(layers) : 2], read_NO=READ_VALUES)

    def feed(a_BTD: jax.Array, number: int, scale: Any = None) -> jax.Array:
        up, down = matrices[number]
        watched, w_scales = (
            (None, None) if largest is None else (largest[number, :3], feed_scales[number])
        )
        fp8_of = {"largest": watched, "share": share, "x_largest": WIDTH**0.5, "w_scales": w_scales}
        return mlp(a_BTD, up, scaled(down, scale), kernel=own_kernel("MLP"), **fp8_of)

    def feeds(layer: int, scale: jax.Array) -> Terms:
        return lambda a_BTD, _: [
            (1, feed(a_BTD, number, scale)) for number, fed in enumerate(FEEDS) if fed == layer
        ]

    def attends(layer: int, others: list[Term]) -> Terms:
        if layer not in ATTENDING:
            return lambda *_: others
        gate = partial(value_gate, layer=layer)
        return lambda a_BTD, first_BTC: [(1, attend(a_BTD, layer, gate(first_BTC))), *others]

    def attend(
        a_BTD: jax.Array, layer: int, gate_BTH: jax.Array | None, more: Any = 0.0
    ) -> jax.Array:
        number, paired, long = ATTENDING.index(layer), layer in PAIRED_LAYERS, layer in LONG_LAYERS
        (angles, scale), width = (wide, HEAD_WIDTH) if long else (narrow, HEAD_WIDTH // 2)
        of_values = slice(HEAD_WIDTH // 2 if layer in HALF_LAYERS else HEAD_WIDTH)
        queries_keys = heads_in[HEADS * number : HEADS * (number + 1)]
        queries_keys = jnp.moveaxis(
            queries_keys.reshape(HEADS, WIDTH, 2, HEAD_WIDTH)[..., :width], 0, 1
        )
        value, out = heads_out[2 * number : 2 * number + 2]
        value = value.reshape(WIDTH, HEADS, HEAD_WIDTH)[..., of_values]
        out = out.reshape(HEADS, HEAD_WIDTH, WIDTH)[:, of_values].reshape(-1, WIDTH)
        # Two matmuls: kernels take queries and keys apart from values, and give such gradients.
        queries_keys, value = (x.reshape(WIDTH, -1) for x in (queries_keys, value))
        if largest is None:
            y_BTE, v_BTE = a_BTD @ queries_keys, a_BTD @ value
        else:
            multiply = partial(
                fp8.measured_matmul, a_BTD, share=share, x_scale=LARGEST_NORMED, kernel=casts
            )
            y_BTE = multiply(queries_keys.T, largest[number, 3], w_scale=in_scales[number])
            v_BTE = multiply(value.T, largest[number, 4], w_scale=value_scales[number])
        positions_TP = pair_positions(lanes[1]) if paired else jnp.arange(lanes[1])[:, None]
        v_BTHK = v_BTE.reshape(*lanes, HEADS, -1) + more
        turned = angles, positions_TP, rotary, documents, long, v_BTHK.shape[-1]
        q_BTHK, k_BTHK = queries_and_keys(y_BTE, (*lanes, HEADS, width), *turned)
        if gate_BTH is not None:
            v_BTHK += gate_BTH[..., None] * values[VALUE_OF[layer]].reshape(heads)[..., of_values]
        path, marked = attention_in_pairs if paired else attention, rotary is not None
        tagged = marked and width < v_BTHK.shape[-1]
        back = (
            (1 + BLOCK * GRADIENT_WINDOWS[stage])
            if GRADIENT_WINDOWS[stage] and ctx.training
            else None
        )
        path = partial(
            path, marked=marked, tagged=tagged, gradient_window=back, backend=ctx.attention
        )
        y_BTHK = path(
            q_BTHK,
            k_BTHK,
            v_BTHK,
            scale=scale,
            documents=documents,
            window=ctx.stage.windows[layer],
        )
        if layer in XSA_LAYERS:
            factors = gates["own value", layer], gates.get(("heads", layer))
            y_BTHK = without_own_value(y_BTHK, v_BTHK, *factors, kernel=own_kernel("XSA"))
        elif long:
            y_BTHK *= gates["heads", layer][..., None]
        return y_BTHK.reshape(*lanes, -1) @ out

    def value_gate(first_BTC: jax.Array, layer: int) -> jax.Array | None:
        if layer not in VALUE_OF:
            return None
        read = [first_BTC, values[VALUE_OF[layer]][..., : GATE_WIDTH // 2]]
        return 2 * sparse_gate(
            jnp.concatenate(read, axis=-1), params["value_gates"][VALUE_OF[layer]]
        )

    tied = STARTS[stage + 1] - 1 <= LAST_TIED
    if e_BTD is None or not tied:
        e_BTD = lookup(params["head" if tied else "embed"], tokens_BT)
    start_BTD = rms_norm(
        smear(e_BTD, params["smear_scale"] * sparse_gate(e_BTD, params["smear_gate"][0]))
    )
    likes_BT, sums = likes(tokens_BT), own_kernel("sums of rows")
    found = jnp.split(ctx.fetch(params["ngrams"], ngram_rows(tokens_BT), kernel=sums), 2, axis=1)
    signed = (signs(likes_BT, WIDTH, jnp.float32, factors) for factors in SIGNS)
    bigram_BTD, trigram_BTD = (x * sign for x, sign in zip(found, signed, strict=True))
    ngram_BTD = (bigram_BTD + trigram_BTD).astype(e_BTD.dtype)
    gates = named(coefficients(start_BTD, params, "gates", 0, params["gates_scale"]), GATES[0])
    words_VD = params["head" if tied else "embed"]
    followed = inputs.terms(params.get("retrieved"), words_VD, ctx.beside, RETRIEVAL)
    x_BTD = first_BTD = blend((1, start_BTD), (gates["ngram", 0], ngram_BTD), *followed[:1])
    outputs: list[jax.Array] = []
    for layer in range(LAST):
        if layer == GATES_FROM:
            gates |= named(coefficients(x_BTD, params, "gates", 1, params["gates_scale"]), GATES[1])
        before, after = params["layer_scales"][layer], params["post_scales"][layer, 1]
        if layer == SKIP_INTO:
            skip_BT = jax.nn.sigmoid(params["skip_scale"]) * gates["skip", layer]
            x_BTD = blend((1, x_BTD), (skip_BT, outputs[SKIP_FROM]))
        else:
            others: list[Term] = []
            if layer in START_LAYERS:
                others += [(gates["start", layer], start_BTD)]
            if layer in NGRAM_LAYERS and layer > 0:  # it is in what layer 0 gets
                others += [(gates["ngram", layer], ngram_BTD)]
            terms, read = attends(layer, others), GATE_WIDTH // 2
            if layer <= SHARED_FROM:
                kernel = normed if layer in ATTENDING else None
                x_BTD = add_normed(terms, x_BTD, before[0], kernel, read)
            else:
                of_shared = terms(*normed_twice(outputs[SHARED_FROM], read))
                x_BTD = blend((before[0], x_BTD), *of_shared)
        kernel = None if layer in NO_MLP else normed
        x_BTD = add_normed(feeds(layer, after), x_BTD, before[1], kernel)
        outputs.append(x_BTD)

    shared_BTD, input_BTD = outputs[SHARED_FROM], x_BTD
    c = jnp.moveaxis(coefficients(x_BTD, params, "mudd", 0, MUDD_SCALE), -1, 0)
    more_BTHK = blend((c[0], first_BTD), (c[1], shared_BTD), (c[2], x_BTD)).reshape(heads)
    x_BTD = blend((1 + c[5], x_BTD), (c[3], first_BTD), (c[4], shared_BTD))
    gate_BTH = jnp.repeat(jnp.moveaxis(c[6:8], 0, -1), HEADS // 2, axis=-1)
    y_BTD = attend(rms_norm(shared_BTD), LAST, gate_BTH, more_BTHK)
    x_BTD = blend((c[8], x_BTD), (c[9], y_BTD), (c[10], first_BTD), (c[11], ngram_BTD))
    a_BTD = rms_norm(x_BTD)
    x_BTD = blend((c[12], x_BTD), (c[13], feed(a_BTD, FEEDS.index(LAST))))
    c = jnp.moveaxis(grouped_coefficients(x_BTD, params, "mudd", 1, MUDD_SCALE), 2, 0)
    added = [
        first_BTD,
        shared_BTD,
        input_BTD,
        values[0],
        outputs[SKIP_FROM],
        values[1],
        values[3],
        values[2],
    ]
    added += [a_BTD, rms_norm(shared_BTD)]
    return rms_norm(blend((1, x_BTD), *zip(c, added, strict=True), *followed[1:]))


def pointing(
    params: dict[str, jax.Array], x_BTD: jax.Array, tokens_BT: jax.Array, ctx: Context
) -> Any:
    """Return queries and keys ``[B, T, K]`` of the pointer, the key of no token, documents and the
    window."""
    q_BTK, k_BTK = (rms_norm(x_BTD @ weights_DK) for weights_DK in params["pointer"])
    q_BTK *= (params["pointer_gain"] * POINTER_WIDTH**-0.5).astype(q_BTK.dtype)
    window = POINTER_WINDOWS[ctx.stage.own] if ctx.training else EVAL_POINTER_WINDOW
    found = {
        "q_BTK": q_BTK,
        "k_BTK": k_BTK,
        "none_K": params["pointer_none"],
        "tokens_BT": tokens_BT,
    }
    return found | {"documents": find_documents(tokens_BT, BOS), "window": window}


def ngram_rows(tokens_BT: jax.Array) -> jax.Array:
    """Return the rows of the table that tokens name, ``[B, 2 T]``."""
    return bigram_and_trigram_rows(likes(tokens_BT), NGRAMS)


def likes(tokens_BT: jax.Array) -> jax.Array:
    """Return what n-grams are of: tokens, or with LIKE their classes."""
    return jnp.asarray(gpt2_classes(BOS, VOCAB))[tokens_BT] if LIKE else tokens_BT


def logits(params: dict[str, jax.Array], x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """Return softcapped fp32 logits ``[B, T, V]`` of what is written; COPY stands for copying."""
    return softcap(fp8.matmul(x_BTD, params["head"], None), CAP)


def forward(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return fp32 logarithms of probabilities ``[B, T, V]``."""
    x_BTD = hidden(params, tokens_BT, ctx)
    where = pointing(params, x_BTD, tokens_BT, ctx)
    return pointer.log_probabilities(logits(params, x_BTD, ctx), COPY, **where)


def loss(
    params: dict[str, jax.Array],
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    ctx: Context,
) -> tuple[jax.Array, jax.Array]:
    """Return (weighted sum of all targets' losses over a lane, loss of every token in nats), both
    over a part of the vocabulary until the last stages."""
    scales, kept_at = (HEAD_SCALES, LOGIT_SCALE) if ctx.use_fp8(FP8) else (None, None)
    head = partial(fp8.head, scales=scales)
    score = partial(cross_entropy, head, cap=CAP, kept_at=kept_at, chunk=ctx.head_chunk)

    def copied(x_BTD: jax.Array) -> Copies:
        rest = pointing(params, x_BTD, tokens_BT, ctx) | {
            "kernel": ctx.kernel(OWN_KERNELS, "pointer")
        }
        return pointer.copies(COPY, targets_BT=targets_BT, **rest)

    # FP8 scales, Adam's epsilon and its memory of smaller batches are for the sum over a lane.
    shares = jnp.stack([through(points)(ctx.step) for points in SHARES[: TARGETS[ctx.stage.own]]])
    targets_NBT, weights_NBT = look_ahead(targets_BT, ctx.stage.lane_len * weights_BT, shares)
    if STARTS[ctx.stage.own] < max(PREFIX_SHARE, default=0):
        prefixes, share = jnp.asarray(gpt2_prefixes(BOS, VOCAB)), jumps(PREFIX_SHARE)(ctx.step)
        targets_NBT, weights_NBT = with_prefix(targets_NBT, weights_NBT, prefixes, share)
    lanes, columns = range(len(tokens_BT)), COLUMNS[ctx.stage.own]
    if columns >= VOCAB:
        x_BTD = hidden(params, tokens_BT, ctx)
        return score(params["head"], x_BTD, targets_NBT, weights_NBT, copies=copied(x_BTD))
    starts = [(ctx.first_row + lane) * VOCAB // LANES + ctx.step * columns for lane in lanes]
    chosen = [
        candidates(jnp.append(targets_BT[lane], COPY), VOCAB, columns, starts[lane])
        for lane in lanes
    ]
    # At once: the gradient of the table that these stages share is added up once.
    e_BTD, *of_lanes = look_up_each(params["head"], [tokens_BT, *(ids_C for ids_C, _ in chosen)])
    x_BTD = hidden(params, tokens_BT, ctx, e_BTD)
    return over_candidates(score, of_lanes, chosen, x_BTD, targets_NBT, weights_NBT, copied(x_BTD))


def optimizer() -> optax.GradientTransformation:
    """ANVIL on the blocks' matrices, Adam every other step on the rest, on tables later every
    fourth."""
    by_group = slow_adams(ADAM, rate, period=2, eps=ADAM_EPS, decay=ADAM_DECAY)
    by_group["words"] = tied((LAST_TIED + 1) // 2, by_group["words"])
    by_group["largest"] = measured()
    _, beta1, beta2, decay = TABLES
    betas = of_pairs(lambda pairs: beta1**pairs), of_pairs(lambda pairs: beta2**pairs)
    decays = of_pairs(lambda pairs: decay * ADAM_DECAY * pairs)
    by_group["tables"] = when_due(
        cautious_adam(of_tables, *betas, eps=ADAM_EPS, weight_decay=decays), every=4
    )
    muon = partial(
        anvil,
        lambda step: ANVIL_LR * rate(step),
        through(MOMENTUM),
        Rails(RAILS_FROM, *RAILS[1:]),
        beta2=ANVIL_BETA2,
    )
    wide = max(1.0, MLP_WIDTH / WIDTH) ** 0.5
    live = np.arange(PARAMETERS["mlp"].shape[0]) < 2 * len(FEEDS)
    up_and_down = (np.tile([wide, 2 * wide], len(live) // 2) * live)[:, None, None]
    for group, scale in {"queries_keys": 1.0, "values_outs": 1.0, "mlp": up_and_down}.items():
        by_group[group] = muon(weight_decay=ANVIL_DECAY, scale=scale, dtype=COMPUTE)
    return optax.partition(by_group, groups(PARAMETERS))


def row_optimizers() -> dict[str, RowTransformation]:
    """Adam on the rows of n-grams that tokens have named, at the rate and in the steps of the value
    tables."""
    _, _, beta2, decay = TABLES
    betas = of_pairs(lambda pairs: beta2**pairs)
    decays = of_pairs(lambda pairs: decay * ADAM_DECAY * pairs)
    return {
        "ngrams": row_adam(
            of_tables, betas, eps=ADAM_EPS, weight_decay=decays, own_kernels=OWN_KERNELS
        )
    }


def of_tables(update: jax.Array) -> jax.Array:
    """The rate of an update of tables, by how many came before it."""
    return TABLES[0] * rate(jnp.asarray(TABLE_UPDATES)[update])


def of_pairs(value: Any) -> optax.Schedule:
    """A schedule by the number of past updates of tables: ``value`` of how many pairs of steps an
    update stands for."""
    pairs = np.array([TABLES_EVERY[STAGE_OF[step]] / 2 for step in TABLE_UPDATES])
    return lambda update: jnp.asarray(value(pairs), jnp.float32)[update]


def averages() -> tuple[Average, ...]:
    """Averages over the last quarter of the run, in the order in which they take the weights'
    place."""
    steps, long, short = np.arange(TOTAL), *(round(LENGTH * last) for last in LAST_STEPS)
    of_two, of_four = (
        np.where(steps == TOTAL - 1, 2 / (long + 1), 1 - (1 - 2 / (long + 1)) ** 2),
        4 / (FORGET * short),
    )
    words = rates_of(steps % 2 == 1, of_two, long, first=max(0, TOTAL - long))
    blended, less = (
        rates_of((steps % 4 == 1) | (steps >= TOTAL - 2), 8 / (long + 2), long),
        BANKS_BLEND - FASTER,
    )
    return (
        Average(words, {"head": WORDS_BLEND, "embed": WORDS_BLEND}),
        Average(
            rates_of((TOTAL - 1 - steps) % 4 == 0, of_four, short), {"values_outs": 1.0, "mlp": 1.0}
        ),
        Average(rates_of(np.isin(steps, TABLE_UPDATES), of_four, short), {"values": 1.0}),
        Average(blended, {"queries_keys": BANKS_BLEND, "values_outs": less, "mlp": less}),
    )


def windows_of(long: int, short: int) -> tuple[int, ...]:
    """The window of every layer in tokens, itself and so many blocks before it."""
    return tuple(1 + BLOCK * (long if layer in LONG_LAYERS else short) for layer in range(LAYERS))


WIDTHS = [
    (layer in ATTENDING) * (3 + (layer in LONG_LAYERS) - (layer in HALF_LAYERS))
    for layer in range(LAYERS)
]
ROWS = zip(
    STEPS,
    LANE_LENS,
    MAX_DOC_LENS,
    MAX_DOCS,
    map(windows_of, LONG_WINDOWS, SHORT_WINDOWS),
    strict=True,
)
STAGES = tuple(
    Stage(*row, scored=min(COLUMNS[n], VOCAB), every=TABLES_EVERY[n], own=n)
    for n, row in enumerate(ROWS)
)

RECIPE = Recipe(
    name="jspeed3",
    parent="r92",
    track="fineweb/8xH100-retrieval" if RETRIEVAL else "fineweb/8xH100",
    data=Data("fineweb", vocab_size=50_257, bos_id=BOS, align="bos"),
    target_loss=TARGET_LOSS,
    parameters=PARAMETERS,
    forward=forward,
    loss=loss,
    hidden=hidden,
    logits=logits,
    pointer=lambda params, *rest: (COPY, pointing(params, *rest)),
    optimizer=optimizer,
    stages=STAGES,
    lanes=LANES,
    eval_every=EVAL_EVERY,
    eval_tokens=EVAL_TOKENS,
    eval_len=EVAL_LEN,
    attention_width=WIDTH,
    layers=LAYERS,
    attention_widths=tuple(WIDTH // 4 * quarters for quarters in WIDTHS),
    eval_windows=windows_of(EVAL_WINDOW, SHORT_WINDOWS[-1]),
    row_optimizers=row_optimizers,
    named_rows={"ngrams": ngram_rows},
    averages=averages(),
    keep_norm=("embed", "head", "mlp", "queries_keys", "values_outs"),
    beside=Retrieval(RETRIEVAL, recent=32) if RETRIEVAL else None,
)
