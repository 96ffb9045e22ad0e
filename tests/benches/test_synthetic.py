"""What benchmarks compute on is text as far as a step can tell, and a loss that no training has
stops them."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jspeed.parallel.mesh import make_mesh
from jspeed.recipe import Context, init_parameters
from jspeed.recipes import known_recipes
from jspeed.run.compute.device import device_of
from jspeed.run.find_recipe import find

from ..toys import TINY, TOYS

STAGED = "r29", "r92"


@pytest.mark.parametrize(
    "name",
    [
        *STAGED,
        *(pytest.param(n, marks=pytest.mark.slow) for n in known_recipes() if n not in STAGED),
    ],
)
def test_lanes_fit_the_columns_and_documents_of_each_stage(name):
    from benches.synthetic import lanes_of

    found = find(name, trace=False)
    recipe = found.recipe
    for stage in dict.fromkeys(recipe.stages):
        # A recipe without COLUMNS scores all of a lane's targets, whatever their number.
        columns = found.fields["COLUMNS"][stage.own] if "COLUMNS" in found.fields else None
        for lane in lanes_of(recipe, stage):
            assert lane.dtype == recipe.data.dtype and lane.max() < recipe.data.vocab_size
            assert len(np.unique(lane[1:])) <= (columns or recipe.data.vocab_size)
            starts = np.flatnonzero(lane[:-1] == recipe.data.bos_id)
            assert starts[0] == 0 and len(starts) <= (stage.max_docs or stage.lane_len)
            lengths = np.diff([*starts, stage.lane_len])
            assert lengths.max() <= (stage.max_doc_len or stage.lane_len)


def test_ids_are_as_frequent_as_words():
    """In English text every fourteenth word is the most frequent one, and 135 words are half of it
    (Francis and Kucera 1967); GPT-2's ids are parts of words, so they are a little more even."""
    from benches.synthetic import zipf_ids

    counts = np.bincount(zipf_ids(np.random.default_rng(1), 50_257, (1_000_000,)), minlength=50_257)
    shares = np.sort(counts)[::-1].cumsum() / counts.sum()
    assert 0.03 < shares[0] < 0.1 and 0.35 < shares[134] < 0.6
    assert 30_000 < np.argsort(-counts)[:1000].max(), "frequent ids are spread over all"


def measured(recipe, recipe_hash: str):
    from benches import steps

    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    setting, device = steps.Settings(mesh, "xla", None, 1, None), device_of(mesh, recipe=recipe)
    last = len(recipe.stages) - 1
    made = steps.compile_stage(recipe, last, setting, device)
    return steps.measure_stage(recipe, recipe_hash, last, setting, made)[0]


@pytest.mark.slow
def test_a_lane_with_more_targets_than_columns_is_nan():
    """Record 92's own: its last stage has 24 tokens a lane, which are not all different."""
    few = [word for word in TOYS["r92"] if not word.startswith("COLUMNS")]
    recipe = find("r92", [*few, "COLUMNS=(8,8)", "LANES=1"]).recipe
    ctx = Context(recipe.stages[-1], training=True, step=np.int32(2))
    ids = np.arange(24, dtype=np.int32)[None]

    @jax.jit
    def loss(key, ids):
        params = init_parameters(recipe.parameters, key)
        return recipe.loss(params, ids, ids + 1, np.ones((1, 24), np.float32), ctx)[0]

    assert np.isnan(loss(jax.random.key(0), ids))


def test_a_loss_that_no_training_has_is_an_error():
    from benches.steps import check_losses

    found = find("stdlib", [*TINY, "LAYERS=1"])
    row = measured(found.recipe, found.hash)
    assert row.first_loss == pytest.approx(np.log(257), abs=0.2) and row.loss < row.first_loss
    for factor in (0.8, 1.3):
        with pytest.raises(FloatingPointError, match="the first loss is .*, expected 4.99 to 6.66"):
            check_losses(found.recipe, found.recipe.stages[-1], [factor * row.first_loss], True)

    def loss(*arrays):
        total, each = found.recipe.loss(*arrays)
        return total, np.nan * each

    with pytest.raises(FloatingPointError, match="lanes of 16 tokens: .* step 1 is nan"):
        measured(replace(found.recipe, loss=loss), found.hash)
