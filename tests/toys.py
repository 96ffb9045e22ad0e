"""Every recipe at toy size: its real code, shrunk through its own fields, in fp32 so that rounding
hides nothing."""

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.recipe import init_parameters, leaves
from jspeed.record.sizes import is_matrix

TINY = ["WIDTH=32", "LAYERS=2", "HEADS=2", "MLP_WIDTH=64", "LANES=8", "LANE_LEN=16", "STEPS=12"]
TINY += ["EVAL_LEN=16", "EVAL_TOKENS=160"]
GPT2 = ["VOCAB=272", "BOS=5"]
LARGE = [*TINY, *GPT2, "COMPUTE=float32"]
DEEP = [
    *LARGE,
    *("LAYERS=4 LANE_LEN=32 EVAL_LEN=32 EVAL_TOKENS=320 MAX_DOCS=33 MOMENTUM_WARMUP=6").split(),
]
DEEP += ["NO_ATTENTION=2", "VALUE_TABLES=1", "LONG_LAYERS=(0,3)", "BLOCK=4"]
# While blocks are the identity, the true gradient of their scales is zero: with the recipes'
# epsilon Adam would make full steps of what rounding leaves.
DEEP += ["ADAM_EPS=1e-5"]
# Two stages, the first of an odd number of steps: a slow update has gradients of both, and tied
# tables part in it.
STAGED = [
    *TINY[:1],
    *TINY[2:5],
    *GPT2,
    *"""
    COMPUTE=float32 EVAL_LEN=24 EVAL_TOKENS=240 LAYERS=3
    NO_ATTENTION=2 SKIP_FROM=0 PAIRED_LAYERS=(0,) LONG_LAYERS=(1,) GATE_WIDTH=6 BIGRAMS=512
    STEPS=(5,7) LANE_LENS=(16,24) MAX_DOC_LENS=(16,16) MAX_DOCS=(17,25) BLOCK=4
    LONG_WINDOWS=(2,3) SHORT_WINDOWS=(1,2) EVAL_WINDOW=4 RATES=(1.0,1.5) TARGETS=(3,2)
    LAST_TIED=5 SHARES=({0:1.0},{5:0.5,12:0.0},{0:0.25,5:0.0}) MOMENTUM={0:0.85,6:0.95}
    COOLDOWN={4:0.0,9:1.0} ADAM_EPS=3e-4
    """.split(),
]
MUDD = ["LAYERS=4", "LONG_LAYERS=(1,3)", "XSA_LAYERS=(1,)", "SHARED_FROM=0", "GATES_FROM=1"]

TOYS = {
    "stdlib": TINY,
    "fineweb-cpu": [*TINY, *GPT2, "LOSS_CHUNK=8", "EXACT_TOKENS=64", "SAMPLED_ONE_IN=5"],
    "llmc": [*LARGE, "WARMUP=4"],
    "track3": LARGE,
    "track3-soap": LARGE,
    "gpt2": [
        "SIZES={'124M': (2, 2, 32)}",
        "LANES=8",
        "LANE_LEN=16",
        "STEPS=12",
        "EVAL_TOKENS=160",
        *LARGE[-3:],
    ],
    "nanogpt": [*TINY[:3], *TINY[4:], "VOCAB=272", "COMPUTE=float32", "WARMUP=4", "COOLDOWN=12"],
    "microgpt-names": [*TINY, "VOCAB=272"],
    "shakespeare-char": [*TINY, "VOCAB=272", "ROWS=512"],
    "tinystories": [*TINY, *GPT2, "LOSS_CHUNK=8", "EXACT_TOKENS=64", "SAMPLED_ONE_IN=5"],
    "r21": [*DEEP, "WINDOW=4"],
    "r62": [*STAGED, "BACKOUT=1", "VALUE_TABLES=1", "VALUE_OF={0:0,1:0}"],
    # The prefix target needs GPT-2's vocabulary; tests/model has it.
    "r89": [
        *STAGED,
        *MUDD,
        "VALUE_TABLES=3",
        "VALUE_OF={0:0,1:1,3:2}",
        "MUDD_WIDTH=8",
        "DC_WINDOW=3",
        "PREFIX_SHARE={}",
    ],
    "r29": [*DEEP, "ADAM_EPS=3e-4", "WINDOWS=(2,)", "MAX_DOC_LEN=16", "GATE_WIDTH=6"],
}

# The number of steps between two updates of tables changes at the border.
TOYS["r92"] = [
    *STAGED[:9],
    *"""
    LAYERS=6 ATTENDING=(0,4,1,5) PAIRED_LAYERS=(0,) HALF_LAYERS=(4,)
    LONG_LAYERS=(1,5) XSA_LAYERS=(1,4) NO_MLP=(3,) TWICE=4 SKIP_FROM=1 SKIP_INTO=2
    SHARED_FROM=3 GATES_FROM=2 START_LAYERS=(0,1,3) NGRAM_LAYERS=(0,1,4) GATE_WIDTH=6
    VALUE_OF={0:0,1:1,4:2,5:3} MUDD_WIDTH=8 MIX_GROUPS=4 NGRAMS=512 PREFIX_SHARE={}
    STEPS=(4,8) TABLES_EVERY=(2,4) LANE_LENS=(16,24) MAX_DOC_LENS=(16,16) SEGMENT=8
    MAX_DOCS=(17,25) BLOCK=4 LONG_WINDOWS=(2,3) SHORT_WINDOWS=(1,2) EVAL_WINDOW=4
    RATES=(1.0,1.5) COLUMNS=(96,272) TARGETS=(3,2) LAST_TIED=7 LAST_STEPS=(6,4)
    SHARES=({0:1.0},{4:0.5,12:0.0},{0:0.25,4:0.0}) MOMENTUM={0:0.85,6:0.93}
    RAILS=(6,0.85,0.98,0.4385) COOLDOWN={4:0.0,10:1.0} ADAM_EPS=3e-4
    """.split(),
]

TOYS["jspeed3"] = [
    *TOYS["r92"],
    "COPY=271",
    "POINTER_WIDTH=4",
    "POINTER_WINDOWS=(16,12)",
    "EVAL_POINTER_WINDOW=16",
]
TOYS["jspeed3"] += ["GRADIENT_WINDOWS=(0,1)"]

# Recipes that compute what another one does, at another size: tests of the step and of generation
# leave them out.
ALIKE = {"gpt2": "llmc", "tinystories": "fineweb-cpu"}
# And those whose code is a later one's too: r62's is r89's, r21's that of r29, r92's of jspeed3.
SAME = ("r21", "r62", "r92", *ALIKE)


def first_parameters(recipe):
    """Operation by operation: recipes of equal shapes share these programs."""
    return init_parameters(recipe.parameters, jax.random.key(0))


def moved_parameters(recipe, by=0.05):
    """First parameters and normal draws of size ``by``, so that nothing is 0; by NumPy, which
    compiles nothing."""

    def moved(p):
        noise = np.random.default_rng(p.size).normal(0, by, p.shape)
        return jnp.asarray(np.asarray(p) + noise.astype(p.dtype))

    return jax.tree.map(moved, first_parameters(recipe))


def matmul_parameters(parameters):
    """Number of parameters in matmul weights."""
    return sum(spec.size for _, spec in leaves(parameters) if is_matrix(spec))
