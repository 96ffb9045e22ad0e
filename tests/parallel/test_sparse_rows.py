"""Sparse tables against a dense table in NumPy: which rows change, by how much, and in
place."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspeed.kernels import row_sums
from jspeed.model.custom_kernels import Kernel
from jspeed.optim.rows import RowState, row_adam
from jspeed.parallel.mesh import make_mesh
from jspeed.parallel.sparse_rows import (
    HIGH,
    Pending,
    Sink,
    SparseTable,
    distinct,
    empty,
    pending,
    read,
    sink_size,
)

ROWS, WIDTH, IDS = 128, 3, 24
BETAS = (0.9, 0.9, 0.81, 0.81, 0.81)


def dense(table, steps):
    """Record 92's rule on the whole table: events of one or several steps' (ids, gradients)."""
    p, v = table.astype(np.float64), np.zeros((len(table), 1))
    for n, (event, beta) in enumerate(zip(steps, BETAS, strict=True)):
        g = np.zeros_like(p)
        for ids, grads in event:
            np.add.at(g, ids, grads)
        v = beta * v + (1 - beta) * np.mean(g**2, axis=1, keepdims=True)
        u = 0.1 * np.sqrt(1 - beta ** (n + 1)) * g / (np.sqrt(v) + 1e-10)
        u += np.where(u * p > 0, 0.1**2 * 0.5 * p, 0)
        p = p - u
    return p


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_updates_are_those_of_a_dense_table(devices):
    """Rows named on several devices and in several steps; rows that nobody names stay as they are,
    bit for bit."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    shared = rng.integers(0, ROWS // 2, size=(5, 2, devices, IDS))  # the upper half is never named
    shared[:, :, :, :4] = 7
    grads = rng.normal(size=(*shared.shape, WIDTH)).astype(np.float32)
    betas = jnp.asarray(BETAS)
    adam = row_adam(lambda n: 0.1, lambda n: betas[n], eps=1e-10, weight_decay=lambda n: 0.5)
    mesh = make_mesh({"data": devices}, devices=jax.devices()[:devices])
    axis, part = ("data" if devices > 1 else None), ROWS // devices
    waiting = sink_size(IDS, part, devices)

    def event(table_VD, square_V, step, ids_SBT, grads_SBTD):
        found = []
        for ids, grad in zip(ids_SBT, grads_SBTD, strict=True):

            def total(sink, ids=ids, grad=grad):
                return jnp.sum(read(SparseTable(table_VD, sink), ids, axis) * grad)

            found.append(pending(jax.grad(total)(empty(table_VD, IDS, devices)), part, waiting))
        table_VD, state = adam.update(found, table_VD, RowState(step, square_V))
        return table_VD, state.square_V

    rows, lanes = PartitionSpec("data"), PartitionSpec(None, "data")
    run = jax.jit(
        jax.shard_map(
            event,
            mesh=mesh,
            in_specs=(rows, rows, PartitionSpec(), lanes, lanes),
            out_specs=(rows, rows),
            check_vma=False,
        )
    )
    found, square = jnp.asarray(table), adam.init(jnp.asarray(table)).square_V
    for n in range(5):
        found, square = run(found, square, jnp.int32(n), shared[n].astype(np.int32), grads[n])
    events = [
        [(shared[n, s].ravel(), grads[n, s].reshape(-1, WIDTH)) for s in range(2)] for n in range(5)
    ]
    expected = dense(table, events)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(found)[ROWS // 2 :], table[ROWS // 2 :])


def test_gradients_by_the_kernel_are_those_of_the_plain_path():
    kernel = Kernel(partial(row_sums.sum_rows, interpret=True))
    draw, part = np.random.default_rng(0), jnp.zeros((ROWS, 16), jnp.bfloat16)
    ids, grad = (
        jnp.asarray(draw.integers(0, ROWS, (1, IDS))),
        jnp.asarray(draw.normal(size=(1, IDS, 16)), part.dtype),
    )

    @partial(jax.jit, static_argnums=0)
    def gradient(kernel, ids, grad):
        call = lambda sink: read(SparseTable(part, sink), ids, None, kernel)
        return jax.vjp(call, empty(part, IDS, 1))[1](grad)[0]

    own, plain = (gradient(on, ids, grad) for on in (kernel, None))
    np.testing.assert_array_equal(own.rows_R2, plain.rows_R2)
    np.testing.assert_allclose(
        *(np.asarray(sink.grads_RD, np.float32) for sink in (own, plain)), rtol=2**-7
    )


@pytest.mark.parametrize("weight_decay", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_an_update_by_the_kernel_is_that_of_the_plain_path(weight_decay):
    """Rows that are named often, unused places, which most of a list may be, two lists, and several
    updates."""
    kernel = Kernel(partial(row_sums.row_adam, interpret=True))
    draw, width = np.random.default_rng(0), 16
    adam = row_adam(
        lambda n: 0.1,
        lambda n: jnp.asarray(BETAS)[n],
        eps=1e-10,
        weight_decay=lambda n: weight_decay,
    )
    table = jnp.asarray(draw.normal(size=(ROWS, width)), jnp.bfloat16)
    own, plain = ((table, adam.init(table)) for _ in range(2))
    update = jax.jit(adam.update, static_argnums=3)
    for _ in range(3):
        rows = draw.integers(0, ROWS, 200)
        rows[draw.permutation(200)[:150]] = ROWS
        rows[:20] = 7
        grads = jnp.asarray(draw.normal(size=(200, width)), jnp.bfloat16)
        found = [
            Pending(jnp.asarray(rows[part], jnp.int32), grads[part])
            for part in (slice(120), slice(120, None))
        ]
        own, plain = update(found, *own, kernel), update(found, *plain, None)
        np.testing.assert_allclose(
            *(np.asarray(each[0], np.float32) for each in (own, plain)), rtol=2**-7, atol=1e-3
        )
        np.testing.assert_allclose(own[1].square_V, plain[1].square_V, rtol=1e-5)
        own = plain  # so that roundings do not add up


def test_a_list_that_is_too_long_is_summed_or_nan():
    rows = np.array([5, 3, 5, 9, 3, 5], np.int32)
    sink = Sink(
        np.stack([rows // HIGH, rows % HIGH], axis=-1).astype(np.float32), np.ones((6, 2), "f4")
    )
    of_sink = jax.jit(pending, static_argnums=(1, 2))
    found = of_sink(sink, 8, 3)
    np.testing.assert_array_equal(found.rows_R, [3, 5, 8])  # 9 is no row of a part of 8
    np.testing.assert_array_equal(found.grads_RD[:2], [[2, 2], [3, 3]])
    assert np.isnan(of_sink(sink, 10, 2).grads_RD).all()


def test_large_row_numbers_arrive_exactly():
    ids = jnp.array([[0, 84_602_879, 2**24 + 1, 2**31 - 2]], jnp.int32)
    high, low = (np.float32(x) for x in divmod(np.asarray(ids[0], np.int64), HIGH))
    np.testing.assert_array_equal((HIGH * high.astype(np.int64) + low.astype(np.int64)), ids[0])


def test_distinct_rows_ascend_and_all_past_the_part_differ():
    found = jax.jit(distinct, static_argnums=1)(
        Pending(np.int32([4, 9, 4, 0, 9]), np.arange(10, dtype=np.float32).reshape(5, 2)), 8
    )
    found = jax.tree.map(np.asarray, found)
    np.testing.assert_array_equal(found.rows_R[:2], [0, 4])
    assert len(set(found.rows_R.tolist())) == 5 and min(found.rows_R[2:].tolist()) >= 8
    np.testing.assert_array_equal(found.grads_RD[:2], [[6, 7], [4, 6]])


def test_no_copy_of_the_table_is_made():
    """The program of 8 devices needs less than a part besides arguments, and copies none."""
    mesh = make_mesh({"data": 8}, devices=jax.devices()[:8])
    rows = 2**16
    width = 16
    ids = 64
    adam = row_adam(lambda n: 0.1, lambda n: 0.9, eps=1e-10, weight_decay=lambda n: 0.5)
    part = rows // 8

    def step(table_VD, state, ids_BT, grad_BTD):
        def total(sink):
            return jnp.sum(
                (read(SparseTable(table_VD, sink), ids_BT, "data") * grad_BTD).astype(jnp.float32)
            )

        found = pending(jax.grad(total)(empty(table_VD, ids, 8)), part, sink_size(ids, part, 8))
        return adam.update([found], table_VD, state)

    cut, whole = PartitionSpec("data"), PartitionSpec()
    specs = cut, RowState(whole, cut), cut, cut
    run = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False)
    shapes = (jnp.bfloat16, (rows, width)), RowState((jnp.int32, ()), (jnp.float32, (rows,)))
    arrays = [*shapes, (jnp.int32, (8, ids)), (jnp.bfloat16, (8, ids, width))]

    def shaped(spec, one):
        return jax.ShapeDtypeStruct(one[1], one[0], sharding=NamedSharding(mesh, spec))

    leaf = lambda x: isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], tuple)
    structs = [
        jax.tree.map(shaped, spec, array, is_leaf=lambda x: leaf(x) or isinstance(x, PartitionSpec))
        for spec, array in zip(specs, arrays, strict=True)
    ]
    compiled = jax.jit(run, donate_argnums=(0, 1)).lower(*structs).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * part * width
    text = compiled.as_text()
    assert f"copy(bf16[{part},{width}]" not in text.replace(" ", "")
    assert not [
        line for line in text.splitlines() if " copy(" in line and f"bf16[{part},{width}]" in line
    ]
