"""The stream against the NumPy model, over orders, schedules, process counts and resumes; bad
arguments."""

import json
import os
from itertools import repeat
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspeed._dataloader import header
from jspeed.data import (
    DocOverflowError,
    Shuffle,
    StateMismatchError,
    TokenLoader,
    TokenRangeError,
    open_shards,
)
from jspeed.errors import BadInput

from ..refusals import refused
from .on_disk import shard_bytes, shards_of, wide_bytes
from .oracle import stream

BOS = 0
few = settings(max_examples=60, deadline=None)
backends = st.sampled_from(["mmap", "pread"])


def stage(steps, lane_len, max_doc_len=None, max_docs=None):
    return SimpleNamespace(
        steps=steps, lane_len=lane_len, max_doc_len=max_doc_len, max_docs=max_docs or lane_len + 1
    )


def batches(loader):
    """The batches of a stream that also ends at an epoch without any."""
    try:
        # not from the loader, which would close with this generator
        yield from map(next, repeat(loader))
    except BadInput as error:
        assert "fits into any of" in str(error)


def told(loader):
    rows = []
    for batch in batches(loader):
        ends = [
            row[1 : n + 1].tolist()
            for row, n in zip(batch.doc_offsets, batch.num_docs, strict=True)
        ]
        rows.append((batch.epoch, batch.tokens.tolist(), ends, batch.dropped_tokens))
    return rows


def joined(parts):
    """The global batches from each process's."""
    return [
        (steps[0][0], sum((s[1] for s in steps), []), sum((s[2] for s in steps), []), steps[0][3])
        for steps in zip(*parts, strict=True)
    ]


document = st.lists(st.integers(1, 99), max_size=30).map(lambda body: [BOS, *body])
shard = st.tuples(st.lists(st.integers(1, 99), max_size=9), st.lists(document, max_size=14)).map(
    lambda parts: np.array(
        [*parts[0], *sum(parts[1], []), *([] if parts[0] or parts[1] else [1])], np.uint16
    )
)
short = st.integers(1, 12)


@st.composite
def streams(draw, order=None, lanes=None):
    """Shards, stages and the loader's arguments of one of the three orders."""
    order = order or draw(st.sampled_from(["bos", "contiguous", "shuffled"]))
    lanes = lanes or draw(st.integers(1, 4))
    cut = st.none() | short if order == "bos" else st.none()
    length = st.sampled_from([1, 2, 3, 6]) if order == "shuffled" else short
    stages = draw(
        st.lists(st.builds(stage, st.integers(1, 5), length, cut), min_size=1, max_size=3)
    )
    need = lanes * (max(s.lane_len for s in stages) + 1) + 12
    shards = [*draw(st.lists(shard, max_size=2)), np.resize(draw(shard), need)]
    align = "bos" if order == "bos" else None
    arguments = {"lanes": lanes, "schedule": stages, "bos_id": BOS, "align": align}
    if order == "shuffled":
        arguments["shuffle"] = Shuffle(draw(st.integers(0, 99)), 6)
    return draw(st.permutations(shards)), arguments


@settings(few, max_examples=200)
@given(
    streams("bos") | streams("contiguous"),
    st.integers(1, 2),
    st.sampled_from([0, 1, 2, 8]),
    backends,
    st.booleans(),
)
def test_streams_equal_the_numpy_model(data, epochs, prefetch, backend, wide):
    shards, arguments = data
    opened = shards_of(*shards, make=wide_bytes if wide else shard_bytes)
    loader = TokenLoader(opened, epochs=epochs, prefetch=prefetch, backend=backend, **arguments)
    model = stream(
        shards, arguments["schedule"], arguments["lanes"], arguments["align"], BOS, epochs
    )
    assert told(loader) == [
        (epoch, rows.tolist(), ends, dropped) for epoch, rows, ends, dropped in model
    ]


@few
@given(streams(lanes=8), st.integers(0, 12), st.sampled_from([0, 1, 2, 8]))
def test_processes_and_resumes_give_the_same_lanes(data, at, prefetch):
    shards = shards_of(*data[0])
    whole = told(TokenLoader(shards, epochs=2, **data[1]))
    first = TokenLoader(shards, epochs=2, prefetch=prefetch, **data[1])
    first.start()
    for _ in zip(range(at), batches(first), strict=False):
        pass
    state = json.loads(json.dumps(first.state_dict()))
    assert state["step"] == min(at, len(whole))
    for count in (1, 2, 4, 8):
        parts = []
        for index in range(count):
            own = dict(
                process_index=index, process_count=count, backend=("mmap", "pread")[index % 2]
            )
            part = TokenLoader(shards, epochs=2, prefetch=index, **own, **data[1])
            part.load_state_dict(state)
            assert part.state_dict() == state
            parts.append(told(part))
        assert joined(parts) == whole[at:]
    next(batches(first), None)
    first.load_state_dict(state)
    assert told(first) == whole[at:]


