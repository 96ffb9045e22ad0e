"""The FineWeb recipes against their sources: sizes, schedules, windows, FP8 scales."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed import recipe as r
from jspeed.board.records import track
from jspeed.recipes import llmc, r21, r29, track3
from jspeed.record import sizes
from jspeed.run.find_recipe import find

from ..toys import TOYS, first_parameters

RECORDS = Path(__file__).parents[2] / "records"
TABLE = 50_304 * 768
BLOCKS = 12 * 2 * 768 * 3072


def test_parameter_counts():
    # 124,475,904 is what llm.c prints for its GPT-2 with a padded vocabulary.
    assert sizes.parameter_count(llmc.PARAMETERS) == 124_475_904
    vectors = 768 * (12 + 12 + 2) + 12 * 4 * 768 + 12 * (3072 + 768) + 50_304
    assert sizes.parameter_count(track3.PARAMETERS) == 2 * TABLE + 48 * 768**2 + BLOCKS + vectors
    shared = 5 * TABLE + 44 * 768**2 + BLOCKS + 12 * 4 + 6
    assert sizes.parameter_count(r21.PARAMETERS) == shared
    assert sizes.parameter_count(r29.PARAMETERS) == shared + 12 * 12 * 6
    assert r21.PARAMETERS["attention"].shape[0] == 48


@pytest.mark.parametrize(
    ("recipe", "steps", "tokens_per_step"),
    [(llmc, 19_560, 524_288), (track3, 3250, 524_288), (r21, 1770, 393_216), (r29, 1670, 393_216)],
)
def test_steps_and_tokens(recipe, steps, tokens_per_step):
    found = recipe.RECIPE
    assert found.steps == steps == recipe.STEPS
    assert {found.tokens_per_step(stage) for stage in found.stages} == {tokens_per_step}
    assert found.eval_tokens == 10_485_760 and found.target_loss == 3.28


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        (
            llmc.schedule(),
            {0: 6e-4 / 700, 349: 3e-4, 699: 6e-4, 700: 6e-4, 10_130: 3e-4, 19_559: 0},
        ),
        (track3.falling(0.025), {0: 0.025, 975: 0.025, 2112: 0.025 * 1138 / 2275, 3250: 0}),
        (r21.falling(0.05), {0: 0.05, 1062: 0.05, 1416: 0.0275, 1769: 0.05 * (0.1 + 0.9 / 708)}),
        (r29.falling(0.6), {0: 0.6, 918: 0.6, 919: 0.6 * (1 - 0.9 * 0.5 / 751.5), 1670: 0.06}),
        (r21.momentum, {0: 0.85, 150: 0.90, 300: 0.95, 1769: 0.95}),
        (r29.momentum, {0: 0.85, 150: 0.90, 300: 0.95}),
    ],
)
def test_schedules(schedule, points):
    for step, value in points.items():
        assert float(schedule(step)) == pytest.approx(value, rel=1e-4, abs=1e-9)


def mean_keys(blocks):
    """Keys that a query of a long document sees under record 21's mask: those of its block and of
    blocks before it."""
    query, key = np.arange(128)[:, None] + 128 * blocks, np.arange(128 * (blocks + 1))[None]
    return ((key <= query) & (query // 128 - key // 128 < blocks)).sum(1).mean()


def test_r21_windows_grow_from_one_block_to_fourteen():
    assert len(r21.STAGES) == 14
    step = 0
    for blocks, stage in enumerate(r21.STAGES, 1):
        # As many keys as the record's mask of blocks shows a query in the mean, rounded up.
        assert (
            stage.windows[0] == stage.windows[4] == stage.windows[11] == np.ceil(mean_keys(blocks))
        )
        assert stage.windows[1] == np.ceil(mean_keys(max(1, blocks // 2)))
        # The record's rule: 1728 x step / steps, rounded up to a multiple of 128.
        for s in (step, step + stage.steps - 1):
            assert max(128, 128 * np.ceil(1728 * s / 1770 / 128)) == 128 * blocks
        step += stage.steps
    assert step == 1770


def test_r29_windows_are_three_plateaus():
    assert [(s.steps, s.windows[0], s.windows[1]) for s in r29.STAGES] == [
        (557, 3 * 128 + 1, 1 * 128 + 1),
        (557, 7 * 128 + 1, 3 * 128 + 1),
        (556, 11 * 128 + 1, 5 * 128 + 1),
    ]
    assert {s.max_doc_len for s in r29.STAGES} == {2048}


def test_fp8_scales_are_the_records():
    # Record 21 multiplies x by 2, w by 2^9 and the gradient of the mean over 49,152 tokens by 2^19.
    assert r21.HEAD_SCALES == pytest.approx((1 / 2, 1 / 512, 49_152 / 2**19))
    assert r29.HEAD_SCALES == pytest.approx((768**0.5 / 448, 2**-9, 1 / 448))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r29", "r89"])
def test_fp8_head_learns_as_the_exact_one_does(name):
    """Emulated on CPU: same loss in the forward pass to FP8's precision, and gradients that point
    the same way."""
    tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, 257)
    found = {}
    for word in ("on", "off"):
        recipe = find(name, [*TOYS[name], f"FP8={word}"]).recipe
        params = first_parameters(recipe)
        params["head"] = 0.3 * jax.random.normal(jax.random.key(2), params["head"].shape)
        ctx = r.Context(recipe.stages[-1], training=True)

        def loss(params, recipe=recipe, ctx=ctx):
            return recipe.loss(
                params, tokens[:, :-1], tokens[:, 1:], jnp.full((2, 32), 1 / 64), ctx
            )[0]

        value, grads = jax.jit(jax.value_and_grad(loss))(params)
        found[word] = float(value), grads["head"], grads["embed"]
    assert found["on"][0] != found["off"][0]
    assert found["on"][0] == pytest.approx(found["off"][0], rel=0.01)
    for one, two in zip(found["on"][1:], found["off"][1:], strict=True):
        cosine = jnp.vdot(one, two) / (jnp.linalg.norm(one) * jnp.linalg.norm(two))
        assert float(cosine) > 0.98


def test_fineweb_cpu_is_its_parent_but_for_what_it_scores():
    """So `make race-webtext` times the sampled softmax and nothing else."""
    ours, theirs = (
        find("fineweb-cpu", trace=False),
        find(str(RECORDS / "ideas" / "fineweb_cpu_full.py"), trace=False),
    )
    assert (ours.recipe.parent, ours.recipe.track) == (theirs.recipe.name, theirs.recipe.track)
    begin, end = "def hidden(", "def loss("
    assert ours.source[ours.source.index(begin) : ours.source.index(end)] in theirs.source
    assert {
        name: value for name, value in ours.fields.items() if name in theirs.fields
    } == theirs.fields
    assert ours.fields.keys() - theirs.fields.keys() == {"EXACT_TOKENS", "SAMPLED_ONE_IN"}
    rules = track.read_track(RECORDS / ours.recipe.track / track.NAME, ours.recipe.track).rules
    assert (rules["target_loss"], rules["data.val_tokens"]) == (
        ours.recipe.target_loss,
        ours.recipe.eval_tokens,
    )
