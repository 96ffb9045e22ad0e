"""Parameter name map between our recipes and records 62 and 89."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jspeed.recipe import Recipe, leaves
from jspeed.speedrun.ngrams import SIGN_ROWS, signs

from ..recipes.r62_r89_golden import HEADS
from .ours import Names, Tree


def channels(width: int, head: int) -> np.ndarray:
    """The record's channel for each of ours: neighbours turn together there, channels ``head`` / 4
    apart here."""
    half = head // 2
    one = np.concatenate([np.arange(0, half, 2), np.arange(1, half, 2), np.arange(half, head)])
    return np.concatenate([one + start for start in range(0, width, head)])


def names(name: str, shapes: dict[str, tuple[int, ...]], recipe: Recipe) -> Names:
    """Say where each of our elements lies in the record's parameters of these ``shapes``."""
    return Names(shapes, lambda of: (_of_62 if name == "r62" else _of_89)(of, recipe))


def to(rows: int, bank: np.ndarray) -> np.ndarray:
    """Add matrices that the record has not, up to so many."""
    return np.concatenate([bank, np.full((rows - len(bank), *bank.shape[1:]), -1)])


def _of_62(of: Callable[[str], np.ndarray], recipe: Recipe) -> Tree:
    width, rows = (
        recipe.attention_width,
        {name: sum(spec.shape[:1]) for name, spec in leaves(recipe.parameters)},
    )
    order, scalars = channels(width, width // HEADS), of("scalars")
    attention = of("attn_bank").reshape(10, 4, width, width)
    attention = np.stack(
        [attention[:, n, order] if n < 2 else attention[:, n] for n in range(4)], axis=1
    )
    attention, mlp = (
        attention.reshape(40, width, width),
        of("mlp_bank")[:11].reshape(22, 4 * width, width),
    )
    return {
        "embed": of("embed.weight"),
        "head": of("lm_head.weight").T,
        "values": np.stack([of(f"value_embeds.{n}.weight") for n in range(3)]),
        "bigrams": of("bigram_embed.weight"),
        "attention": to(rows["attention"], attention.mT),
        "mlp": to(rows["mlp"], mlp.mT),
        "attention_gates": of("attn_gate_bank").mT,
        "value_gates": of("ve_gate_bank").mT,
        "smear_gate": of("smear_gate.weight"),
        "skip_gate": of("skip_gate.weight"),
        "layer_scales": scalars[:11],
        "start_scales": of("x0_lambdas"),
        "attention_scales": scalars[11:33].reshape(11, 2),
        "bigram_scales": scalars[33:44],
        "smear_scale": scalars[44],
        "backout_scale": scalars[45],
        "skip_scale": scalars[46],
    }


def _of_89(of: Callable[[str], np.ndarray], recipe: Recipe) -> Tree:
    width, rows = (
        recipe.attention_width,
        {name: sum(spec.shape[:1]) for name, spec in leaves(recipe.parameters)},
    )
    order, scalars = channels(2 * width // HEADS, width // HEADS), of("scalars")
    table = of("value_embeds")
    return {
        "embed": of("embed.weight"),
        "head": of("lm_head.weight").T,
        "values": table.reshape(5, -1, width),
        "bigrams": of("bigram_embed.weight"),
        "queries_keys": to(rows["queries_keys"], of("qk_bank")[:60, order].mT),
        "values_outs": to(rows["values_outs"], of("vo_bank")[:20].mT),
        "mlp": to(rows["mlp"], of("mlp_bank")[:11].reshape(22, 4 * width, width).mT),
        "value_gates": of("ve_gate_bank").mT,
        "smear_gate": of("smear_gate.weight"),
        "attention_scales": scalars[:22].reshape(11, 2),
        "smear_scale": scalars[22],
        "skip_scale": scalars[23],
        "layer_scales": of("resid_lambdas"),
        "post_scales": of("post_lambdas"),
        "mudd_up": of("mudd_w1").mT,
        "mudd_down": of("mudd_w2").mT,
        "mudd_bias": of("mudd_b2"),
        "gates_up": of("mudd_gate_w1").mT,
        "gates_down": in_kinds(of("mudd_gate_w2")).mT,
        "gates_bias": in_kinds(of("mudd_gate_b2")),
        "gates_scale": of("_mudd_gate_scale"),
        "largest": np.full(11, -1),
    }


def in_kinds(table: np.ndarray) -> np.ndarray:
    """The gates of both sets kind by kind, as ours lie: the record's go layer by layer where both
    enter a layer."""
    early = [*range(18), *range(18, 26, 2), *range(19, 26, 2), *range(26, 41)]
    late = [*range(18), 28, *range(18, 28, 2), *range(19, 28, 2), *range(29, 41)]
    return np.stack([table[0, early], table[1, late]])


def sign_table(width: int) -> np.ndarray:
    """Our signs of bigrams as the record's table: row r is for two tokens whose xor is r modulo its
    length."""
    pairs = np.stack([np.zeros(SIGN_ROWS, np.int32), np.arange(SIGN_ROWS, dtype=np.int32)], axis=1)
    return np.asarray(signs(jnp.asarray(pairs), width)[:, 1], np.float32)
