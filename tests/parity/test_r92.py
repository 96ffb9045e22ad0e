"""Recipe r92 against the script of record 92: losses, gradients, updates, a whole run with its
averages, tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.data import TokenLoader, find_split
from jspeed.model.prefixes import gpt2_prefixes
from jspeed.recipes import r92
from jspeed.speedrun.ngrams import bigram_rows, trigram_rows

from ..recipes import test_golden_r92 as golden
from ..recipes.r62_r89_golden import tied
from . import r62_r89_runs as runs
from . import r92_script
from . import r92_steps as steps
from .conftest import check
from .ours import check_draws
from .r62_r89_pair import full_stages, without_maxima
from .r92_pair import Pair
from .synthetic import documents, write_shards

LIMITS = {"forward": 1e-6, "gradients": 3e-5, "optimizer": 5e-4, "whole steps": 1e-4}
# Around every border of a schedule: momentum, stages, tables every four steps, two momenta,
# cooldown, the last tied update, the end. Each starts after an update of tables, and all but the
# last end after one.
WINDOWS = [(0, 4), (236, 242), (316, 324), (332, 344), (512, 520), (676, 684)]
WINDOWS += [(1104, 1112), (1140, 1148), (1172, 1184), (1188, 1194)]


@pytest.fixture(scope="module")
def texts(clone):
    """The record's files; a clone may be older than the record."""
    if not r92_script.has_log(clone):
        pytest.skip(
            f"{clone} has no {r92_script.LOG}: give a clone of modded-nanogpt that has record 92"
        )
    return r92_script.files(clone)


@pytest.fixture(scope="module")
def made():
    return {}


@pytest.fixture
def pair(made, texts, tmp_path_factory, gpt2_vocabulary):
    """The record and our recipe, made once."""
    if not made:
        folder, size = tmp_path_factory.mktemp("r92"), r92_script.Size()
        rng = np.random.default_rng(0)
        write_shards(folder, "train", [documents(rng, size.bos, 9000, 200) for _ in range(6)])
        write_shards(folder, "val", [documents(rng, size.bos, 5 * size.eval_len, 200)])
        made["pair"] = Pair(texts, folder, size)
    return made["pair"]


@pytest.mark.parametrize("stage", range(7))
def test_losses_and_gradients_in_training(stage, pair, agree):
    step = runs.starts(pair.recipe)[stage] + min(1, pair.recipe.stages[stage].steps - 1)
    lanes, params = pair.cut(stage), pair.start(apart=stage > 5)
    expected, expected_total, expected_grads = pair.trained(step, lanes)
    found, total, grads = pair.compiled.trained(params, step, runs.tokens_of(lanes))
    agree(
        "r92",
        "forward",
        {"each": found, "sum": total},
        {"each": expected, "sum": expected_total},
        LIMITS["forward"],
    )
    known = together if stage > 5 else lambda tree: together(tied(tree))
    agree(
        "r92", "gradients", known(without_maxima(grads)), known(expected_grads), LIMITS["gradients"]
    )


def together(tree):
    """Single numbers as one array: the terms of one may cancel, of gates_scale to 1/200, and
    rounding is of terms."""
    numbers = [value for _, value in sorted(tree.items()) if np.ndim(value) == 0]
    return {name: value for name, value in tree.items() if np.ndim(value)} | {
        "numbers": np.array(numbers)
    }


def test_losses_in_the_last_validation(pair, agree):
    params, lanes = pair.start(apart=True), pair.cut(None)
    tokens = pair.batches("val", 1)[0][: len(lanes)]
    agree("r92", "data", tokens, runs.tokens_of(lanes), 0)
    agree(
        "r92",
        "forward",
        pair.compiled.evaluated(params, tokens),
        pair.evaluated(lanes),
        LIMITS["forward"],
    )


def test_a_window_of_one_more_is_noticed(pair):
    """One more key in one layer after another."""
    params, lanes = pair.start(apart=True), pair.cut(None)
    found = pair.compiled.evaluated(params, runs.tokens_of(lanes))
    for layer in range(len(r92.ATTENDING)):
        with pair.wider_window(layer), pytest.raises(AssertionError, match="forward"):
            check("r92", "forward", found, pair.evaluated(lanes), LIMITS["forward"])


def test_updates_around_every_border(pair, texts, agree):
    """With the schedules of the full size."""
    full = Pair(texts, pair.folder, r92_script.FULL)
    for _, found, expected in steps.changes(full, [range(*window) for window in WINDOWS]):
        agree("r92", "optimizer", found, expected, LIMITS["optimizer"])


@pytest.mark.parametrize("label", ["lm_head", "mlp_bank", "bigram_embed"])
def test_twice_the_rate_of_one_group_is_noticed(label, pair, texts):
    other = Pair(texts, pair.folder, r92_script.FULL)

    def double(rank):
        for config in rank.namespace["training_manager"].optimizer.param_cfgs.values():
            config.lr_mul *= 2 if config.label == label else 1

    other.script.each(double)
    *_, (_, found, expected) = steps.changes(other, [range(2)])
    noticed = {"lm_head": "head|embed", "mlp_bank": "mlp", "bigram_embed": "ngrams"}[label]
    with pytest.raises(AssertionError, match=noticed):
        check("r92", "optimizer", found, expected, LIMITS["optimizer"])


def test_what_is_drawn_at_first(pair, texts):
    check_draws(pair.recipe, Pair(texts, pair.folder, pair.size).parameters())


