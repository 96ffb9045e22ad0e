"""Every recipe at toy size: its real code, shrunk through its own fields, in fp32 so that rounding hides nothing."""

TINY = ["WIDTH=32", "LAYERS=2", "HEADS=2", "MLP_WIDTH=64", "LANES=8", "LANE_LEN=16", "STEPS=12"]
TINY += ["EVAL_LEN=16", "EVAL_TOKENS=160"]
GPT2 = ["VOCAB=272", "BOS=5"]
LARGE = [*TINY, *GPT2, "COMPUTE=float32", "EVAL_CHUNK=12"]
DEEP = [*LARGE, "LAYERS=4", "LANE_LEN=32", "EVAL_LEN=32", "EVAL_TOKENS=320", "MAX_DOCS=33", "MOMENTUM_WARMUP=6"]
DEEP += ["NO_ATTENTION=2", "VALUE_TABLES=1", "LONG_LAYERS=(0,3)", "BLOCK=4"]
# While blocks are the identity, the true gradient of their scales is zero: with the recipes' epsilon Adam would make
# full steps of what rounding leaves.
DEEP += ["ADAM_EPS=1e-5"]

TOYS = {
    "stdlib": TINY,
    "stdlib-adamw": TINY,
    "fineweb-cpu": [*TINY, *GPT2, "LOSS_CHUNK=8"],
    "llmc": [*LARGE, "WARMUP=4"],
    "track3": LARGE,
    "gpt2": ["SIZES={'124M': (2, 2, 32)}", "LANES=8", "LANE_LEN=16", "STEPS=12", "EVAL_TOKENS=160", *LARGE[-4:]],
    "microgpt-names": [*TINY, "VOCAB=272"],
    "shakespeare-char": [*TINY, "VOCAB=272"],
    "tinystories": [*TINY, *GPT2, "LOSS_CHUNK=8"],
    "r21": [*DEEP, "WINDOW=4"],
    "r29": [*DEEP, "ADAM_EPS=3e-4", "WINDOWS=(2,)", "MAX_DOC_LEN=16", "GATE_WIDTH=6"],
}

# Recipes that compute what another one does, at another size: tests of the step and of generation leave them out.
ALIKE = {"gpt2": "llmc", "shakespeare-char": "stdlib", "stdlib-adamw": "stdlib", "tinystories": "fineweb-cpu"}
