"""jspeed3: r92, where a token may also be copied from earlier in its document; n-grams of like text

What        Against r92: a pointer. One head of attention over the document's last 2,048 tokens says
            which of them is next, a padding id of the head how likely that is; their mixture is the
            distribution of the next token, in training and evaluation (over 8,192 tokens). N-grams
            are hashed from the first token of like text: Table, " table". From stage 2 on attention
            has gradients within 257 tokens. RETRIEVAL adds an n-gram look-up over earlier training
            steps. Steps are 0.86 of r92's: lab/2026-11-27-jspeed3-draft.md.
Departures  Keys lie within a window, not in two blocks (379); gradients end at one window, fixed
            beforehand (371).
Source      r92; PRs 379 (pointer), 375 (classes), 371 (gradients), 367 (cells) of modded-nanogpt,
            open in October 2026.
Hardware    8xH100: not run here.
Parent      r92
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.nn import initializers

from jspeed.model import fp8, layers, losses, pointer
from jspeed.model.attention import Documents, attention, find_documents, without_own_value
from jspeed.model.losses import multi_token_targets, with_prefix
from jspeed.model.mlp import MARGIN, fp8_mlp, mlp
from jspeed.model.positions import frequencies, queries_and_keys, smear, yarn
from jspeed.model.prefixes import gpt2_classes, gpt2_prefixes
from jspeed.optim.averages import Average, rates_of
from jspeed.optim.rows import RowTransformation, row_adam
from jspeed.optim.schedules import jumps, shortened, staged, through
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Stage, groups
from jspeed.retrieval import Retrieval, inputs
from jspeed.speedrun import mudd
from jspeed.speedrun.anvil import TwoMomentum, anvil
from jspeed.speedrun.candidates import candidates, over_candidates
from jspeed.speedrun.cautious import cautious_adam
from jspeed.speedrun.heads import attention_in_pairs, pair_positions
from jspeed.speedrun.ngrams import bigram_and_trigram_rows, signs
from jspeed.speedrun.slow import delayed_scaling, slow_adams, tied, when_due

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
RETRIEVAL = ()  # lengths of contexts to look up in earlier steps, in tokens: (2, 3, 4, 6, 10)
# dtype of activations, of the weights they meet, of n-grams, and of the six maps
COMPUTE = "bfloat16"
FP8 = "auto"  # head, MLP and projections in training: auto (where it is native), on, off
# around FP8, attention, n-grams: auto (on Hopper, where the preflight passes them), on, off
OWN_KERNELS = "auto"

# Stages
LANES = 8
STEPS = (276, 12, 297, 244, 122, 58, 17)
LENGTH = 1.0  # share of them that a run makes; schedules move with the borders of stages
LANE_LENS = (16_384, 32_768, 32_768, 49_152, 49_152, 40_960, 16_384)
MAX_DOC_LENS = (896, 2048, 2048, 3072, 3072, 3072, 3072)
SEGMENT = 2560  # tokens of a document that attention takes as one
MAX_DOCS = (64, 96, 96, 128, 128, 128, 64)  # segments in one lane
BLOCK = 128  # tokens
LONG_WINDOWS = (3, 7, 7, 11, 11, 11, 13)  # blocks
SHORT_WINDOWS = (1, 3, 3, 5, 5, 5, 6)
GRADIENT_WINDOWS = (0, 2, 2, 2, 2, 2, 2)  # blocks with gradients of attention; 0: its window
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
FASTER = 0.2007  # less of BANKS_BLEND where a bank has a faster average already

# Evaluation
TARGET_LOSS = 3.28  # nats per token
EVAL_EVERY = 250
EVAL_TOKENS = 10_485_760
EVAL_LEN = 262_144
EVAL_WINDOW = 20  # blocks in LONG_LAYERS
EVAL_POINTER_WINDOW = 8192  # tokens

# What is counted in steps moves with LENGTH.
counted = SHARES, PREFIX_SHARE, LAST_TIED, MOMENTUM, RAILS[0], COOLDOWN
STEPS, moved = shortened(LENGTH, STEPS, counted, period=4)
SHARES, PREFIX_SHARE, LAST_TIED, MOMENTUM, RAILS_FROM, COOLDOWN = moved
RAILS = RAILS_FROM, *RAILS[1:]
LAST_STEPS = round(LENGTH * LAST_STEPS[0]), round(LENGTH * LAST_STEPS[1])
STARTS = (0, *accumulate(STEPS))
TOTAL, LAST, HEAD_WIDTH = sum(STEPS), LAYERS - 1, WIDTH // HEADS
NARROW = len(ATTENDING) - len(LONG_LAYERS)
# whose MLP is where in the bank
FEEDS = (*(layer for layer in range(LAYERS) if layer not in NO_MLP), TWICE)
CAP = losses.asymmetric_cap(23.0, 5.0, 7.5)
# Gates: layers that have it, how many numbers it is, what they start at.
KINDS = {
    "own value": (XSA_LAYERS, HEADS, 0.0),
    "heads": (LONG_LAYERS, HEADS, 0.25),
    "skip": ((SKIP_INTO,), 1, 0.5),
}
KINDS |= {"start": (START_LAYERS, 1, 0.0), "ngram": (NGRAM_LAYERS, 1, 0.05)}
GATES, GATE_STARTS = mudd.slots(KINDS, (range(GATES_FROM), range(GATES_FROM, LAYERS)))
# Sums of the last layer: their terms, and where the coefficients start that tokens weigh them by.
GAIN = 1.1**0.5
MIX = {
    "values": {"first": 0.0, "shared": 0.0, "state": 0.0},
    "state": {"first": 0.0, "shared": 0.0, "state": 0.0},  # 1 is added to the last
    "table": {"low heads": 2.0, "high heads": 2.0},  # of values
    "MLP": {"state": GAIN, "attention": 1.0, "first": 0.0, "ngrams": 0.05},
    "end": {"state": GAIN, "MLP": 1.0},
}
SLOTS = [(to, of) for to, terms in MIX.items() for of in terms]
# Likewise in the sum that the head reads.
ADDED = dict.fromkeys(("first", "shared", "input", "values 0", "skip", "values 1"), 0.0)
ADDED |= {"shared": -0.5, "values 3": 0.0, "values 2": 0.0, "fed": 0.0, "normed": 0.0}
MIX_STARTS = mudd.padded([MIX[to][of] for to, of in SLOTS], list(ADDED.values()))
HEAD_SCALES = fp8.Scales(x=100 / 448, w=2.0 / 448, grad=0.75 / 8 / 448)
KEEP = partial(fp8.kept_in_e4m3, scale=0.5)  # any power of two but 1
# Columns of "largest", by matrices; every scale starts at 1.
AMAX: dict[str, int | slice] = {"mlp": slice(3), "queries_keys": 3, "values": 4}
LARGEST = initializers.constant(np.array([448 / MARGIN, 0.0, 0.0, 0.0, 0.0]))
rate = staged(RATES, STARTS[:-1], fall=COOLDOWN, floor=FINAL_RATE)
VD, VALUES = (VOCAB, WIDTH), (VOCAB, VALUE_TABLES, WIDTH)
uniform, uniform_up = layers.uniform(0.5), layers.uniform(3**-0.5)
small, tiny, zeros = initializers.normal(0.01), initializers.normal(0.005), initializers.zeros
# The steps in which tables are updated.
EVERY = np.repeat(TABLES_EVERY, STEPS)
UPDATES = np.flatnonzero(np.arange(1, TOTAL + 1) % EVERY == 0).astype(np.int32)

Params = dict[str, Array]
# Columns that are read of each matrix for queries and keys, and of each for values: half of every
# head, or all.
HALF = np.arange(2 * WIDTH) % HEAD_WIDTH < HEAD_WIDTH // 2
WIDE = np.repeat([layer in LONG_LAYERS for layer in ATTENDING], HEADS)
READ_KEYS = WIDE[:, None] | HALF[: 2 * HEAD_WIDTH]
READ_VALUES = np.array([layer not in HALF_LAYERS for layer in ATTENDING])[:, None] | HALF[:WIDTH]


def bank(
    init: initializers.Initializer, group: str, count: int, *shape: int, halves: int = 0
) -> ParamSpec:
    """Matrices of one shape for ANVIL, ``[n, in, out]``, zeros after them so that LANES devices can
    share them. Of ``halves`` layers half is read, WIDTH^2 numbers."""
    axes, padding = ("matrix", "in", "out"), -count % LANES

    def draw(key: Array, shape: Any, dtype: Any) -> Array:
        return init(key, shape, dtype) * (jnp.arange(shape[0]) < count)[:, None, None]

    shape, unread = (count + padding, *shape), WIDTH**2 * halves
    return ParamSpec(shape, axes, draw, group, COMPUTE, padding, unread=unread)


def slow(start: Any, group: str, *shape: int) -> ParamSpec:
    """Anything smaller: weights in the compute dtype by how they are drawn, or fp32 numbers by
    where they start."""
    init = start if callable(start) else initializers.constant(np.array(start))
    compute = COMPUTE if callable(start) else None
    return ParamSpec(shape, ("layer", "in", "out")[: len(shape)], init, group, compute, every=2)


# Bank "queries_keys": the queries of each pair of heads, then their keys, of each layer in
# ATTENDING; narrow layers read the first half of each head. Bank "values_outs": value and output of
# each; bank "mlp": up and down of each in FEEDS, down transposed.
PARAMETERS = {
    "embed": ParamSpec(VD, ("token", "model"), tiny, "words", COMPUTE, every=2, init_like="head"),
    "head": ParamSpec(VD, ("vocab", "model"), tiny, "words", COMPUTE, every=2),
    "values": ParamSpec(
        VALUES, ("token", "table", "model"), small, "tables", COMPUTE, every=4, grad_accum_fp32=True
    ),
    "ngrams": ParamSpec(
        (NGRAMS, WIDTH), ("row", "model"), zeros, "ngrams", dtype=COMPUTE, every=4, sparse_rows=2
    ),
    "queries_keys": bank(
        uniform, "queries_keys", HEADS * len(ATTENDING), WIDTH, 2 * HEAD_WIDTH, halves=NARROW
    ),
    "values_outs": bank(
        uniform, "values_outs", 2 * len(ATTENDING), WIDTH, WIDTH, halves=len(HALF_LAYERS)
    ),
    "mlp": bank(layers.zero_every(2, uniform), "mlp", 2 * len(FEEDS), WIDTH, MLP_WIDTH),
    "value_gates": slow(zeros, "value_gates", VALUE_TABLES - 1, GATE_WIDTH, HEADS),
    "smear_gate": slow(zeros, "smear", 1, GATE_WIDTH),
    "attention_scales": slow((0.5, 1.0), "scalars", LAYERS, 2),
    "smear_scale": slow(0.0, "scalars"),
    "skip_scale": slow(-1.5, "scalars"),
    "layer_scales": slow(GAIN, "layer_scales", LAYERS, 2),
    "post_scales": slow(1.0, "post_scales", LAYERS, 2),
    "mudd_up": slow(uniform_up, "mudd", 2, WIDTH, MUDD_WIDTH),
    "mudd_down": slow(zeros, "mudd", 2, MUDD_WIDTH, MIX_STARTS.shape[1]),
    "mudd_groups": slow(zeros, "mudd", MUDD_WIDTH, len(ADDED), MIX_GROUPS),
    "mudd_bias": slow(MIX_STARTS / MUDD_SCALE, "mudd_bias", *MIX_STARTS.shape),
    "gates_up": slow(uniform_up, "gates", 2, WIDTH, MUDD_WIDTH),
    "gates_down": slow(zeros, "gates", 2, MUDD_WIDTH, GATE_STARTS.shape[1]),
    "gates_bias": slow(GATE_STARTS / MUDD_SCALE, "gates_bias", *GATE_STARTS.shape),
    "gates_scale": slow(MUDD_SCALE, "gates_bias"),
    # Queries and keys of the pointer, how sharp it is, and the key of no token.
    "pointer": slow(layers.uniform(1.0), "pointer", 2, WIDTH, POINTER_WIDTH),
    "pointer_gain": slow(1.0, "pointer"),
    "pointer_none": slow(initializers.normal(POINTER_WIDTH**-0.5), "pointer", POINTER_WIDTH),
    # No parameter: amax of the step before, for FP8. Of each MLP its activation and the gradients
    # that enter its matmuls; of queries and keys, and of values, their gradient.
    "largest": ParamSpec((len(FEEDS), 5), ("layer", "kind"), LARGEST, "largest"),
}
if RETRIEVAL:
    # how much of the n-gram look-up the first state and the head get, by how sure it is
    PARAMETERS["retrieved"] = slow((0.5, 1.5), "scalars", inputs.number_of_cells(RETRIEVAL), 2)


class Common(NamedTuple):
    """What all layers of a forward pass read."""

    params: Params
    ctx: Context
    kernel: Callable[[str], Any]  # a custom kernel, where the devices have it
    documents: Documents
    values: list[Array]  # [B, T, D] of each value table: the tokens' rows
    mlp: Array  # [n, 2, D, F]; scaled where it is used
    queries_keys: Array  # like this bank and the next in PARAMETERS, scaled
    values_outs: Array
    fp8: fp8.Rounding
    start_BTD: Array  # the state of words alone
    ngram_BTD: Array
    gates: dict[tuple[str, int], Array]  # [B, T] or [B, T, H], by kind and layer (KINDS)


def hidden(params: Params, tokens_BT: Array, ctx: Context, e_BTD: Array | None = None) -> Array:
    """Return what the head reads: ``[B, T, D]``. ``e_BTD`` are the tokens' rows of the head where
    they are known.

    A layer, with ``g`` that each token computes (gates) and ``b`` that all share; fields say which
    layers have each part::

        a = rms_norm(x)  # after SHARED_FROM: of the state after that layer
        q, k, v = rotated(a @ Wq), rotated(a @ Wk), a @ Wv + g * rows of a value table
        y = g * (attention(q, k, v) - tanh(g) * its part along v) @ Wo
        x = b * x + y + g * start + g * ngrams
        x = b * x + relu(rms_norm(x) @ Wup)**2 @ Wdown

    In the last one, and in the sum that the head reads, tokens weigh every term (MIX, ADDED).
    """
    # --- Before all layers ---
    tied = STARTS[ctx.stage.own + 1] - 1 <= LAST_TIED
    words_VD = params["head" if tied else "embed"]
    common = prepared(params, tokens_BT, ctx, words_VD, e_BTD if tied else None)
    gates, start_BTD, ngram_BTD = common.gates, common.start_BTD, common.ngram_BTD
    looked_up = inputs.terms(params.get("retrieved"), words_VD, ctx.beside, RETRIEVAL)
    x_BTD = first_BTD = mudd.blend((1, start_BTD), (gates["ngram", 0], ngram_BTD), *looked_up[:1])
    # --- Layers ---
    outputs: list[Array] = []
    for layer in range(LAST):
        if layer == GATES_FROM:  # anew, from a state that knows its context
            c_BTN = mudd.coefficients(x_BTD, params, "gates", 1, params["gates_scale"])
            gates |= mudd.named(c_BTN, GATES[1])
        x_BTD = after_layer(layer, x_BTD, common, outputs)
        outputs.append(x_BTD)
    # --- Last layer ---
    shared_BTD, input_BTD = outputs[SHARED_FROM], x_BTD
    x_BTD, fed_BTD = after_last(x_BTD, first_BTD, shared_BTD, common)
    # --- What the head reads: groups of channels weigh earlier states apart ---
    c_NBTG = jnp.moveaxis(mudd.grouped_coefficients(x_BTD, params, "mudd", 1, MUDD_SCALE), 2, 0)
    added = {"first": first_BTD, "shared": shared_BTD, "input": input_BTD, "fed": fed_BTD}
    added |= {f"values {number}": rows_BTD for number, rows_BTD in enumerate(common.values)}
    added |= {"skip": outputs[SKIP_FROM], "normed": layers.rms_norm(shared_BTD)}
    terms = zip(c_NBTG, (added[name] for name in ADDED), strict=True)
    return layers.rms_norm(mudd.blend((1, x_BTD), *terms, *looked_up[1:]))


def prepared(
    params: Params, tokens_BT: Array, ctx: Context, words_VD: Array, e_BTD: Array | None
) -> Common:
    """Return what all layers read; ``e_BTD`` are rows of ``words_VD`` where they are known."""
    # --- Documents, values, matrices ---
    # In training documents are cut at SEGMENT: attention launches blocks for the longest allowed.
    kernel, longest = partial(ctx.kernel, OWN_KERNELS), ctx.stage.max_doc_len
    segment = SEGMENT if ctx.training and SEGMENT < (longest or 0) else None
    documents = find_documents(tokens_BT, BOS, ctx.stage.max_docs, longest, segment)
    values = layers.look_up_all(params["values"], tokens_BT)
    mlp = params["mlp"].reshape(-1, 2, WIDTH, MLP_WIDTH)
    banks = scaled_banks(params, ctx, len(tokens_BT))
    # --- First state: the word, and some of the word before ---
    if e_BTD is None:
        e_BTD = layers.lookup(words_VD, tokens_BT)
    gate_BT = params["smear_scale"] * layers.sparse_gate(e_BTD, params["smear_gate"][0])
    start_BTD = layers.rms_norm(smear(e_BTD, gate_BT))
    # --- N-grams: those that collide in a row differ in signs, and do not add up ---
    like_BT, sums = likes(tokens_BT), kernel("sums of rows")
    found = jnp.split(ctx.fetch(params["ngrams"], ngram_rows(tokens_BT), kernel=sums), 2, axis=1)
    signed = (signs(like_BT, WIDTH, jnp.float32, factors) for factors in SIGNS)
    bigram_BTD, trigram_BTD = (x_BTD * sign for x_BTD, sign in zip(found, signed, strict=True))
    ngram_BTD = (bigram_BTD + trigram_BTD).astype(e_BTD.dtype)
    c_BTN = mudd.coefficients(start_BTD, params, "gates", 0, params["gates_scale"])
    gates = mudd.named(c_BTN, GATES[0])
    return Common(params, ctx, kernel, documents, values, mlp, *banks, start_BTD, ngram_BTD, gates)


def scaled_banks(params: Params, ctx: Context, lanes: int) -> tuple[Array, Array, fp8.Rounding]:
    """Return the banks of attention with all scales, and how matmuls of ``lanes`` are rounded.

    Weights are scaled, not activations, which would need a pass over them; and all layers at once,
    since one alone is kernels of a few numbers.
    """
    # --- Scales ---
    attending, feeds = np.array(ATTENDING), np.array(FEEDS)
    own = params["attention_scales"][attending].astype(params["mlp"].dtype)
    # The last layer has none after it: MIX weighs what it adds.
    after = jnp.where((np.arange(LAYERS) == LAST)[:, None], 1.0, params["post_scales"])
    queries_keys = layers.scaled_bank(params["queries_keys"], jnp.repeat(own[:, 0], HEADS))
    values_outs = layers.scaled_bank(params["values_outs"], own.reshape(-1))
    of_outs = jnp.stack([jnp.ones(len(attending)), after[attending, 0]], axis=1).reshape(-1)
    values_outs = layers.scaled_bank(values_outs, of_outs)
    if not ctx.use_fp8(FP8):
        return queries_keys, values_outs, fp8.Rounding()
    # --- FP8 ---
    of_downs = jnp.stack([jnp.ones(len(feeds)), after[feeds, 1]], axis=1).reshape(-1)
    of_mlps = fp8.scales_of(params["mlp"][: len(of_downs)], of_downs).reshape(-1, 2)
    of_heads = fp8.scales_of(queries_keys[: len(READ_KEYS)], read_NO=READ_KEYS).reshape(-1, HEADS)
    of_keys = jnp.max(of_heads, axis=1)
    of_values = fp8.scales_of(values_outs[: 2 * len(attending) : 2], read_NO=READ_VALUES)
    w_scales = {"mlp": of_mlps, "queries_keys": of_keys, "values": of_values}
    share, casts = lanes / (LANES * ctx.sub_lanes), ctx.kernel(OWN_KERNELS, "FP8 casts")
    rounding = fp8.Rounding(params["largest"], AMAX, w_scales, share, WIDTH**0.5, casts)
    return queries_keys, values_outs, rounding


def after_layer(layer: int, x_BTD: Array, common: Common, outputs: list[Array]) -> Array:
    """Return the state after ``layer``, ``[B, T, D]``; ``outputs`` are those of earlier layers."""
    params, gates, normed = common.params, common.gates, common.kernel("gradient of a norm")
    before, after = params["layer_scales"][layer], params["post_scales"][layer, 1]
    # --- Attention, words, n-grams ---
    others: list[mudd.Term] = []
    if layer in START_LAYERS:
        others += [(gates["start", layer], common.start_BTD)]
    if layer in NGRAM_LAYERS and layer > 0:  # it is in what layer 0 gets
        others += [(gates["ngram", layer], common.ngram_BTD)]

    def attended(a_BTD: Array, first_BTC: Array) -> list[mudd.Term]:
        if layer not in ATTENDING:
            return others
        return [(1, attend(a_BTD, layer, common, value_gate(first_BTC, layer, common))), *others]

    channels = GATE_WIDTH // 2
    if layer == SKIP_INTO:
        skip_BT = jax.nn.sigmoid(params["skip_scale"]) * gates["skip", layer]
        x_BTD = mudd.blend((1, x_BTD), (skip_BT, outputs[SKIP_FROM]))
    elif layer <= SHARED_FROM:
        kernel = normed if layer in ATTENDING else None
        x_BTD = mudd.add_normed(attended, x_BTD, before[0], kernel, channels)
    else:
        of_shared = attended(*mudd.normed_twice(outputs[SHARED_FROM], channels))
        x_BTD = mudd.blend((before[0], x_BTD), *of_shared)

    # --- MLP: one, none, or two ---
    def fed(a_BTD: Array, _: Array) -> list[mudd.Term]:
        numbers = (number for number, of in enumerate(FEEDS) if of == layer)
        return [(1, feed(a_BTD, number, common, after)) for number in numbers]

    return mudd.add_normed(fed, x_BTD, before[1], None if layer in NO_MLP else normed)


def after_last(
    x_BTD: Array, first_BTD: Array, shared_BTD: Array, common: Common
) -> tuple[Array, Array]:
    """Return the state after the last layer, and what its MLP reads: ``[B, T, D]`` each."""
    c_NBT = jnp.moveaxis(mudd.coefficients(x_BTD, common.params, "mudd", 0, MUDD_SCALE), -1, 0)
    c = lambda to, of: c_NBT[SLOTS.index((to, of))]
    mixed = lambda to, **states: mudd.blend(*((c(to, of), x) for of, x in states.items()))
    # --- Attention: reads the shared state, and has values of three ---
    more_BTD = mixed("values", first=first_BTD, shared=shared_BTD, state=x_BTD)
    more_BTHK = more_BTD.reshape(*x_BTD.shape[:2], HEADS, HEAD_WIDTH)
    kept = 1 + c("state", "state"), x_BTD
    x_BTD = mudd.blend(kept, (c("state", "first"), first_BTD), (c("state", "shared"), shared_BTD))
    first = SLOTS.index(("table", "low heads"))
    gate_BT2 = jnp.moveaxis(c_NBT[first : first + len(MIX["table"])], 0, -1)
    gate_BTH = jnp.repeat(gate_BT2, HEADS // 2, axis=-1)
    y_BTD = attend(layers.rms_norm(shared_BTD), LAST, common, gate_BTH, more_BTHK)
    # --- MLP ---
    x_BTD = mixed("MLP", state=x_BTD, attention=y_BTD, first=first_BTD, ngrams=common.ngram_BTD)
    a_BTD, number = layers.rms_norm(x_BTD), FEEDS.index(LAST)
    ends = (c("end", "state"), x_BTD), (c("end", "MLP"), feed(a_BTD, number, common))
    return mudd.blend(*ends), a_BTD


def attend(
    a_BTD: Array, layer: int, common: Common, gate_BTH: Array | None, more_BTHK: Array | float = 0.0
) -> Array:
    """Return what attention of ``layer`` makes of ``a_BTD``: ``[B, T, D]``. ``more_BTHK`` is added
    to its values, and ``gate_BTH`` times the rows of its value table."""
    ctx, documents, gates = common.ctx, common.documents, common.gates
    number, paired, long = ATTENDING.index(layer), layer in PAIRED_LAYERS, layer in LONG_LAYERS
    lanes, width = a_BTD.shape[:2], HEAD_WIDTH if long else HEAD_WIDTH // 2  # narrow: a lower loss
    queries_keys, value, out = matrices(layer, width, common)
    # --- Queries, keys, values ---
    # Two matmuls: kernels take queries and keys apart from values, and give such gradients.
    y_BTE = common.fp8.matmul(a_BTD, queries_keys, "queries_keys", number)
    v_BTE = common.fp8.matmul(a_BTD, value, "values", number)
    # Paired heads interleave to one sequence, in which each sees the other's keys too.
    positions_TP = pair_positions(lanes[1]) if paired else jnp.arange(lanes[1])[:, None]
    v_BTHK = v_BTE.reshape(*lanes, HEADS, -1) + more_BTHK
    rotary, wide = common.kernel("queries and keys"), v_BTHK.shape[-1]
    scale, blocks = (WIDE_SCALE, LONG_WINDOWS) if long else (NARROW_SCALE, SHORT_WINDOWS)
    windows = [BLOCK * n for n in blocks[: ctx.stage.own + 1]]
    angles, scale = yarn(frequencies(HEAD_WIDTH // 4), scale, windows)
    turned = angles, positions_TP, rotary, documents, long, wide
    q_BTHK, k_BTHK = queries_and_keys(y_BTE, (*lanes, HEADS, width), *turned)
    if gate_BTH is not None:
        rows_BTD = common.values[VALUE_OF[layer]]
        v_BTHK += gate_BTH[..., None] * rows_BTD.reshape(*lanes, HEADS, HEAD_WIDTH)[..., :wide]
    # --- Attention ---
    # The kernel of queries and keys marks lanes of too many documents. It fills up narrow heads
    # with tags of documents, so that attention needs no mask of them.
    overflow_checked = rotary is not None
    near = GRADIENT_WINDOWS[ctx.stage.own] if ctx.training else 0
    y_BTHK = (attention_in_pairs if paired else attention)(
        q_BTHK,
        k_BTHK,
        v_BTHK,
        scale=scale,
        documents=documents,
        window=ctx.stage.windows[layer],
        overflow_checked=overflow_checked,
        doc_tagged=overflow_checked and width < wide,
        gradient_window=1 + BLOCK * near if near else None,
        backend=ctx.attention,
    )
    # --- Heads: without their own token's value, which the state has already; some louder ---
    if layer in XSA_LAYERS:
        factors = gates["own value", layer], gates.get(("heads", layer))
        y_BTHK = without_own_value(y_BTHK, v_BTHK, *factors, kernel=common.kernel("XSA"))
    elif long:
        y_BTHK *= gates["heads", layer][..., None]
    return y_BTHK.reshape(*lanes, -1) @ out


def matrices(layer: int, width: int, common: Common) -> tuple[Array, Array, Array]:
    """Return matrices ``[in, out]`` for queries and keys, whose heads are ``width`` wide, for
    values, and for the output."""
    number, of_values = ATTENDING.index(layer), slice(HEAD_WIDTH // (1 + (layer in HALF_LAYERS)))
    queries_keys = common.queries_keys[HEADS * number : HEADS * (number + 1)]
    by_head = queries_keys.reshape(HEADS, WIDTH, 2, HEAD_WIDTH)[..., :width]
    queries_keys = jnp.moveaxis(by_head, 0, 1)
    value, out = common.values_outs[2 * number : 2 * number + 2]
    value = value.reshape(WIDTH, HEADS, HEAD_WIDTH)[..., of_values]
    out = out.reshape(HEADS, HEAD_WIDTH, WIDTH)[:, of_values].reshape(-1, WIDTH)
    return queries_keys.reshape(WIDTH, -1), value.reshape(WIDTH, -1), out


def value_gate(first_BTC: Array, layer: int, common: Common) -> Array | None:
    """Return what heads take of their value table, by a few channels of state and rows: 0 to 2,
    ``[B, T, H]``."""
    if layer not in VALUE_OF:
        return None
    read = [first_BTC, common.values[VALUE_OF[layer]][..., : GATE_WIDTH // 2]]
    gates = common.params["value_gates"]
    return 2 * layers.sparse_gate(jnp.concatenate(read, axis=-1), gates[VALUE_OF[layer]])


def feed(a_BTD: Array, number: int, common: Common, scale: Array | None = None) -> Array:
    """Return ``scale`` times what the MLP of FEEDS[``number``] makes of ``a_BTD``."""
    (up, down), rounding = common.mlp[number], common.fp8
    down = layers.scaled(down, scale)
    if rounding.amax is None:
        return mlp(a_BTD, up, down)
    return fp8_mlp(a_BTD, up, down, rounding, number, common.kernel("MLP"))


def pointing(params: Params, x_BTD: Array, tokens_BT: Array, ctx: Context) -> dict[str, Any]:
    """Return where the pointer looks: arguments of :func:`jspeed.model.pointer.copies`."""
    q_BTK, k_BTK = (layers.rms_norm(x_BTD @ weights_DK) for weights_DK in params["pointer"])
    # Normalised, they do not say how sure they are: a learned number does.
    q_BTK *= (params["pointer_gain"] * POINTER_WIDTH**-0.5).astype(q_BTK.dtype)
    window = POINTER_WINDOWS[ctx.stage.own] if ctx.training else EVAL_POINTER_WINDOW
    found: dict[str, Any] = {"q_BTK": q_BTK, "k_BTK": k_BTK, "none_K": params["pointer_none"]}
    found |= {"tokens_BT": tokens_BT, "documents": find_documents(tokens_BT, BOS)}
    return found | {"window": window}


def ngram_rows(tokens_BT: Array) -> Array:
    """Return the rows of the table that tokens name, ``[B, 2 T]``."""
    return bigram_and_trigram_rows(likes(tokens_BT), NGRAMS)


def likes(tokens_BT: Array) -> Array:
    """Return what n-grams are of: tokens, or with LIKE their classes."""
    return jnp.asarray(gpt2_classes(BOS, VOCAB))[tokens_BT] if LIKE else tokens_BT


def logits(params: Params, x_BTD: Array, ctx: Context) -> Array:
    """Return softcapped fp32 logits ``[B, T, V]``."""
    return losses.softcap(fp8.matmul(x_BTD, params["head"], None), CAP)


def forward(params: Params, tokens_BT: Array, ctx: Context) -> Array:
    """Return fp32 logarithms of probabilities ``[B, T, V]``."""
    x_BTD = hidden(params, tokens_BT, ctx)
    where = pointing(params, x_BTD, tokens_BT, ctx)
    return pointer.log_probabilities(logits(params, x_BTD, ctx), COPY, **where)


def loss(
    params: Params, tokens_BT: Array, targets_BT: Array, weights_BT: Array, ctx: Context
) -> tuple[Array, Array]:
    """Return (weighted sum of all targets' losses over a lane, loss of every token in nats), both
    over a part of the vocabulary until the last stages."""
    # --- Targets ---
    # The sum over a lane, for which FP8 scales, Adam's epsilon and its memory of smaller batches
    # are meant.
    stage = ctx.stage.own
    shares = jnp.stack([through(points)(ctx.step) for points in SHARES[: TARGETS[stage]]])
    several = multi_token_targets(targets_BT, ctx.stage.lane_len * weights_BT, shares)
    if STARTS[stage] < max(PREFIX_SHARE, default=0):
        prefixes, share = jnp.asarray(gpt2_prefixes(BOS, VOCAB)), jumps(PREFIX_SHARE)(ctx.step)
        several = with_prefix(*several, prefixes, share)
    targets_NBT, weights_NBT = pointer.with_copying(*several, COPY)
    # --- Candidates: until the last stages a lane scores a part of the vocabulary ---
    lanes, columns, e_BTD = range(len(tokens_BT)), COLUMNS[stage], None
    if columns < VOCAB:
        starts = [(ctx.first_lane + lane) * VOCAB // LANES + ctx.step * columns for lane in lanes]
        chosen = [
            # all targets of the lane, then the next in a fixed order
            candidates(jnp.append(targets_BT[lane], COPY), VOCAB, columns, starts[lane])
            for lane in lanes
        ]
        # At once: the gradient of the table that these stages share is added up once.
        ids = tokens_BT, *(ids_C for ids_C, _ in chosen)
        e_BTD, *of_lanes = layers.look_up_each(params["head"], list(ids))
    # --- Scores ---
    x_BTD = hidden(params, tokens_BT, ctx, e_BTD)
    scales, keep = (HEAD_SCALES, KEEP) if ctx.use_fp8(FP8) else (None, losses.as_made)
    head = losses.Head(partial(fp8.head, scales=scales), ctx.head_chunk, keep, pointer.mix)
    score = partial(losses.cross_entropy, head, cap=CAP)
    where = pointing(params, x_BTD, tokens_BT, ctx) | {"kernel": ctx.kernel(OWN_KERNELS, "pointer")}
    copies = pointer.copies(targets_BT=targets_BT, **where)
    if columns >= VOCAB:
        return score(params["head"], x_BTD, targets_NBT, weights_NBT, *copies)
    return over_candidates(score, of_lanes, chosen, x_BTD, targets_NBT, weights_NBT, *copies)


def optimizer() -> optax.GradientTransformation:
    """ANVIL on the blocks' matrices, Adam every other step on the rest, on tables later every
    fourth."""
    by_group = slow_adams(ADAM, rate, period=2, eps=ADAM_EPS, decay=ADAM_DECAY)
    by_group["words"] = tied((LAST_TIED + 1) // 2, by_group["words"])
    by_group["largest"] = delayed_scaling()
    _, beta1, beta2, decay = TABLES
    betas = of_pairs(lambda pairs: beta1**pairs), of_pairs(lambda pairs: beta2**pairs)
    decays = of_pairs(lambda pairs: decay * ADAM_DECAY * pairs)
    adam = cautious_adam(of_tables, *betas, eps=ADAM_EPS, weight_decay=decays)
    by_group["tables"] = when_due(adam, every=4)
    schedules = (lambda step: ANVIL_LR * rate(step)), through(MOMENTUM), TwoMomentum(*RAILS)
    muon = partial(anvil, *schedules, beta2=ANVIL_BETA2)
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
    adam = row_adam(of_tables, betas, eps=ADAM_EPS, weight_decay=decays, custom_kernels=OWN_KERNELS)
    return {"ngrams": adam}


def of_tables(update: Array) -> Array:
    """The rate of an update of tables, by how many came before it."""
    return TABLES[0] * rate(jnp.asarray(UPDATES)[update])


def of_pairs(value: Any) -> optax.Schedule:
    """A schedule by the number of past updates of tables: ``value`` of how many pairs of steps an
    update stands for."""
    pairs = EVERY[UPDATES] / 2
    return lambda update: jnp.asarray(value(pairs), jnp.float32)[update]


def averages() -> tuple[Average, ...]:
    """Averages over the last quarter of the run, in the order in which they take the weights'
    place."""
    steps, (long, short) = np.arange(TOTAL), LAST_STEPS
    of_two = np.where(steps == TOTAL - 1, 2 / (long + 1), 1 - (1 - 2 / (long + 1)) ** 2)
    of_four = 4 / (FORGET * short)
    words = rates_of(steps % 2 == 1, of_two, long, first=max(0, TOTAL - long))
    banks = rates_of((TOTAL - 1 - steps) % 4 == 0, of_four, short)
    tables = rates_of(np.isin(steps, UPDATES), of_four, short)
    blended = rates_of((steps % 4 == 1) | (steps >= TOTAL - 2), 8 / (long + 2), long)
    less = BANKS_BLEND - FASTER
    return (
        Average(words, {"head": WORDS_BLEND, "embed": WORDS_BLEND}),
        Average(banks, {"values_outs": 1.0, "mlp": 1.0}),
        Average(tables, {"values": 1.0}),
        Average(blended, {"queries_keys": BANKS_BLEND, "values_outs": less, "mlp": less}),
    )


def windows_of(long: int, short: int) -> tuple[int, ...]:
    """The window of every layer in tokens, itself and so many blocks before it."""
    return tuple(1 + BLOCK * (long if layer in LONG_LAYERS else short) for layer in range(LAYERS))


# a quarter of WIDTH for queries, keys and values of half a head, all of it for both whole
QUARTERS = [3 + (n in LONG_LAYERS) - (n in HALF_LAYERS) for n in range(LAYERS)]
WINDOWS = map(windows_of, LONG_WINDOWS, SHORT_WINDOWS)
ROWS = zip(STEPS, LANE_LENS, MAX_DOC_LENS, MAX_DOCS, WINDOWS, strict=True)
STAGES = tuple(
    Stage(*row, scored=min(COLUMNS[number], VOCAB), every=TABLES_EVERY[number], own=number)
    for number, row in enumerate(ROWS)
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
    attention_widths=tuple(WIDTH // 4 * (n in ATTENDING) * QUARTERS[n] for n in range(LAYERS)),
    eval_windows=windows_of(EVAL_WINDOW, SHORT_WINDOWS[-1]),
    row_optimizers=row_optimizers,
    named_rows={"ngrams": ngram_rows},
    averages=averages(),
    keep_norm=("embed", "head", "mlp", "queries_keys", "values_outs"),
    beside=Retrieval(RETRIEVAL, recent=32) if RETRIEVAL else None,
)
