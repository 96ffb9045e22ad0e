"""The table in the host's memory against NumPy and against the device's own update; what it
refuses."""

import doctest
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspeed import host_table
from jspeed.errors import BadInput
from jspeed.host_table import RowTable
from jspeed.optim.rows import row_adam
from jspeed.parallel.sparse_rows import Pending

BF16 = ml_dtypes.bfloat16
RATES = {"learning_rate": 0.02, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.5}
ROWS, WIDTH, MOST = 50, 32, 40
ONE = np.ones((1, WIDTH), BF16)


def lists(rng, updates=12, most=MOST):
    """Rows of some updates, many of them equal, and their gradients."""
    for _ in range(updates):
        rows = rng.zipf(1.3, rng.integers(0, most)).clip(1, ROWS) - 1
        yield rows, rng.standard_normal((len(rows), WIDTH), np.float32).astype(BF16)


def sent(rows, gradients):
    """What a device sends of them: different rows, and sums that are rounded to bf16."""
    distinct, which = np.unique(rows, return_inverse=True)
    sums = np.zeros((len(distinct), WIDTH), np.float32)
    np.add.at(sums, which, gradients.astype(np.float32))
    return distinct, sums.astype(BF16)


def all_of(table):
    return table.gather(np.arange(table.num_rows))


def by_numpy(updates):
    """The rule in float64, weights rounded to bf16; every mean square decays at every update."""
    table, square = np.zeros((ROWS, WIDTH), BF16), np.zeros(ROWS)
    for step, (rows, gradients) in enumerate(updates):
        sums = np.zeros((ROWS, WIDTH))
        np.add.at(sums, rows, gradients.astype(np.float64))
        named = np.unique(rows)
        square *= 0.9
        square[named] += 0.1 * (sums[named] ** 2).mean(1)
        scale = 0.02 * np.sqrt(1 - 0.9 ** (step + 1)) / (np.sqrt(square[named]) + 1e-8)
        old, change = table[named].astype(np.float64), scale[:, None] * sums[named]
        change += 0.5 * 0.02**2 * old * (change * old > 0)
        table[named] = (old - change).astype(np.float32).astype(BF16)
    return table


def on_device(updates):
    """The same by jspeed.optim.rows; and its mean squares."""
    optimizer = row_adam(
        lambda step: 0.02, lambda step: 0.9, eps=1e-8, weight_decay=lambda step: 0.5
    )
    table, state = updated_on_device(optimizer, updates)
    return table, np.asarray(state.square_V)


def updated_on_device(optimizer, updates):
    """Its lists are all of one length, for one program: a row past the table means nothing."""
    table = jnp.zeros((ROWS, WIDTH), jnp.bfloat16)
    state = optimizer.init(table)
    update = jax.jit(lambda found, *rest: optimizer.update([found], *rest, None))
    for rows, gradients in updates:
        padding = MOST - len(rows)
        rows = np.pad(rows, (0, padding), constant_values=ROWS).astype(np.int32)
        gradients = np.pad(gradients, ((0, padding), (0, 0)), constant_values=1)
        table, state = update(Pending(rows, gradients), table, state)
    return np.asarray(table), state


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_numpy_and_of_the_device(seed):
    updates = list(lists(np.random.default_rng(seed)))
    table = RowTable(ROWS, WIDTH, threads=2)
    for step, (rows, gradients) in enumerate(updates):
        table.update(step, rows, gradients, **RATES)
    found = all_of(table).astype(np.float32)
    sums = [sent(*update) for update in updates]
    device, square = on_device(sums)
    for other in (by_numpy(sums), device):
        # few roundings of bf16, of up to 2**-9 of a weight, go the other way
        np.testing.assert_allclose(found, other.astype(np.float32), rtol=0.02, atol=1e-4)
        assert (found == other.astype(np.float32)).mean() > 0.98
    part = table.read(0, ROWS)
    assert sorted(part.rows) == list(np.unique(np.concatenate([rows for rows, _ in updates])))
    decayed = part.squares * 0.9 ** (len(updates) - part.updates.astype(float))
    np.testing.assert_allclose(decayed, square[part.rows], rtol=1e-5)


