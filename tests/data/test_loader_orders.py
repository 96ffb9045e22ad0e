"""Loader: mixtures, shuffling, uint32 tokens, masks, and arrays that the device derives from
tokens."""

import json
from itertools import islice

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspeed import recipe
from jspeed.data import Shuffle, Stage, StateMismatchError, TokenLoader
from jspeed.errors import BadInput
from jspeed.model.attention import find_documents
from jspeed.parallel.mesh import put_rows

from .on_disk import shards_of, wide_bytes

few = settings(max_examples=40, deadline=None)


def tokens_of(loader):
    return [batch.tokens.tolist() for batch in loader]


def test_the_recipes_stage_is_the_loaders():
    assert recipe.Stage is Stage


def test_wide_tokens_are_not_cut_to_sixteen_bits():
    shards = shards_of(np.arange(128_000, 128_100), make=wide_bytes)
    batch = next(TokenLoader(shards, lanes=2, lane_len=5, bos_id=128_003, max_docs=3))
    assert batch.tokens.dtype == shards.dtype == np.uint32
    assert batch.targets[1].tolist() == [128_006, 128_007, 128_008, 128_009, 128_010]
    assert batch.num_docs.tolist() == [2, 1] and batch.doc_offsets[0].tolist() == [0, 3, 5, 5]
    with pytest.raises(BadInput, match="a mixture should have tokens of one width"):
        TokenLoader([(shards, 1), (shards_of(range(99)), 1)], lanes=2, lane_len=5)


