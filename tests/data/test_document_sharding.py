"""In-memory documents divided among processes: disjoint, complete, in a seeded order."""

import numpy as np
import pytest

from jspeed.data import shard

from ..refusals import refused

NAMES = [f"name {i}" for i in range(32_033)]  # as many as makemore's names.txt


def test_every_second_name_of_two_processes():
    first, second = (shard(NAMES, rank=rank, n=2) for rank in (0, 1))
    assert (len(first), len(second)) == (16_017, 16_016)
    assert first == NAMES[0::2] and second == NAMES[1::2]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_shares_are_disjoint_and_together_everything(shuffle, drop_last):
    for n in range(1, 9):
        order = {"shuffle": True, "seed": 5} if shuffle else {}
        shares = [shard(NAMES, rank=rank, n=n, drop_last=drop_last, **order) for rank in range(n)]
        lengths = [len(share) for share in shares]
        together = [name for share in shares for name in share]
        assert (
            len(set(together))
            == len(together)
            == (len(NAMES) // n * n if drop_last else len(NAMES))
        )
        assert max(lengths) - min(lengths) <= (0 if drop_last else 1)
        if not shuffle:
            assert all(share == NAMES[rank::n][: len(share)] for rank, share in enumerate(shares))


def test_shuffled_shares_follow_the_seed():
    one, again, other = (shard(NAMES, n=3, shuffle=True, seed=seed) for seed in (1, 1, 2))
    assert one == again != other and one != NAMES[0::3]
    assert shard(NAMES, n=3, shuffle=True) == shard(NAMES, n=3, shuffle=True, seed=0)


def test_several_sequences_stay_aligned_and_keep_their_types():
    rows = np.arange(14).reshape(7, 2)
    names, numbers, array = shard(NAMES[:7], tuple(range(7)), rows, rank=1, n=3, shuffle=True)
    assert (type(names), type(numbers), type(array)) == (list, tuple, np.ndarray)
    assert names == [NAMES[i] for i in numbers] and np.array_equal(array, rows[list(numbers)])
    assert shard(NAMES) == NAMES and shard(()) == ()


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        (([1, 2], [1]), {}, "sequences of 2, 1 elements have different lengths"),
        (([1],), {"rank": 2, "n": 2}, "rank 2 of 2 processes"),
        (([1],), {"n": 0}, "rank 0 of 0"),
        ((), {}, "no sequence was given"),
        (("names",), {}, "cannot shard a str"),
        (([1],), {"seed": 3}, "seed=3 without shuffle=True would have no effect"),
        (([1],), {"seed": 0}, "seed=0 without shuffle=True"),
        (([1],), {"seed": -1, "shuffle": True}, "seed=-1 is negative"),
        ((np.array(3),), {}, "cannot shard a ndarray"),
    ],
)
def test_bad_arguments_have_an_error_message(data, options, says):
    refused(says, shard, *data, **options)