def test_rates_change_from_update_to_update():
    """Betas, as where an update stands for one pair of steps or two."""
    betas, rates = np.array([0.95, 0.9, 0.5, 0.95], np.float32), [0.1, 0.2, 0.05, 0.1]
    optimizer = row_adam(
        lambda step: jnp.asarray(rates)[step],
        lambda step: jnp.asarray(betas)[step],
        eps=1e-8,
        weight_decay=lambda step: 2.0,
    )
    table, updates = RowTable(ROWS, WIDTH), list(lists(np.random.default_rng(5), 4))
    device, _ = updated_on_device(optimizer, [sent(*update) for update in updates])
    for step, (rows, gradients) in enumerate(updates):
        named = {"learning_rate": rates[step], "beta2": betas[step]}
        table.update(step, rows, gradients, **RATES | named | {"weight_decay": 2.0})
    assert (table.betas == betas).all()
    np.testing.assert_allclose(
        all_of(table).astype(np.float32), device.astype(np.float32), rtol=0.02, atol=1e-3
    )


def test_threads_parts_and_buffers_change_no_bit():
    results = []
    for threads in (1, 2, 3, 16):
        table = RowTable(ROWS, WIDTH, threads=threads)
        for step, (rows, gradients) in enumerate(lists(np.random.default_rng(1), most=3000)):
            if threads > 1:
                rows, gradients = sent(rows, gradients)
            given = gradients.astype(np.float32 if threads == 3 else BF16)
            parts = np.array_split(given, 3) if threads == 2 else given
            table.update(step, rows, parts, **RATES)
        results.append(all_of(table).tobytes())
    assert len(set(results)) == 1
    rows = np.array([3, 3, 49, 0], np.int32)
    expected = all_of(table)[rows]
    for start in range(9):  # of a buffer that begins anywhere
        out = np.empty(4 * WIDTH + 16, BF16)[start : start + 4 * WIDTH].reshape(4, WIDTH)
        assert table.gather(rows, out) is out and out.tobytes() == expected.tobytes()
    assert table.gather(rows).ctypes.data % 64 == 0
    assert table.gather(np.array([], np.uint32)).shape == (0, WIDTH)


def test_the_documented_use_runs(tmp_path):
    names = {"folder": tmp_path}
    assert doctest.testmod(host_table, extraglobs=names, raise_on_error=True).attempted > 10