@few
@given(streams())
def test_inputs_targets_and_offsets_belong_together(data):
    cuts = {s.lane_len: s.max_doc_len for s in data[1]["schedule"]}
    loader = TokenLoader(shards_of(*data[0]), epochs=None, **data[1])
    for _, batch in zip(range(12), batches(loader), strict=False):
        length = batch.inputs.shape[1]
        assert np.array_equal(batch.inputs, batch.tokens[:, :-1])
        assert np.array_equal(batch.targets, batch.tokens[:, 1:])
        assert np.shares_memory(batch.inputs, batch.tokens)
        assert np.shares_memory(batch.targets, batch.tokens)
        for row, offsets, count in zip(
            batch.inputs, batch.doc_offsets, batch.num_docs, strict=True
        ):
            assert offsets[0] == 0 and (offsets[count:] == length).all()
            assert (np.diff(offsets[: count + 1]) > 0).all()
            inner = offsets[1:count]
            if data[1]["align"] == "bos":
                inner = offsets[:count]
                if len({s.max_doc_len for s in data[1]["schedule"]}) == 1 and cuts[length]:
                    assert np.diff(offsets[: count + 1]).max() <= cuts[length]
            assert set(inner) >= set(np.flatnonzero(row[1:] == BOS) + 1)
            assert (row[inner] == BOS).all()


