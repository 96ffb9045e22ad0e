"""A model whose table is in the host's memory is trained as one whose table is on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.host_table import RowTable, load, save
from jspeed.optim.rows import row_adam
from jspeed.parallel.sparse_rows import Pending
from jspeed.speedrun.ngrams import bigram_rows

ROWS, WIDTH, VOCAB, STEPS = 4096, 32, 64, 60
EPS, DECAY = 1e-8, 5.0


def rate(step):
    return 0.05 * (1 - step / STEPS)


def beta(step):
    return 0.95 if step % 3 else 0.9


def batches():
    """Text that has something to learn: each token mostly follows from the two before."""
    rng = np.random.default_rng(0)
    after = rng.integers(0, VOCAB, (VOCAB, VOCAB))
    for _ in range(STEPS):
        tokens = [rng.integers(0, VOCAB, (4, 1)), rng.integers(0, VOCAB, (4, 1))]
        for _ in range(63):
            told = after[tokens[-2], tokens[-1]]
            tokens.append(np.where(rng.random((4, 1)) < 0.1, rng.integers(0, VOCAB), told))
        yield np.concatenate(tokens, 1).astype(np.int32)


HEAD = np.random.default_rng(1).standard_normal((WIDTH, VOCAB)).astype(np.float32)


def loss(found_BTD, tokens_BT):
    logits = found_BTD.astype(jnp.float32) @ HEAD
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens_BT[:, 1:, None], 2)
    return -jnp.mean(picked)


def rows_of(tokens):
    return np.asarray(bigram_rows(jnp.asarray(tokens), ROWS))[:, :-1]


graded = jax.jit(jax.value_and_grad(loss))


def on_device():
    """Losses and the table after the last step."""
    optimizer = row_adam(rate, beta_traced, eps=EPS, weight_decay=lambda step: DECAY)
    table = jnp.zeros((ROWS, WIDTH), jnp.bfloat16)
    state, losses = optimizer.init(table), []
    update = jax.jit(lambda *found: optimizer.update([Pending(*found[:2])], *found[2:], None))
    for tokens in batches():
        rows = rows_of(tokens)
        value, grads = graded(table[rows], tokens)
        losses.append(float(value))
        rows = jnp.asarray(rows.reshape(-1), jnp.int32)
        table, state = update(rows, grads.reshape(-1, WIDTH), table, state)
    return losses, np.asarray(table, np.float32)


def beta_traced(step):
    return jnp.where(step % 3 > 0, 0.95, 0.9)


def on_host(folder, stop):
    """The same; after ``stop`` steps the table is saved, and another one is loaded."""
    table, losses = RowTable(ROWS, WIDTH, threads=2), []
    for step, tokens in enumerate(batches()):
        if step == stop:
            save(table, folder / "table")
            table = load(folder / "table")
        rows = rows_of(tokens)
        unique, which = np.unique(rows, return_inverse=True)
        found = table.gather(unique)[which.reshape(rows.shape)]
        value, grads = graded(jnp.asarray(found), tokens)
        losses.append(float(value))
        rates = {"learning_rate": rate(step), "beta2": beta(step), "eps": EPS}
        grads = np.asarray(grads).reshape(-1, WIDTH)
        table.update(step, rows.reshape(-1), grads, weight_decay=DECAY, **rates)
    return losses, table.gather(np.arange(ROWS)).astype(np.float32)


@pytest.mark.parametrize("stop", [None, 25])
def test_losses_are_those_of_the_table_on_the_device(stop, tmp_path):
    expected, device = on_device()
    losses, host = on_host(tmp_path, stop)
    assert expected[-1] < 0.7 * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=2e-4)
    assert (host.any(1) == device.any(1)).all() and (host == device).mean() > 0.97
