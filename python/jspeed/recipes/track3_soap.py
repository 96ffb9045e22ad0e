"""track3-soap: SOAP-Muon takes track3's model to 3.28 in 2,690 steps, where Muon needs 3,250.

What        Against track3: before Muon makes it orthogonal, momentum is whitened in the eigenbases
            of its gradients (SOAP). Weights keep their norm but for what updates do along them, and
            no output's update is small beside its weights. Steps look ahead along the mean of the
            last movements. The last 290 steps' mean weights take 0.6 of the weights' place.
Departures  Evaluations of steps 300 to 1,949 see weights that look ahead already. The signs of all
            layers' gains are independent; from layer 6 on, the original balances them in pairs. The
            embedding and its moments are in fp32, updates too from Newton-Schulz on, in the
            original in bf16; gradients of matrices and head are sent in bf16, there in fp32.
Source      modded-nanogpt's track 3 (optimization benchmark), entry 46 (pull request 328): 3.2783
            at step 2,690 (n = 8), on two A40. Entries 36 (track3): 3,250 steps; 44: 2,750.
Hardware    Any: steps count, not seconds, and a plan leaves out the time of its QR factorisations.
            On CPU at a small size: benchmarks/quality.md.
Parent      track3
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.nn import initializers

from jspeed.model import fp8
from jspeed.model.attention import attention
from jspeed.model.layers import lookup, relu_squared, rms_norm, rotary, zero_every
from jspeed.model.losses import Head, cross_entropy, root_cap, softcap
from jspeed.optim.averages import Average, rates_of
from jspeed.optim.schedules import through
from jspeed.recipe import Context, Data, Init, ParamSpec, Recipe, Stage, groups
from jspeed.speedrun import soap

# Model
VOCAB = 50_304  # 50,257 rounded up to a multiple of 128
BOS = 50_256
WIDTH = 768
LAYERS = 12
HEADS = 6
MLP_WIDTH = 3072
ATTENTION_SCALE = 0.12
SOFTCAP = 15.0
COMPUTE = "bfloat16"  # dtype of activations, of the weights they meet, and of Newton-Schulz
LAST_UP = 0.7  # up's initial size in the last layer over that in the first, between them linear
GAIN_SPREAD = 0.125  # initial gains are 1 - this or 1 + this, of the MLP the other way round

# Batch: lanes x lane length tokens a step
LANES = 512
LANE_LEN = 1024
STEPS = 2690

# Optimizer. What happens when, in fractions of the steps, which are short of the end of schedules.
MUON_LR = 0.0375
EMBED_LR = 0.3
HEAD_LR = 0.003125
VECTOR_LR = 0.01
SCHEDULE = 2900 / 2690  # all rates would be 0 there
MUON_FALL = 2386.4 / 2690  # for so long before that they fall,
ADAM_FALL = 1413 / 2690
FALL_POWER = 1.2  # as the rest of that time to this power
MOMENTUM = 0.95
MOMENTUM_LEAST = 0.85  # at step 0 and at the end of schedules
MOMENTUM_WARMUP = 300 / 2690
MOMENTUM_COOLDOWN = 200 / 2690
SOAP_BETA = 0.9
FLOOR = 0.3825  # of an output's update over its weights, in norm
OUTWARD = 0.5  # of the part of an update that lengthens a matrix
MUON_DECAY = 0.025  # where the update shrinks weights
TRUST_LEAST = 0.2  # cosine of an output projection's momentum before and after whitening
TRUST_FLOOR = 0.45  # whitening counts for at least this until TRUST_FADE, 0 from TRUST_END on,
TRUST_CAP = 0.85  # and for at most this until TRUST_END
TRUST_FADE = 1375 / 2690
TRUST_END = 1625 / 2690
ADAM_BETA1 = 0.8
ADAM_BETA2 = 0.99
BIAS_BETA2 = 0.997
OUT_BIAS_BETA2 = 0.9965
ADAM_EPS = 1e-10
AHEAD = 0.3  # of the mean movement, times the embedding's rate over its peak
AHEAD_DECAY = 0.99
AHEAD_FIRST = 300 / 2690
AHEAD_LAST = 1950 / 2690
AVERAGE_FIRST = 2400 / 2690
AVERAGE_STEPS = 150 / 2690  # horizon of the mean
AVERAGE_SHARE = 0.6

# Evaluation
TARGET_LOSS = 3.28  # nats per token
EVAL_EVERY = 125
EVAL_TOKENS = 10_485_760
EVAL_LEN = 1024

# PyTorch's default: uniform, of variance 1/3 over fan-in
scaled = initializers.variance_scaling(
    1 / 3, "fan_in", "uniform", in_axis=-2, out_axis=-1, batch_axis=(0,)
)
normal, ones, zeros = initializers.normal(1.0), initializers.ones, initializers.zeros
CAP = root_cap(SOFTCAP)


def shrinking(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draw the MLPs' matrices, in later layers smaller."""
    share = np.repeat(np.linspace(1, LAST_UP, LAYERS), 2).astype(dtype)
    return scaled(key, shape, dtype) * share[:, None, None]


def uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draw biases as PyTorch does, below the root of 1 over fan-in."""
    return jax.random.uniform(key, shape, dtype, -(WIDTH**-0.5), WIDTH**-0.5)


def around_one(spread: float) -> Init:
    """Draw gains of 1 + ``spread`` or 1 - ``spread``."""

    def draw(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        return 1 + spread * jax.random.rademacher(key, shape, dtype)

    return draw


def bank(init: Init, group: str, size: int, **axes: int) -> ParamSpec:
    """Matrices of one shape for Muon: so many, and their axes with the sizes of these."""
    return ParamSpec((size, *axes.values()), ("matrix", *axes), init, group, COMPUTE)


def vector(*shape: int, group: str, init: Init, like: str | None = None) -> ParamSpec:
    """Gains or biases of all layers; signs are drawn as those of ``like`` are."""
    axes = ("layer", "hidden")[-len(shape) :]
    return ParamSpec(shape, axes, init, group, COMPUTE, init_like=like)


# The bank "attention" holds query, key, value and output of layer 0, then of layer 1, ...; the bank
# "mlp" up and down. Output and down are stored transposed, so that the columns of all belong to
# heads, or to hidden units.
PARAMETERS = {
    "embed": ParamSpec((VOCAB, WIDTH), ("token", "model"), normal, "embed", COMPUTE),
    "embed_gain": vector(WIDTH, group="gains", init=ones),
    "attention_gain": vector(LAYERS, WIDTH, group="gains", init=around_one(-GAIN_SPREAD)),
    "attention": bank(zero_every(4, scaled), "attention", 4 * LAYERS, model=WIDTH, heads=WIDTH),
    "attention_bias": vector(4 * LAYERS, WIDTH, group="a biases", init=zero_every(4, uniform)),
    "mlp_gain": vector(
        LAYERS, WIDTH, group="gains", init=around_one(GAIN_SPREAD), like="attention_gain"
    ),
    "mlp": bank(zero_every(2, shrinking), "mlp", 2 * LAYERS, model=WIDTH, mlp=MLP_WIDTH),
    "up_bias": vector(LAYERS, MLP_WIDTH, group="biases", init=uniform),
    "down_bias": vector(LAYERS, WIDTH, group="biases", init=zeros),
    "final_gain": vector(WIDTH, group="gains", init=ones),
    "head": ParamSpec((VOCAB, WIDTH), ("vocab", "model"), zeros, "head", COMPUTE),
    "head_bias": vector(VOCAB, group="biases", init=zeros),
}


def norm(x_BTD: jax.Array, gain_D: jax.Array) -> jax.Array:
    """RMS norm with a gain."""
    return rms_norm(x_BTD) * gain_D[None, None]


def block(p: dict[str, jax.Array], x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """One layer, its parameters in ``p``."""
    heads = (*x_BTD.shape[:2], HEADS, WIDTH // HEADS)
    query, key, value, out = p["attention"]
    bias = p["attention_bias"][:, None, None]
    a_BTD = norm(x_BTD, p["attention_gain"])
    q_BTHK = rotary(rms_norm((a_BTD @ query + bias[0]).reshape(heads)))
    k_BTHK = rotary(rms_norm((a_BTD @ key + bias[1]).reshape(heads)))
    v_BTHK = (a_BTD @ value + bias[2]).reshape(heads)
    y_BTHK = attention(q_BTHK, k_BTHK, v_BTHK, scale=ATTENTION_SCALE, backend=ctx.attention)
    x_BTD += y_BTHK.reshape(x_BTD.shape) @ out.T + bias[3]
    up, down = p["mlp"]
    h_BTF = relu_squared(norm(x_BTD, p["mlp_gain"]) @ up + p["up_bias"][None, None])
    return x_BTD + h_BTF @ down.T + p["down_bias"][None, None]


def hidden(params: dict[str, jax.Array], tokens_BT: jax.Array, ctx: Context) -> jax.Array:
    """Return what the head reads: ``[B, T, D]``."""
    x_BTD = norm(lookup(params["embed"], tokens_BT), params["embed_gain"])
    x_BTD = ctx.blocks(lambda p, x_BTD: block(p, x_BTD, ctx), PARAMETERS, LAYERS, params, x_BTD)
    return norm(x_BTD, params["final_gain"])


def head(params: dict[str, jax.Array], x_BTD: jax.Array) -> jax.Array:
    """Return logits ``[B, T, V]`` before the softcap."""
    return fp8.matmul(x_BTD, params["head"], None) + params["head_bias"][None, None]


def logits(params: dict[str, jax.Array], x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """Return softcapped fp32 logits ``[B, T, V]``."""
    return softcap(head(params, x_BTD), CAP)


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
    head_params = {name: params[name] for name in ("head", "head_bias")}
    return cross_entropy(
        Head(head, ctx.head_chunk), head_params, x_BTD, targets_BT, weights_BT, cap=CAP
    )


def at(fraction: float) -> int:
    """Return the step after this fraction of the steps."""
    return round(fraction * STEPS)


def falling(peak: float, fall: float = ADAM_FALL) -> optax.Schedule:
    """``peak``, then down to 0 at the end of schedules: the rest of ``fall`` to a power."""

    def schedule(step: jax.Array) -> jax.Array:
        rest = jnp.maximum(at(SCHEDULE) - step, 0) / (fall * STEPS)
        return peak * jnp.minimum(rest, 1) ** FALL_POWER

    return schedule


momentum = through(
    {
        0: MOMENTUM_LEAST,
        at(MOMENTUM_WARMUP): MOMENTUM,
        at(SCHEDULE) - at(MOMENTUM_COOLDOWN): MOMENTUM,
        at(SCHEDULE): MOMENTUM_LEAST,
    }
)


def pattern(n: int, *values: float) -> np.ndarray:
    """Return ``values`` again and again for the ``n`` matrices of a bank."""
    return np.resize(np.array(values), n)[:, None, None]


def trust(raw: jax.Array, white: jax.Array, gradient: jax.Array, step: jax.Array) -> jax.Array:
    """Of query, key and value whitening counts in full, of the output projection by agreement."""
    least = through({at(TRUST_FADE): TRUST_FLOOR, at(TRUST_END): 0.0})(step)
    most = jnp.where(step < at(TRUST_END), TRUST_CAP, 1)
    believed = jnp.clip(soap.agreement(raw, white, gradient, TRUST_LEAST), least, most)
    return jnp.where(pattern(4 * LAYERS, False, False, False, True), believed, 1)


def ahead(step: jax.Array) -> jax.Array:
    """How far step ``step`` looks ahead."""
    looks = (step >= at(AHEAD_FIRST)) & (step < at(AHEAD_LAST))
    return jnp.where(looks, falling(AHEAD)(step - 1), 0)


def adam(peak: float) -> optax.GradientTransformation:
    """Adam of the tables."""
    return optax.adam(falling(peak), b1=ADAM_BETA1, b2=ADAM_BETA2, eps=ADAM_EPS)


def small_adam(beta2: float | np.ndarray) -> optax.GradientTransformation:
    """Adam of gains and biases."""
    return soap.uncorrected_adam(falling(VECTOR_LR), ADAM_BETA1, beta2, eps=ADAM_EPS)


def optimizer() -> optax.GradientTransformation:
    """SOAP-Muon on the blocks' matrices, Adam on the rest, and all look ahead."""
    soap_muon = partial(
        soap.soap_muon,
        falling(MUON_LR, MUON_FALL),
        momentum,
        beta=SOAP_BETA,
        floor=soap.Floor(FLOOR, OUTWARD, MUON_DECAY),
        dtype=COMPUTE,
    )
    out_biases = pattern(4 * LAYERS, *[BIAS_BETA2] * 3, OUT_BIAS_BETA2)[:, 0]
    by_group = {
        "attention": soap_muon(
            scale=1.0, outputs_last=pattern(4 * LAYERS, True, True, True, False), trust=trust
        ),
        "mlp": soap_muon(
            scale=pattern(2 * LAYERS, (MLP_WIDTH / WIDTH) ** 0.5, 1.0).astype(np.float32),
            outputs_last=pattern(2 * LAYERS, True, False),
        ),
        "embed": adam(EMBED_LR),
        "head": adam(HEAD_LR),
        "gains": small_adam(ADAM_BETA2),
        "biases": small_adam(BIAS_BETA2),
        "a biases": small_adam(out_biases.astype(np.float32)),
    }
    return optax.chain(
        # ADAM_EPS is meant for gradients of the summed loss.
        optax.scale(LANES * LANE_LEN),
        optax.partition(by_group, groups(PARAMETERS)),
        soap.look_ahead(ahead, decay=AHEAD_DECAY),
    )


AVERAGES = (
    Average(
        rates_of(
            np.full(STEPS, True),
            1 / (AVERAGE_STEPS * STEPS),
            STEPS - at(AVERAGE_FIRST),
            first=at(AVERAGE_FIRST) - 1,
        ),
        {name: AVERAGE_SHARE for name in PARAMETERS if name != "embed"},
    ),
)

STAGES = (Stage(steps=STEPS, lane_len=LANE_LEN),)

RECIPE = Recipe(
    name="track3-soap",
    parent="track3",
    track="fineweb/steps",
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
    averages=AVERAGES,
    alike=True,
)
