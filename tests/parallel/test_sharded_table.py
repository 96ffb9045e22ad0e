"""Sharded table lookup and its gradient against plain indexing in NumPy, and by custom kernels
against plain JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jspeed.kernels import row_sums
from jspeed.model.custom_kernels import Kernel
from jspeed.parallel.mesh import make_mesh
from jspeed.parallel.sharded_table import fetch, look_up

ROWS, WIDTH = 64, 3
KERNEL = Kernel(partial(row_sums.sum_rows, interpret=True))


def case(devices, tokens=24):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    ids = rng.integers(0, ROWS, size=(devices, tokens)).astype(np.int32)
    return table, ids, rng.normal(size=(devices, tokens, WIDTH)).astype(np.float32)


def program(devices, kernel=None):
    if devices == 1:
        return lambda table, ids: fetch(table, ids, None, kernel)
    cut = PartitionSpec("data")
    mesh = make_mesh({"data": devices}, devices=jax.devices()[:devices])
    return jax.shard_map(
        lambda table, ids: fetch(table, ids, "data", kernel),
        mesh=mesh,
        in_specs=(cut, cut),
        out_specs=cut,
        check_vma=False,
    )


@partial(jax.jit, static_argnums=0)
def with_gradient(run, table, ids, grad):
    out, pull = jax.vjp(run, table, ids)
    return out, pull(grad)[0]


@pytest.mark.parametrize(
    "devices", [8, *(pytest.param(devices, marks=pytest.mark.slow) for devices in (1, 2))]
)
def test_rows_and_gradients_are_those_of_the_whole_table(devices):
    table, ids, grad = case(devices)
    # a row that half of the tokens want travels once, or one owner would be asked too much
    ids[:, 5:15] = 7
    found, gradient = with_gradient(program(devices), table, ids, grad)
    np.testing.assert_array_equal(found, table[ids])
    expected = np.zeros_like(table)
    np.add.at(expected, ids, grad)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_more_rows_of_one_owner_than_there_is_room_for_are_nan():
    table = np.random.default_rng(0).normal(size=(4096, WIDTH)).astype(np.float32)
    ids = np.random.default_rng(1).integers(0, 4096, size=(8, 512)).astype(np.int32)
    ids[3, :129] = np.arange(129)  # of owner 0; there is room for 512 / 8 + 8 sqrt(512 / 8) = 128
    found = np.asarray(jax.jit(program(8))(jnp.asarray(table), jnp.asarray(ids)))
    assert np.all(np.isnan(found[3]))
    np.testing.assert_array_equal(np.delete(found, 3, 0), table[np.delete(ids, 3, 0)])


def test_gradients_of_a_bf16_part_are_summed_in_fp32():
    ids = jnp.ones((8, 1000), jnp.int32)
    run = program(8)
    grad = jax.jit(jax.grad(lambda t: jnp.sum(run(t, ids).astype(jnp.float32))))(
        jnp.zeros((ROWS, WIDTH), jnp.bfloat16)
    )
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(grad[1].astype(jnp.float32), 8000, rtol=2**-8)


@pytest.mark.parametrize(
    ("devices", "tokens"),
    [
        (8, 512),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 24), (1, 512), (8, 24))),
    ],
)
def test_gradients_by_the_kernel_are_those_of_the_plain_path(devices, tokens):
    """Of rows that many tokens want, that one wants, and of slots that are unused."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4096, size=(devices, tokens)).astype(np.int32)
    ids[:, 5 : tokens // 2] = 7
    table = jnp.asarray(rng.normal(size=(4096, 32)), jnp.bfloat16)
    grad = jnp.asarray(rng.normal(size=(devices, tokens, 32)), jnp.bfloat16)
    (rows, found), (same_rows, expected) = (
        with_gradient(program(devices, own), table, ids, grad) for own in (KERNEL, None)
    )
    np.testing.assert_array_equal(rows, same_rows)
    assert found.dtype == expected.dtype == jnp.bfloat16
    found, expected = (np.asarray(each, np.float32) for each in (found, expected))
    # Each device's sum is rounded, and then the sum of all: to neighbours at most, where fp32 sums
    # in another order.
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-2)
    assert (found != expected).mean() < 1e-3


def test_rows_without_room_have_no_gradient_by_the_kernel():
    """All of that device's is not a number; the others' arrives."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 4096, size=(8, 512)).astype(np.int32)
    ids[3, :129] = np.arange(129)
    grad = np.ones((8, 512, 32), jnp.bfloat16)
    grad[3] = np.nan
    table = np.zeros((4096, 32), jnp.bfloat16)
    found, expected = (
        np.asarray(with_gradient(program(8, own), table, ids, grad)[1], np.float32)
        for own in (KERNEL, None)
    )
    assert np.isnan(expected).any() and np.isfinite(expected).any()
    np.testing.assert_array_equal(found, expected)


def test_slots_name_their_ids():
    ids = jnp.array([[3, 9, 3, 0, 9, 9]])
    slots = jax.jit(lambda ids: look_up(jnp.zeros((16, 1)), ids, None)[1])(ids)
    pieces = np.split(np.asarray(slots.order_N), slots.starts_S1[1:-1])
    assert [sorted(piece.tolist()) for piece in pieces] == [[3], [0, 2], [1, 4, 5], [], [], []]
    np.testing.assert_array_equal(slots.slot_N, [1, 2, 1, 0, 2, 2])
