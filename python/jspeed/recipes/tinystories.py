"""tinystories: a small model of GPT-2's tokens that learns to tell stories for small children.

What        fineweb-cpu, wider, deeper and trained for longer, on TinyStories: 32.0 M parameters, of
            which 25.8 M are embedding and head of GPT-2's vocabulary; 16,384 tokens a step.
            Attention stays within a story. Training scores a sample of the vocabulary, so its
            losses are estimates; evaluation scores all of it.
Source      Eldan and Li 2023 for the data; modded-nanogpt records 3 to 21 for the parts.
Hardware    not run here on all of TinyStories: the target is chosen, not measured. Made for one
            GPU, or a night on a CPU; `--steps 50` for a look. `python scripts/prepare.py
            tinystories` fetches the data.
Parent      fineweb-cpu
"""

import jax
import jax.numpy as jnp
import optax
from jax.nn import initializers

from jspeed.model.attention import Documents, attention, find_documents
from jspeed.model.fp8 import matmul
from jspeed.model.layers import relu_squared, rms_norm, rotary
from jspeed.model.losses import sigmoid_cap, softcap
from jspeed.model.sampled import by_frequency, columns, count, draw, sampled_cross_entropy
from jspeed.optim.muon import muon
from jspeed.recipe import Context, Data, ParamSpec, Recipe, Sample, Stage, groups

# Model
VOCAB = 50_304  # 50,257 rounded up to a multiple of 128
BOS = 50_256
WIDTH = 256
LAYERS = 8
HEADS = 4
MLP_WIDTH = 1024
ATTENTION_SCALE = 0.12
SOFTCAP = 15.0
LOSS_CHUNK = 32  # tokens of each lane whose logits exist at once
EXACT_TOKENS = 5120  # the most frequent so far, which every training step scores
SAMPLED_ONE_IN = 14  # of the other tokens, drawn anew for each step: 17 % of the head's rows in all

# Batch: lanes x lane length tokens a step
LANES = 64
LANE_LEN = 256
STEPS = 4000

# Optimizer
MUON_LR = 0.035
HEAD_LR = 0.008
EMBED_LR = 0.3
ADAM_BETA1 = 0.8
ADAM_BETA2 = 0.95
ADAM_EPS = 1e-10
MOMENTUM_START = 0.8
MOMENTUM_END = 0.9
MOMENTUM_WARMUP = 300  # steps
COOLDOWN = 0.6  # fraction of the steps
FINAL_LR = 0.0  # fraction of the peak

# Evaluation
TARGET_LOSS = 2.0  # nats per token
EVAL_EVERY = 250
EVAL_TOKENS = 524_288
EVAL_LEN = 256

# std 0.5 / sqrt(fan_in), as in record 21
scaled = initializers.variance_scaling(
    0.25, "fan_in", "uniform", in_axis=-2, out_axis=-1, batch_axis=(0,)
)
zeros = initializers.zeros

PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("token", "model"), initializers.normal(1.0), "embed"),
    "query": ParamSpec((LAYERS, WIDTH, WIDTH), ("matrix", "model", "heads"), scaled, "blocks"),
    "key": ParamSpec((LAYERS, WIDTH, WIDTH), ("matrix", "model", "heads"), scaled, "blocks"),
    "value": ParamSpec((LAYERS, WIDTH, WIDTH), ("matrix", "model", "heads"), scaled, "blocks"),
    "out": ParamSpec((LAYERS, WIDTH, WIDTH), ("matrix", "heads", "model"), zeros, "blocks"),
    "up": ParamSpec((LAYERS, WIDTH, MLP_WIDTH), ("matrix", "model", "mlp"), scaled, "blocks"),
    "down": ParamSpec((LAYERS, MLP_WIDTH, WIDTH), ("matrix", "mlp", "model"), zeros, "blocks"),
    "head": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), zeros, "head"),
    # how often each token has been a target
    "counts": ParamSpec((VOCAB,), ("count",), zeros, "counts"),
}


Rows = tuple[jax.Array, Documents]
"""Activations ``[B, T, D]`` and the documents of their rows, which go from layer to layer with
them."""


