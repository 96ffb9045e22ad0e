"""Loader: shuffling, uint32 tokens, and arrays that the device derives from tokens."""

from itertools import islice

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspeed import recipe
from jspeed.data import Shuffle, Stage, TokenLoader
from jspeed.errors import BadInput
from jspeed.model.attention import find_documents
from jspeed.parallel.mesh import put_lanes

from .on_disk import shards_of, wide_bytes

few = settings(max_examples=40, deadline=None)


def test_the_recipes_stage_is_the_loaders():
    assert recipe.Stage is Stage


def test_wide_tokens_are_not_cut_to_sixteen_bits():
    shards = shards_of(np.arange(128_000, 128_100), make=wide_bytes)
    batch = next(TokenLoader(shards, lanes=2, lane_len=5, bos_id=128_003, max_docs=3))
    assert batch.tokens.dtype == shards.dtype == np.uint32
    assert batch.targets[1].tolist() == [128_006, 128_007, 128_008, 128_009, 128_010]
    assert batch.num_docs.tolist() == [2, 1] and batch.doc_offsets[0].tolist() == [0, 3, 5, 5]


MASK, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def mix(z):
    """SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def windows(shards, lanes, length, seed, step):
    """The rule of ``Shuffle(unit="window")``: of starts of all shards one for each lane."""
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
def test_random_windows_follow_the_rule_on_other_processes_too(lengths, length, seed, processes):
    shards = [1000 * i + np.arange(n) for i, n in enumerate([length + 1, *lengths])]
    same = {"lanes": 4, "lane_len": length, "shuffle": Shuffle(seed, unit="window"), "epochs": None}
    loader = TokenLoader(shards_of(*shards), **same)
    for step in range(4):
        batch = next(loader)
        assert batch.tokens.tolist() == windows(shards, 4, length, seed, step)
        assert np.array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        assert batch.dropped_tokens == 0
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
    """Eight tokens, windows of three with their target: starts 0 to 4, equally often."""
    same = {"lanes": 50, "lane_len": 3, "epochs": None}
    loader = TokenLoader(shards_of(np.arange(8)), shuffle=Shuffle(3, unit="window"), **same)
    starts = np.concatenate([batch.tokens[:, 0] for batch in islice(loader, 100)])
    assert np.bincount(starts).shape == (5,) and np.abs(np.bincount(starts) - 1000).max() < 120
    with pytest.raises(BadInput, match="needs 9 tokens in one shard but there are 8"):
        TokenLoader(
            shards_of(np.arange(8)), shuffle=Shuffle(3, unit="window"), **(same | {"lane_len": 8})
        )


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
    batch = next(TokenLoader(shards, max_docs=3, **arguments))
    with jax.transfer_guard("disallow"):
        tokens = put_lanes(batch.tokens, sharding)
    assert tokens.shape == (4, 7) and tokens.dtype == np.uint16
    assert len(tokens.sharding.device_set) == 4
    np.testing.assert_array_equal(tokens, batch.tokens)