@few
@given(
    st.integers(30, 200),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 2**62),
)
def test_a_shuffled_epoch_is_a_permutation_of_whole_blocks(tokens, lanes, length, times, seed):
    block = length * times
    files = [np.arange(tokens), 1000 + np.arange(tokens // 2)]
    shards = shards_of(*files)
    blocks = [
        1000 * i + j * block for i, f in enumerate(files) for j in range((len(f) - 1) // block)
    ]
    if len(blocks) * times < lanes:
        with pytest.raises(BadInput, match="lane windows"):
            TokenLoader(
                shards, lanes=lanes, lane_len=length, align=None, shuffle=Shuffle(seed, block)
            )
        return
    arguments = {"lanes": lanes, "lane_len": length, "align": None, "bos_id": 65535}
    epochs = [[], []]
    for batch in TokenLoader(shards, epochs=2, shuffle=Shuffle(seed, block), **arguments):
        assert (np.diff(batch.tokens.astype(int)) == 1).all()
        epochs[batch.epoch].extend(batch.tokens[:, 0].tolist())
    for starts in epochs:
        assert len(starts) == len(blocks) * times // lanes * lanes
        order = starts[::times]
        assert len(set(order)) == len(order) and set(order) <= set(blocks)
        assert starts == [b + i * length for b in order for i in range(times)][: len(starts)]


def test_the_order_depends_on_seed_and_epoch_only():
    shards = shards_of(np.arange(2001))

    def epochs(seed, lanes):
        order = Shuffle(seed, 10)
        loader = TokenLoader(shards, lanes=lanes, lane_len=10, align=None, shuffle=order, epochs=2)
        starts = np.concatenate([batch.tokens[:, 0] for batch in loader])
        return starts[:200].tolist(), starts[200:].tolist()

    one, two = epochs(1, 4)
    assert one != two and sorted(one) == sorted(two) == list(range(0, 2000, 10))
    assert epochs(1, 2) == (one, two) and epochs(2, 4)[0] not in (one, two)


def test_without_an_end_the_data_wraps_around():
    shards = shards_of(np.arange(1, 22), np.arange(101, 112))
    loader = TokenLoader(
        shards, lanes=1, align=None, schedule=[stage(4, 10), stage(1, 5)], epochs=None
    )
    firsts = [
        (batch.epoch, batch.step, int(batch.tokens[0, 0]), batch.tokens.shape[1])
        for batch in loader
    ]
    assert firsts == [(0, 0, 1, 11), (0, 1, 11, 11), (0, 2, 101, 11), (1, 3, 1, 11), (1, 4, 11, 6)]
    assert loader.stats()["shard_switches"] == 1 and loader.stats()["batches"] == 5


def test_a_state_of_other_data_or_settings_names_the_field():
    arguments = {"lanes": 2, "lane_len": 5, "bos_id": 0, "align": None}
    state = TokenLoader(shards_of(np.arange(99)), **arguments).state_dict()
    assert all(isinstance(value, int | str) for value in state.values())
    changes = {
        "lanes": {"lanes": 4},
        "schedule": {"lane_len": 6},
        "bos_id": {"bos_id": 1},
        "shuffle": {"shuffle": Shuffle(3)},
        "align": {"align": "bos"},
    }
    for field, change in changes.items():
        other = TokenLoader(shards_of(np.arange(99)), **(arguments | change))
        with pytest.raises(StateMismatchError, match=f"differs in {field}: "):
            other.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="differs in fingerprint"):
        TokenLoader(shards_of(np.arange(98)), **arguments).load_state_dict(state)
    loader = TokenLoader(shards_of(np.arange(99)), **arguments)
    bad = {"version": 2, "step": -1, "epoch": "0", "shard": 1, "offset": 100, "config_hash": "0"}
    for field, value in bad.items():
        with pytest.raises(StateMismatchError, match=f"differs in {field}: "):
            loader.load_state_dict(state | {field: value})


BAD = {
    "lanes=6 cannot be shared equally by process_count=4": {"lanes": 6, "process_count": 4},
    "lanes should be": {"lanes": 0},
    "process_index should be from 0 to 1 but is 2": {"process_index": 2, "process_count": 2},
    "lane_len should be": {"lane_len": -3},
    "max_docs should be": {"max_docs": 0},
    "max_doc_len should be": {"max_doc_len": 0},
    "max_doc_len=3 needs align": {"max_doc_len": 3, "align": None},
    "bos_id should be": {"bos_id": 65536},
    "bos_id=50256 but vocab_size=99": {"vocab_size": 99, "bos_id": 50256},
    "align should be": {"align": "rows"},
    "epochs should be": {"epochs": 0},
    "prefetch should be": {"prefetch": -1},
    "unit=.block.. needs align=None": {"shuffle": Shuffle()},
    "unit of Shuffle should be": {"shuffle": Shuffle(0, unit="lane")},
    "unit of Shuffle should be .*shard": {"shuffle": Shuffle(0, unit="shard")},
    "block_tokens=7 beside unit=.window": {"shuffle": Shuffle(0, 7, "window")},
    "unit=.window.. needs align=None": {"shuffle": Shuffle(0, unit="window")},
    "random windows are drawn without end": {"shuffle": Shuffle(0, unit="window"), "align": None},
    'backend should be "mmap" or "pread" but is "read"': {"backend": "read"},
    "block_tokens=7 is not a multiple of lane_len=4": {"shuffle": Shuffle(0, 7), "align": None},
    "seed of Shuffle should be": {"shuffle": Shuffle(-1), "align": None},
    "schedule has no stage": {"lane_len": None, "schedule": []},
    "belong to the stages": {"schedule": [stage(1, 4)]},
    "steps should be": {"lane_len": None, "schedule": [stage(0, 4)]},
    "needs 1000002 tokens in one shard but there are 99": {"lane_len": 500_000},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_have_error_messages(message):
    with pytest.raises(BadInput, match=message):
        good = {"lanes": 2, "lane_len": 4, "bos_id": 0, "align": "bos"}
        TokenLoader(shards_of(np.arange(99)), **(good | BAD[message]))


def test_a_batch_that_no_machine_has_the_memory_for_is_refused(tmp_path):
    tokens, path = 2**27, tmp_path / "x_train_000001.bin"
    path.write_bytes(header(tokens))
    os.truncate(path, 1024 + 2 * tokens)
    loader = TokenLoader(
        open_shards(path),
        lanes=2**20,
        lane_len=tokens - 1,
        shuffle=Shuffle(unit="window"),
        epochs=None,
    )
    refused(r"needs 28147\d+ MB in one piece, .* fewer lanes", next, loader)


def test_too_many_documents_and_foreign_tokens_are_named():
    tokens = [0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 70]
    for align, count in ("bos", 3), (None, 4):
        loader = TokenLoader(
            shards_of(tokens), lanes=2, lane_len=4, bos_id=0, max_docs=2, align=align
        )
        message = rf"step 0, lane 1 .* {count} documents but max_docs=2; .* {count}, "
        with pytest.raises(DocOverflowError, match=message):
            next(loader)
    loader = TokenLoader(
        shards_of(tokens), lanes=1, lane_len=11, bos_id=0, align=None, vocab_size=70
    )
    message = r"t_000.bin holds token id 70 at token position 11, but vocab_size=70"
    for _ in range(2):
        with pytest.raises(TokenRangeError, match=message):
            next(loader)