def block(p: dict[str, jax.Array], x: Rows) -> Rows:
    """One layer, its parameters in ``p``."""
    x_BTD, documents = x
    heads = (*x_BTD.shape[:2], HEADS, WIDTH // HEADS)
    a_BTD = rms_norm(x_BTD)
    q_BTHK = rotary(rms_norm((a_BTD @ p["query"]).reshape(heads)))
    k_BTHK = rotary(rms_norm((a_BTD @ p["key"]).reshape(heads)))
    v_BTHK = (a_BTD @ p["value"]).reshape(heads)
    y_BTHK = attention(q_BTHK, k_BTHK, v_BTHK, scale=ATTENTION_SCALE, documents=documents)
    x_BTD += y_BTHK.reshape(x_BTD.shape) @ p["out"]
    return x_BTD + relu_squared(rms_norm(x_BTD) @ p["up"]) @ p["down"], documents


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads: fp32 ``[B, T, D]``."""
    rows = rms_norm(params["embed"][tokens_BT]), find_documents(tokens_BT, BOS)
    return rms_norm(ctx.blocks(block, PARAMETERS, LAYERS, params, rows)[0])


def head(head_VD: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Return raw logits ``[B, T, V]``."""
    return matmul(x_BTD, head_VD, scales=None)


def forward(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return softcapped logits ``[B, T, V]``."""
    return softcap(head(params["head"], hidden(params, tokens_BT, ctx)), sigmoid_cap(SOFTCAP))


def loss(
    params: dict[str, jax.Array],
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    ctx: Context,
) -> tuple[jax.Array, jax.Array]:
    """Return (weighted sum, loss of every token in nats), estimates from a sample of tokens."""
    x_BTD = hidden(params, tokens_BT, ctx)
    arguments = head, params["head"], x_BTD, targets_BT, weights_BT
    cap = sigmoid_cap(SOFTCAP)
    sample = draw(ctx.step, VOCAB, EXACT_TOKENS, SAMPLED_ONE_IN, by_frequency(params["counts"]))
    total, loss_BT = sampled_cross_entropy(*arguments, sample, cap=cap, chunk=LOSS_CHUNK)
    return count(total, params["counts"], targets_BT, weights_BT), loss_BT


def falling(peak: float) -> optax.Schedule:
    """Constant at ``peak``, then linear to ``FINAL_LR * peak`` over the last ``COOLDOWN`` of the
    steps."""
    steps = round(COOLDOWN * STEPS)
    return optax.linear_schedule(peak, FINAL_LR * peak, steps, transition_begin=STEPS - steps)


def momentum(step: jax.Array) -> jax.Array:
    """Muon's momentum, warmed up linearly."""
    return optax.linear_schedule(MOMENTUM_START, MOMENTUM_END, MOMENTUM_WARMUP)(step)


def adam(peak: float) -> optax.GradientTransformation:
    """Adam with the recipe's constants and schedule."""
    return optax.adam(falling(peak), b1=ADAM_BETA1, b2=ADAM_BETA2, eps=ADAM_EPS)


def optimizer() -> optax.GradientTransformation:
    """Muon on the blocks, Adam on embedding and head; counts add up."""
    by_group = {
        "blocks": muon(falling(MUON_LR), momentum, dtype=jnp.float32),
        "embed": adam(EMBED_LR),
        "head": adam(HEAD_LR),
        "counts": optax.identity(),
    }
    return optax.partition(by_group, groups(PARAMETERS))


STAGES = (
    Stage(steps=STEPS, lane_len=LANE_LEN, scored=columns(VOCAB, EXACT_TOKENS, SAMPLED_ONE_IN)),
)

RECIPE = Recipe(
    name="tinystories",
    parent="fineweb-cpu",
    data=Data("tinystories", vocab_size=50_257, bos_id=BOS, shuffle_block=LANE_LEN),
    target_loss=TARGET_LOSS,
    parameters=PARAMETERS,
    forward=forward,
    loss=loss,
    optimizer=optimizer,
    stages=STAGES,
    lanes=LANES,
    eval_every=EVAL_EVERY,
    eval_tokens=EVAL_TOKENS,
    eval_len=EVAL_LEN,
    attention_width=WIDTH,
    layers=LAYERS,
    alike=True,
    sample=Sample(tokens=200, prompt="Once upon a time"),
)
