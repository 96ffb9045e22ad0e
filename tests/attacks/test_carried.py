"""Recipes that bring along what somebody learned: tables, scalars one by one, the host's help."""

from pathlib import Path

import pytest

from jspeed.board.records.track import read_track
from jspeed.board.records.trust import unfair

from .attack import attack, failed
from .test_score import FORWARD, HONEST

TRACK = "stdlib/cpu"
RULES = read_track(Path(__file__).parents[2] / "records" / TRACK / "track.toml", TRACK)
LEARNED = "LEARNED = np.random.default_rng(0).normal(size=(VOCAB, WIDTH)).astype(np.float32)"
IMPORTS = {"import jax\nimport": "import jax\nimport numpy as np\nimport"}
EMBED = '"embed": ParamSpec((VOCAB, WIDTH), ("token", "model"), normal, "all"),'


def why_not(run):
    """Return why ``run`` does not count, apart from text that its toy shards have no room for."""
    return [why for why in unfair(run, RULES) if "text" not in why]


def test_the_honest_parent_counts(honest):
    assert why_not(honest) == [] and honest["carried"]["arrays"] == []


def test_tables_callbacks_and_weights_do_not_count(data, tmp_path):
    init = "lambda key, shape, dtype: jnp.asarray(LEARNED, dtype)"
    forward = f"{HONEST}return logits_BTV + jnp.asarray(LEARNED)[:, 0][tokens_BT][..., None]"
    call = "jax.pure_callback(lambda: np.float32(0.5), jax.ShapeDtypeStruct((), jnp.float32))"
    weigh = "    weigh=lambda tokens_BT, targets_BT: 1.0 - 0.999 * (targets_BT > 100),\n"
    adam = "return optax.chain(optax.adam(0.01), optax.stateless(lambda g, p: jax.tree.map("
    edits = IMPORTS | {
        "normal = init": f"{LEARNED}\nnormal = init",
        EMBED: EMBED.replace("normal", init),
        FORWARD: forward,
        "    loss=loss,\n": f"    loss=loss,\n{weigh}",
        "return optax.adam(0.01)": f"{adam}lambda x: x * {call} + 1e-9 * LEARNED, g)))",
    }
    run = attack(tmp_path, data, edits)
    numbers, said = run["carried"]["numbers"], why_not(run)
    assert numbers["initial state"] >= 257 * 16 and numbers["evaluation"] >= 257
    assert "pure_callback" in run["carried"]["calls"]
    for what in (
        "initial state holds",
        "step holds",
        "evaluation holds",
        "call the host",
        "weights",
    ):
        assert any(what in why for why in said), what


@pytest.mark.slow
def test_scalars_one_by_one_do_not_count(data, tmp_path):
    scalars = "sum(float(c) * (tokens_BT == i) for i, c in enumerate(LEARNED[:, 0]))[..., None]"
    edits = IMPORTS | {
        "normal = init": f"{LEARNED}\nnormal = init",
        FORWARD: f"{HONEST}return logits_BTV + {scalars}",
    }
    run = attack(tmp_path, data, edits)
    assert run["carried"]["numbers"]["evaluation"] >= 257
    assert any("evaluation holds" in why for why in why_not(run))


CODED = """LEVELS = np.linspace(-3, 3, 16)
CODES = np.random.default_rng(0).integers(0, 16, size=VOCAB * WIDTH)
normal = init"""
OF_FEW_LEVELS = {
    "arrays joined in its order": "jnp.concatenate([jnp.full(1, LEVELS[c]) for c in CODES])",
    "slices of a range": "jnp.concatenate([jnp.arange(16.0)[c : c + 1] for c in CODES[:1028]] * 4)",
    "scalars that repeat": "jnp.stack([jnp.float32(LEVELS[c]) for c in CODES[:1028]] * 4)",
}


@pytest.mark.parametrize(
    "how",
    [
        w if w.startswith("slices") else pytest.param(w, marks=pytest.mark.slow)
        for w in OF_FEW_LEVELS
    ],
)
def test_a_table_of_few_levels_does_not_count(how, data, tmp_path):
    init = f"lambda key, shape, dtype: 0.1 * {OF_FEW_LEVELS[how]}.reshape(shape).astype(dtype)"
    edits = {"normal = init": CODED, EMBED: EMBED.replace("normal", init)}
    run = attack(tmp_path, data, IMPORTS | edits)
    assert failed(run) == set() and run["carried"]["numbers"]["initial state"] <= 256
    (why,) = why_not(run)
    assert "initial state holds numbers in" in why