@few
@given(
    st.lists(st.integers(21, 60), min_size=1, max_size=6),
    st.integers(0, 99),
    st.sampled_from(["bos", None]),
)
def test_shuffled_shards_come_once_an_epoch(lengths, seed, align):
    shards = [
        np.concatenate([[i, 0], 1000 * i + np.arange(1, n)]) for i, n in enumerate(lengths, 1)
    ]
    arguments = {"lanes": 1, "lane_len": 20, "align": align, "bos_id": 0}
    epochs = [[], []]
    for batch in TokenLoader(
        shards_of(*shards), shuffle=Shuffle(seed, unit="shard"), epochs=2, **arguments
    ):
        epochs[batch.epoch].append(batch.tokens.tolist())
    alone = [tokens_of(TokenLoader(shards_of(shard), **arguments)) for shard in shards]
    for epoch in epochs:
        order = list(dict.fromkeys(row[-1][-1] // 1000 for row in epoch))
        assert sorted(order) == list(range(1, len(shards) + 1))
        assert epoch == [batch for number in order for batch in alone[number - 1]]
    again = TokenLoader(
        shards_of(*shards), shuffle=Shuffle(seed, unit="shard"), epochs=2, **arguments
    )
    assert tokens_of(again) == epochs[0] + epochs[1]


def test_shard_orders_differ_between_epochs_and_seeds():
    shards = shards_of(*(np.full(30, i) for i in range(20)))

    def order(seed):
        loader = TokenLoader(
            shards, lanes=1, lane_len=20, shuffle=Shuffle(seed, unit="shard"), epochs=2
        )
        return [int(batch.tokens[0, 0]) for batch in loader]

    one, two = order(1), order(2)
    assert len({tuple(o) for o in (one[:20], one[20:], two[:20], two[20:])}) == 4


MASK, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def mix(z):
    """SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def windows(shards, lanes, length, seed, step):
    """The rule of ``Shuffle(unit="window")``: starts of all shards in a row, one drawn for each
    lane."""
    all_of_them = [
        shard[n : n + length + 1] for shard in shards for n in range(len(shard) - length)
    ]
    key = mix(mix(seed + GOLDEN & MASK) ^ step)
    draws = [
        mix(key + GOLDEN * (lane + 1) & MASK) * len(all_of_them) >> 64 for lane in range(lanes)
    ]
    return [all_of_them[draw].tolist() for draw in draws]


@few
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.integers(1, 20),
    st.integers(0, 99),
    st.sampled_from([1, 2, 4]),
)
def test_random_windows_are_those_of_the_rule_and_go_on_on_other_processes(
    lengths, length, seed, processes
):
    shards = [1000 * i + np.arange(n) for i, n in enumerate([length + 1, *lengths])]
    same = {"lanes": 4, "lane_len": length, "shuffle": Shuffle(seed, unit="window"), "epochs": None}
    loader = TokenLoader(shards_of(*shards), **same)
    for step in range(4):
        batch = next(loader)
        assert batch.tokens.tolist() == windows(shards, 4, length, seed, step)
        assert (
            np.array_equal(batch.inputs[:, 1:], batch.targets[:, :-1]) and batch.dropped_tokens == 0
        )
    rest = [
        TokenLoader(shards_of(*shards), process_index=index, process_count=processes, **same)
        for index in range(processes)
    ]
    for part in rest:
        part.load_state_dict(loader.state_dict())
    assert np.concatenate([next(part).tokens for part in rest]).tolist() == windows(
        shards, 4, length, seed, 4
    )


def test_random_windows_start_anywhere_up_to_the_last():
    """Eight tokens and windows of three with their target: starts 0 to 4, as often as each
    other."""
    same = {"lanes": 50, "lane_len": 3, "epochs": None}
    loader = TokenLoader(shards_of(np.arange(8)), shuffle=Shuffle(3, unit="window"), **same)
    starts = np.concatenate([batch.tokens[:, 0] for batch in islice(loader, 100)])
    assert np.bincount(starts).shape == (5,) and np.abs(np.bincount(starts) - 1000).max() < 120
    with pytest.raises(BadInput, match="needs 9 tokens in one shard but there are 8"):
        TokenLoader(
            shards_of(np.arange(8)), shuffle=Shuffle(3, unit="window"), **(same | {"lane_len": 8})
        )


def test_two_epochs_without_shuffle_are_one_twice():
    shards = shards_of(np.arange(101), np.arange(200, 277))
    once, twice = (TokenLoader(shards, lanes=2, lane_len=7, epochs=epochs) for epochs in (1, 2))
    assert tokens_of(twice) == 2 * tokens_of(once)


SETS = [np.arange(1000 * i, 1000 * i + 900) for i in range(3)]


@few
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.sampled_from([None, Shuffle(3, 10)]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 9),
)
def test_a_mixture_is_its_sources_lane_by_lane_and_resumes(weights, shuffle, processes, at):
    sources = [(shards_of(SETS[i]), weight) for i, weight in enumerate(weights)]
    arguments = {"lanes": 4, "lane_len": 5, "shuffle": shuffle}
    mixed = TokenLoader(sources, **arguments, epochs=1)
    whole = tokens_of(mixed)
    lanes = [row for batch in whole for row in batch]
    counts = np.bincount([row[0] // 1000 for row in lanes], minlength=len(weights))
    assert np.abs(counts - len(lanes) * np.array(weights) / sum(weights)).max() < 3
    assert len(lanes) > 100
    for i, (shards, _) in enumerate(sources):
        alone = TokenLoader(shards, lanes=1, lane_len=5, shuffle=shuffle)
        own = [row for row in lanes if row[0] // 1000 == i]
        assert own == [batch[0] for batch in tokens_of(alone)][: len(own)]
    first = TokenLoader(sources, **arguments)
    for _ in range(at):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    parts = []
    for index in range(processes):
        part = TokenLoader(sources, process_index=index, process_count=processes, **arguments)
        part.load_state_dict(state)
        parts.append(tokens_of(part))
    assert [sum(rows, []) for rows in zip(*parts, strict=True)] == whole[at:]


def test_a_mixture_of_other_weights_or_data_is_not_resumed():
    one, two = shards_of(SETS[0]), shards_of(SETS[1])
    state = TokenLoader([(one, 1), (two, 2)], lanes=2, lane_len=5).state_dict()
    for field, sources in {
        "weights": [(one, 2), (two, 1)],
        "fingerprint": [(one, 1), (shards_of(SETS[0][:99]), 2)],
    }.items():
        with pytest.raises(StateMismatchError, match=f"differs in {field}: "):
            TokenLoader(sources, lanes=2, lane_len=5).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="differs in offset_1: "):
        TokenLoader([(one, 1), (two, 2)], lanes=2, lane_len=5).load_state_dict(
            state | {"offset_1": 901}
        )
    for message, sources in {
        "the weight of .* should be from 1": [(one, 0), (two, 1)],
        "the mixture has no shards": [],
        "should be the shards that open_shards returned": ["x_train_000001.bin"],
    }.items():
        with pytest.raises(BadInput, match=message):
            TokenLoader(sources, lanes=2, lane_len=5)


@few
@given(
    st.lists(st.integers(0, 12), min_size=20, max_size=60), st.integers(1, 9), st.integers(2, 15)
)
def test_the_mask_hides_targets_that_cross_a_cut(lengths, cut, lane_len):
    """Ids are unique but for the document starts, so that every true successor can be looked up."""
    body = iter(range(1, 60_000))
    tokens = [token for n in lengths for token in [0, *(next(body) for _ in range(n))]]
    after = {a: b for a, b in zip(tokens, tokens[1:], strict=False) if a}
    arguments = {"lanes": 1, "lane_len": lane_len, "align": "bos", "bos_id": 0, "max_doc_len": cut}
    try:
        loader = TokenLoader(shards_of(tokens), loss_mask=True, **arguments)
    except BadInput:
        return
    for batch in loader:
        assert batch.loss_mask.dtype == bool and batch.loss_mask.shape == batch.inputs.shape
        for a, b, kept in zip(batch.inputs[0], batch.targets[0], batch.loss_mask[0], strict=True):
            if a:
                assert kept == (after.get(int(a)) == b)
            elif cut > 1:
                assert kept


@few
@given(
    st.lists(st.integers(0, 12), min_size=20, max_size=60),
    st.integers(1, 9),
    st.sampled_from(["bos", None]),
)
def test_document_numbers_on_the_device_are_those_of_the_offsets(lengths, cut, align):
    tokens = [token for n in lengths for token in [0, *range(1, n + 1)]]
    arguments = {"lanes": 2, "lane_len": 9, "bos_id": 0, "max_docs": 10, "align": align}
    arguments["max_doc_len"] = cut if align else None
    try:
        batches = list(TokenLoader(shards_of([5, *tokens, *tokens]), **arguments))
    except BadInput:
        return
    for batch in batches:
        found = find_documents(batch.inputs, 0, max_docs=10)
        segments = np.asarray(found.ids)
        np.testing.assert_array_equal(found.offsets, batch.doc_offsets)
        for row, (offsets, count) in enumerate(zip(batch.doc_offsets, batch.num_docs, strict=True)):
            sizes = np.diff(offsets[: count + 1])
            np.testing.assert_array_equal(segments[row], np.repeat(np.arange(count), sizes))


def test_tokens_alone_go_to_the_devices_as_they_are_stored():
    sharding = NamedSharding(Mesh(jax.devices()[:4], ("data",)), PartitionSpec("data"))
    arguments = {"lanes": 4, "lane_len": 6, "align": "bos", "bos_id": 0, "max_doc_len": 4}
    shards = shards_of(np.resize(np.arange(9), 999))
    batch = next(TokenLoader(shards, max_docs=3, loss_mask=True, **arguments))
    with jax.transfer_guard("disallow"):
        tokens = put_rows(batch.tokens, sharding)
    assert (
        tokens.shape == (4, 7)
        and tokens.dtype == np.uint16
        and len(tokens.sharding.device_set) == 4
    )
    np.testing.assert_array_equal(tokens, batch.tokens)