def test_memory_follows_the_rows_in_use():
    code = """
    import numpy as np, ml_dtypes
    from jspeed.host_table import RowTable
    held = lambda: 4096 * int(open("/proc/self/statm").read().split()[1])
    before = held()
    table = RowTable(4_000_000, 768, capacity=1_000_000)
    assert held() - before < 20e6, held() - before
    rows = np.arange(0, 4_000_000, 400)
    gradients = np.ones((len(rows), 768), ml_dtypes.bfloat16)
    before = held()
    table.update(0, rows, gradients, learning_rate=0.1, beta2=0.9, eps=1e-8, weight_decay=0)
    assert table.nbytes == 16_000_000 + len(rows) * (2 * 768 + 12)
    assert held() - before < table.nbytes + 20e6, held() - before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def refused(words, call):
    with pytest.raises(BadInput) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_a_table_that_does_not_fit_is_refused():
    refused(["num_rows", "0"], lambda: RowTable(0, 4))
    refused(["width", "70000"], lambda: RowTable(4, 70_000))
    refused(["capacity", "from 1 to 4", "5"], lambda: RowTable(4, 4, capacity=5))
    refused(["threads", "0"], lambda: RowTable(4, 4, threads=0))
    words = ["needs 13108.8 GB", "this process may use", "lower capacity, to "]
    refused(words, lambda: RowTable(100_000_000, 65_536))


def test_lists_that_do_not_fit_change_nothing():
    table = RowTable(10, 4, capacity=3, threads=1)
    two = np.ones((2, 4), BF16)
    table.update(0, np.array([1, 9]), two, **RATES)
    before = all_of(table).tobytes()

    def update(rows, gradients=two, step=1, **rates):
        return lambda: table.update(step, np.array(rows), gradients, **RATES | rates)

    refused(["row 10 at place 1", "10 rows"], update([0, 10]))
    refused(["row -2 at place 0"], update([-2, 0]))
    refused(["row 1", "had update 0 already"], update([-1, 1], step=0))
    refused(["gradients", "[3, 4]", "[2, 4]"], update([0, 1, 2]))
    refused(["gradients", "[2, 4]", "[2, 5]"], update([0, 1], np.ones((2, 5), BF16)))
    refused(["gradients", "bfloat16 or float32", "float64"], update([0, 1], np.ones((2, 4))))
    refused(["gradients", "contiguous"], update([0, 1], np.ones((4, 4), BF16)[::2]))
    one = np.ones((1, 4), BF16)
    refused(["gradients", "3 rows of 4", "8 numbers"], update([0, 1, 2], [one, one]))
    refused(["gradients", "of bfloat16", "float32"], update([0, 1], [one, one.astype(np.float32)]))
    refused(["gradients", "int"], update([0, 1], [one, 1]))
    refused(["rows", "float64"], update([0.0, 1.0]))
    refused(["2 of 3 are in use", "capacity"], update([0, 2]))
    refused(["update 3", "has had 1"], update([0, 1], step=3))
    refused(["beta2", "1"], update([0, 1], beta2=1.0))
    refused(["eps", "above 0"], update([0, 1], eps=0.0))
    refused(["learning_rate", "inf"], update([0, 1], learning_rate=np.inf))
    refused(["row 12"], lambda: table.gather(np.array([12])))
    refused(["row -1 at place 1", "no out"], lambda: table.gather(np.array([1, -1])))
    refused(["out", "[1, 4]"], lambda: table.gather(np.array([1]), np.empty((2, 4), BF16)))
    read_only = np.empty((1, 4), BF16)
    read_only.setflags(write=False)
    refused(["out", "writable"], lambda: table.gather(np.array([1]), read_only))
    assert (all_of(table).tobytes(), table.used, table.updates) == (before, 2, 1)


def test_a_gradient_that_is_not_a_number_is_named():
    table = RowTable(10, 4, threads=2)
    gradients = np.ones((3, 4), BF16)
    gradients[1, 2] = np.nan
    refused(
        ["place 1", "row 8", "not finite"],
        lambda: table.update(0, np.array([5, 8, 6]), gradients, **RATES),
    )
    assert np.isfinite(all_of(table).astype(np.float32)).all()


def test_parts_that_do_not_fit_are_refused():
    table = RowTable(10, 4)
    table.update(0, np.array([1, 9]), np.ones((2, 4), BF16), **RATES)
    part = table.read(0, 9)
    given = {name: getattr(part, name) for name in ("rows", "weights", "squares", "updates")}
    copy = RowTable(10, 4)
    refused(["update 1", "has had 0"], lambda: copy.append(**given))
    copy.resume(table.betas)
    refused(["only a new table"], lambda: copy.resume(table.betas))
    refused(["2 rows came with 1"], lambda: copy.append(**given | {"squares": part.squares[:1]}))
    refused(["twice"], lambda: copy.append(**given | {"rows": np.array([1, 1])}))
    refused(["row 10"], lambda: copy.append(**given | {"rows": np.array([1, 10])}))
    assert copy.used == 0
    copy.append(**given)
    refused(["twice"], lambda: copy.append(**given))
    assert all_of(copy).tobytes() == all_of(table).tobytes()


def test_others_read_while_one_updates():
    """Each gather sees whole updates: weights are equal, as all gradients are."""
    table, rows = RowTable(5000, 64, threads=2), np.arange(5000)
    gradients, wrong, done = np.ones((5000, 64), np.float32), [], threading.Event()

    def look():
        while not done.is_set():
            found = table.gather(rows).astype(np.float32)
            wrong.extend([found] if found.min() != found.max() else [])

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(30):
        table.update(step, rows, gradients, **RATES)
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong and table.updates == 30


FORKS = """
    import os, threading
    import numpy as np
    from jspeed.data import LoaderForkedError
    from jspeed.host_table import RowTable
    rates = dict(learning_rate=0.1, beta2=0.9, eps=1e-8, weight_decay=0)
    table, rows = RowTable(20_000, 64, threads=2), np.arange(20_000)
    gradients = np.ones((20_000, 64), np.float32)
    work = lambda: [table.update(step, rows, gradients, **rates) for step in range(200)]
    updates = threading.Thread(target=work)
    updates.start()
    for _ in range(20):
        child = os.fork()
        if not child:
            for call in ("table.gather(rows)", "table.update(0, rows, gradients, **rates)",
                         "table.used", "table.read(0, 1)", "table.resume([])"):
                try:
                    eval(call)
                except LoaderForkedError as error:
                    assert "this table was made in process" in str(error)
                else:
                    os._exit(1)
            name = repr(table)
            del table
            os._exit(name != "RowTable(made before a fork)")
        assert os.waitpid(child, 0)[1] == 0
    updates.join()
"""


def test_a_fork_during_an_update_does_not_hang():
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKS)], check=True, timeout=60
    )