def test_a_whole_run(pair, texts, agree):
    """The record's own loop, generator, exchange of rows and averages at the end against our
    loader, gradients, optimizer and averages."""
    run = Pair(texts, pair.folder, pair.size)
    ours = steps.Ours(pair.recipe, run.start())
    run.script.run(range(pair.recipe.steps + 1))
    expected = np.mean([rank.namespace["_CG"].losses for rank in run.script.ranks], axis=0)
    expected_end = float(np.mean([rank.losses for rank in run.script.ranks]))
    found = []
    for step, tokens in enumerate(pair.batches("train", pair.recipe.steps)):
        _, total, grads = pair.compiled.trained(ours.params, step, tokens)
        found.append(total)
        ours.step(step, grads)
    params = ours.end()
    end = float(
        np.mean(
            [
                pair.compiled.evaluated(params, part)
                for part in np.split(pair.batches("val", 1)[0], 2)
            ]
        )
    )
    assert max(expected[:8]) - min(expected[:8]) > 0.1
    agree("r92", "whole steps", [*found, end], [*expected, expected_end], LIMITS["whole steps"])
    # without what is none of the record's
    mine = run.mine(run.names.theirs(jax.tree.map(np.asarray, params)))
    check("r92", "parameters at the end", mine, run.parameters(), 1e-3)


def test_tokens_of_the_full_size(pair, texts, tmp_path, agree):
    """The record's generator against our loader, over the border of a stage and of a shard,
    documents cut in segments; rows of bigrams and trigrams."""
    rng, bos = np.random.default_rng(0), 50_256

    def shard(count):
        lengths = rng.integers(120, 5000, count)
        return np.concatenate([np.append(bos, rng.integers(0, bos, n)) for n in lengths])

    write_shards(tmp_path, "train", [shard(200) for _ in range(3)])
    write_shards(tmp_path, "val", [shard(10)])
    stages = [full_stages(r92.RECIPE, (3,) * 7)[number] for number in (1, 3)]

    def read(rank):
        space = rank.namespace
        space["args"].bigram_vocab_size, space["BOS_ID"], space["VIRTUAL_SEQ_CAP"] = (
            r92.NGRAMS,
            bos,
            r92.SEGMENT,
        )
        space["TRAIN_MAX_NUM_DOCS"] = dict(zip(r92.LANE_LENS, r92.MAX_DOCS, strict=True))
        space["_loader_pin_cap"] = lambda: max(r92.LANE_LENS)
        first, second = stages
        files = str(tmp_path / "data" / "fineweb10B" / "fineweb_train_*.bin")
        lanes = space["distributed_data_generator"](files, 2 * first.lane_len, first.max_doc_len)
        made = [next(lanes) for _ in range(first.steps)]
        made.append(lanes.send((2 * second.lane_len, second.max_doc_len, 1)))
        made += [next(lanes) for _ in range(second.steps - 1)]
        return [tuple(part.clone() for part in lane[:4]) for lane in made]

    other = Pair(texts, pair.folder, pair.size)
    ranks = other.script.each(read)
    shards = find_split(tmp_path / "data" / "fineweb10B", "train")
    half = r92.NGRAMS // 2
    with TokenLoader(
        shards, lanes=2, schedule=stages, align="bos", bos_id=bos, prefetch=0
    ) as loader:
        for step, batch in enumerate(loader):
            lanes = [rank[step] for rank in ranks]
            agree("r92", "data", np.array(batch.tokens), runs.tokens_of(lanes), 0)
            inputs = jnp.asarray(batch.inputs, jnp.int32)
            rows = np.concatenate(
                [bigram_rows(inputs, half), half + trigram_rows(inputs, half)], axis=1
            )
            agree("r92", "data", rows, np.stack([lane[3].numpy() for lane in lanes]), 0)
            for lane, offsets in zip(lanes, batch.doc_offsets, strict=True):
                np.testing.assert_array_equal(
                    np.unique(lane[2]), cut(np.unique(offsets), r92.SEGMENT)
                )
        assert loader.stats()["shard_switches"] >= 1


def cut(offsets, longest):
    """Add a border after every ``longest`` tokens of a document."""
    more = [np.arange(a, b, longest) for a, b in zip(offsets, offsets[1:], strict=False)]
    return np.concatenate([*more, offsets[-1:]])


def test_prefixes(pair):
    np.testing.assert_array_equal(
        pair.script["_PTP_TAB_NP"], gpt2_prefixes(pair.size.bos, pair.size.vocab)
    )


@pytest.mark.parametrize(("stage", "step"), golden.GOLDEN)
def test_golden_numbers_come_from_the_record(stage, step, pair, texts):
    """``tests/recipes/golden.json`` has what the script gives: one lane of 112 tokens in the
    first process."""
    fields = golden.FIELDS
    columns = tuple(fields["COLUMNS"][number] for number in (0, 3, 4))
    smaller = dict(
        mlp=fields["MLP_WIDTH"], ngrams=fields["NGRAMS"], segment=fields["SEGMENT"], columns=columns
    )
    made = Pair(texts, pair.folder, dataclasses.replace(r92_script.FULL, **smaller))
    params = golden.parameters(made.recipe)
    made.load(params | {"embed": params["head"]})  # one table until the last stage
    made.give_prefixes(golden.prefixes())
    found, total, grads = made.trained(step, [made.lane(golden.lane(stage)[0])])
    expected = golden.GOLDEN[stage, step]
    assert total == pytest.approx(expected["total"], rel=golden.LIMIT)
    assert float(np.mean(found)) == pytest.approx(expected["mean"], rel=golden.LIMIT)
    norms = {name: float(np.linalg.norm(grads[name])) for name in expected["gradients"]}
    norms["head"] = float(np.linalg.norm(grads["head"] + grads["embed"]))
    assert norms == pytest.approx(expected["gradients"], rel=golden.LIMIT)
