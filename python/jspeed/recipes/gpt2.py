"""gpt2: OpenAI's GPT-2 in its four sizes and a small one, to load (`--init-from FOLDER`) and to go
on training on text of your own.

What        llmc with the vocabulary as it is (50,257, not padded), one field for the size, and
            nanoGPT's fine-tuning: AdamW at a small constant rate, clipped, 20 steps. Without
            --init-from it starts as GPT-2 did.
Source      Radford et al. 2019 for the model; nanoGPT's finetune_shakespeare for the optimizer.
Hardware    any: on a CPU take the small size and fewer, shorter lanes (--set SIZE=30M LANES=4
            LANE_LEN=64 COMPUTE=float32). OpenAI's weights were not at hand: loading is tested on
            random ones, and the target is chosen, not measured.
Parent      llmc
"""

import jax
import jax.numpy as jnp
import optax
from jax.nn import initializers

from jspeed.errors import BadInput
from jspeed.model import fp8
from jspeed.model.attention import attention
from jspeed.model.layers import layer_norm, lookup, positions
from jspeed.model.losses import Head, cross_entropy, softcap
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Sample, Stage, map_specs

# Model
SIZE = "124M"  # or 350M, 774M, 1.5B; 30M, for a CPU, is not OpenAI's
VOCAB = 50_257
BOS = 50_256
COMPUTE = "bfloat16"  # dtype of activations and of the weights they meet
INIT_STD = 0.02

# Batch: lanes x lane length tokens a step
LANES = 32
LANE_LEN = 1024
STEPS = 20

# Optimizer
LEARNING_RATE = 3e-5
BETA1 = 0.9
BETA2 = 0.95
EPS = 1e-8
WEIGHT_DECAY = 0.1  # on matrices and tables
CLIP = 1.0  # norm of the whole gradient; 0 does not clip

# Evaluation
TARGET_LOSS = 3.2  # nats per token, of Shakespeare
EVAL_EVERY = 5
EVAL_TOKENS = 32_768
EVAL_LEN = LANE_LEN

SIZES = {
    "30M": (6, 6, 384),
    "124M": (12, 12, 768),
    "350M": (24, 16, 1024),
    "774M": (36, 20, 1280),
    "1.5B": (48, 25, 1600),
}
if SIZE not in SIZES:
    raise BadInput(f"field SIZE is {SIZE!r}; expected one of {', '.join(SIZES)}")
LAYERS, HEADS, WIDTH = SIZES[SIZE]
MLP_WIDTH = 4 * WIDTH

normal = initializers.normal(INIT_STD)
residual = initializers.normal(INIT_STD / (2 * LAYERS) ** 0.5)
ones, zeros = initializers.ones, initializers.zeros


def matrix(init: initializers.Initializer, **axes: int) -> ParamSpec:
    """One matrix per layer, its axes with their sizes."""
    return ParamSpec((LAYERS, *axes.values()), ("layer", *axes), init, "decay", COMPUTE)


def vector(width: int, init: initializers.Initializer) -> ParamSpec:
    """One vector per layer."""
    return ParamSpec((LAYERS, width), ("layer", "hidden"), init, "vectors", COMPUTE)


# "qkv" is Hugging Face's [in, 3 x width], its three parts apart, so that the heads of each can be
# spread over devices.
PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), normal, "decay", COMPUTE),
    "positions": ParamSpec((LANE_LEN, WIDTH), ("position", "model"), normal, "decay", COMPUTE),
    "attention_gain": vector(WIDTH, ones),
    "attention_bias": vector(WIDTH, zeros),
    "qkv": matrix(normal, model=WIDTH, qkv=3, heads=WIDTH),
    "qkv_bias": vector(3 * WIDTH, zeros),
    "out": matrix(residual, heads=WIDTH, model=WIDTH),
    "out_bias": vector(WIDTH, zeros),
    "mlp_gain": vector(WIDTH, ones),
    "mlp_bias": vector(WIDTH, zeros),
    "up": matrix(normal, model=WIDTH, mlp=MLP_WIDTH),
    "up_bias": vector(MLP_WIDTH, zeros),
    "down": matrix(residual, mlp=MLP_WIDTH, model=WIDTH),
    "down_bias": vector(WIDTH, zeros),
    "final_gain": ParamSpec((WIDTH,), ("model",), ones, "vectors", COMPUTE),
    "final_bias": ParamSpec((WIDTH,), ("model",), zeros, "vectors", COMPUTE),
}


def block(p: dict[str, jax.Array], x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """One layer, its parameters in ``p``."""
    heads = (*x_BTD.shape[:2], HEADS, WIDTH // HEADS)
    a_BTD = layer_norm(x_BTD, p["attention_gain"], p["attention_bias"])
    qkv_BTND = jnp.einsum("btd,dne->btne", a_BTD, p["qkv"]) + p["qkv_bias"].reshape(1, 1, 3, WIDTH)
    q_BTHK, k_BTHK, v_BTHK = (qkv_BTND[:, :, n].reshape(heads) for n in range(3))
    y_BTHK = attention(
        q_BTHK, k_BTHK, v_BTHK, scale=(WIDTH // HEADS) ** -0.5, backend=ctx.attention
    )
    x_BTD += y_BTHK.reshape(x_BTD.shape) @ p["out"] + p["out_bias"][None, None]
    a_BTD = layer_norm(x_BTD, p["mlp_gain"], p["mlp_bias"])
    h_BTF = jax.nn.gelu(a_BTD @ p["up"] + p["up_bias"][None, None], approximate=True)
    return x_BTD + h_BTF @ p["down"] + p["down_bias"][None, None]


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads: ``[B, T, D]``."""
    x_BTD = lookup(params["embed"], tokens_BT) + positions(params["positions"], tokens_BT.shape[1])
    x_BTD = ctx.blocks(lambda p, x_BTD: block(p, x_BTD, ctx), PARAMETERS, LAYERS, params, x_BTD)
    return layer_norm(x_BTD, params["final_gain"], params["final_bias"])


def head(embed_VD: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Return logits ``[B, T, V]``: the embedding read backwards."""
    return fp8.matmul(x_BTD, embed_VD, None)


def logits(params: dict[str, jax.Array], x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """Return fp32 logits ``[B, T, V]``."""
    return softcap(head(params["embed"], x_BTD), None)


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
    x_BTD = hidden(params, tokens_BT, ctx)
    return cross_entropy(
        Head(head, ctx.head_chunk), params["embed"], x_BTD, targets_BT, weights_BT, cap=None
    )


def optimizer() -> optax.GradientTransformation:
    """AdamW after clipping the whole gradient; decay on matrices and tables only."""
    decayed = map_specs(lambda spec: spec.group == "decay", PARAMETERS)
    adamw = optax.adamw(
        LEARNING_RATE, b1=BETA1, b2=BETA2, eps=EPS, weight_decay=WEIGHT_DECAY, mask=decayed
    )
    return optax.chain(optax.clip_by_global_norm(CLIP) if CLIP else optax.identity(), adamw)


STAGES = (Stage(steps=STEPS, lane_len=LANE_LEN),)

RECIPE = Recipe(
    name="gpt2",
    parent="llmc",
    data=Data("shakespeare", vocab_size=VOCAB, bos_id=BOS),
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
    alike=True,
    heads=HEADS,
    sample=Sample(prompt="\n"),
)
