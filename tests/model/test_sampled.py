"""Sampled softmax against the full one: unbiased over 10,000 draws, equal where the sample is
everything."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.model import fp8
from jspeed.model import sampled as module
from jspeed.model.losses import (
    Head,
    asymmetric_cap,
    cross_entropy,
    multi_token_targets,
    root_cap,
    sigmoid_cap,
    with_prefix,
)
from jspeed.model.sampled import Sample, columns, count, sampled_cross_entropy

from ..refusals import refused

VOCAB, EXACT, ONE_IN = 43, 7, 5  # the last stratum has one token
CAPS = dict(
    sigmoid=sigmoid_cap(4.0), root=root_cap(4.0), asymmetric=asymmetric_cap(23, 5, 7.5), none=None
)
OTHERS = [cap for cap in CAPS if cap != "asymmetric"]
# (value, slope) in float64
BENDS = dict(
    sigmoid=lambda z: (4 + 4 * np.tanh(z / 4), 1 - np.tanh(z / 4) ** 2),
    root=lambda z: (4 * z / np.hypot(z, 4), (4 / np.hypot(z, 4)) ** 3),
    asymmetric=lambda z: (23 / (1 + np.exp(-(z + 5) / 7.5)), 23 / 30 / np.cosh((z + 5) / 15) ** 2),
    none=lambda z: (z, np.ones_like(z)),
)
ORDER = np.random.default_rng(5).permutation(VOCAB).astype(np.int32)
# half have none
PREFIXES = np.random.default_rng(7).integers(-VOCAB, VOCAB, size=VOCAB).clip(-1).astype(np.int32)
SCALES = fp8.Scales(8 / 448, 8 / 448, 0.75 / 448)
DRAWS = 10_000
head = functools.partial(fp8.head, scales=None)
draw = jax.jit(module.draw, static_argnums=(1, 2, 3, 5), static_argnames="groups")


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    table, x = 1.2 * rng.normal(size=(VOCAB, 6)), rng.normal(size=(3, 10, 6))
    targets = rng.integers(0, VOCAB, size=(3, 10)).astype(np.int32)
    weights = rng.uniform(size=(3, 10)) * (rng.uniform(size=(3, 10)) > 0.3)
    table, x, weights = (a.astype(np.float32) for a in (table, x, weights))
    return table, x, targets, weights


def several(targets, weights):
    """Three targets a token: itself, another one with half the weight, and one of them again with a
    tenth."""
    other = (targets * 7 + 3) % VOCAB
    again = jnp.where(targets % 2 == 0, targets, other)
    return jnp.stack([targets, other, again]), jnp.stack([weights, weights / 2, weights / 10])


def ahead(targets, weights):
    """The next three tokens and the longest prefix of the first, as records 53 and 88 have it: some
    weigh nothing."""
    three = multi_token_targets(targets, weights, jnp.array([1.0, 0.5, 0.25]))
    return with_prefix(*three, jnp.asarray(PREFIXES), 0.25)


TARGETS = dict(
    one=lambda *both: tuple(a[None] for a in both), several=jax.jit(several), ahead=jax.jit(ahead)
)


def both(function):
    """A loss with its losses, and the gradients with respect to table and hidden states."""
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))


def counted(sample, vocabulary):
    """How often each token counts, [groups, vocabulary]."""
    counts = np.zeros((len(sample.ids_GC), vocabulary))
    drawn = np.asarray(sample.counts_C, np.float64)[None]
    np.put_along_axis(counts, np.asarray(sample.ids_GC), drawn, axis=1)
    counts[:, np.asarray(sample.all_E)] = 1
    return counts


def oracle(table, x, targets, weights, sample, cap):
    """Sum, loss of first targets and gradients in float64: every token in turn, its softmax term by
    term."""
    table, x, weights = (np.asarray(a, np.float64) for a in (table, x, weights))
    targets = np.asarray(targets)
    groups = counted(sample, len(table))
    total = 0.0
    losses = np.zeros(x.shape[:2])
    dtable = np.zeros_like(table)
    dx = np.zeros_like(x)
    for row, t in np.ndindex(*x.shape[:2]):
        own = targets[:, row, t].tolist()
        counts = groups[t * len(groups) // x.shape[1]].copy()
        counts[own] = 1
        z, slope = BENDS[cap](table @ x[row, t])
        terms = counts * np.exp(z)
        p = terms / terms.sum()
        dlogits = np.zeros(len(table))
        for n, target in enumerate(own):
            total += weights[n, row, t] * (np.log(terms.sum()) - z[target])
            dlogits += weights[n, row, t] * (p - (np.arange(len(table)) == target))
        losses[row, t] = np.log(terms.sum()) - z[own[0]]
        dtable += np.outer(dlogits * slope, x[row, t])
        dx[row, t] = (dlogits * slope) @ table
    return total, losses, dtable, dx


@pytest.mark.parametrize("order", [None, ORDER])
def test_a_sample_is_frequent_tokens_and_one_of_every_stratum(order):
    given = None if order is None else jnp.asarray(order)
    one = lambda step: draw(step, VOCAB, EXACT, ONE_IN, given)
    samples = jax.jit(jax.vmap(one))(jnp.arange(DRAWS))
    ids, counts = np.asarray(samples.ids_GC)[:, 0], np.asarray(samples.counts_C)
    ranked = np.arange(VOCAB) if order is None else order
    assert ids.dtype == np.int32 and ids.shape[1] == columns(VOCAB, EXACT, ONE_IN) == EXACT + 8
    assert np.all(ids[:, :EXACT] == ranked[:EXACT])
    assert np.all(counts == [1] * EXACT + [5] * 7 + [1])
    seen = np.bincount(ids.ravel(), minlength=VOCAB)[ranked] / DRAWS
    expected = np.array([1] * EXACT + [1 / 5] * 35 + [1])
    near = 4 * np.sqrt(expected * (1 - expected) / DRAWS) + 1e-12
    np.testing.assert_array_less(np.abs(seen - expected), near)
    assert all(
        len(set(ranked[start : start + 5]) & set(sample)) == 1
        for start in range(7, 42, 5)
        for sample in ids[:50]
    )
    # Strata are drawn one by one: two of them agree in place as often as chance has it.
    places = np.argsort(ranked)[ids[:, EXACT:-1]] % 5
    assert np.mean(places[:, 0] == places[:, 1]) == pytest.approx(0.2, abs=4 * 0.4 / DRAWS**0.5)
    np.testing.assert_array_equal(one(jnp.int32(17)).ids_GC[0], ids[17])


def test_groups_share_the_vocabulary():
    """With as many groups as there are tokens in a stratum, each token of full strata is in one of
    them."""
    for step in range(5):
        sample = draw(step, VOCAB, EXACT, ONE_IN, jnp.asarray(ORDER), groups=ONE_IN)
        np.testing.assert_array_equal(sample.all_E, ORDER[:EXACT])
        np.testing.assert_array_equal(sample.counts_C, [5] * 7 + [1])
        assert sorted(sample.ids_GC[:, :-1].ravel().tolist()) == sorted(ORDER[EXACT:-1].tolist())
        assert np.all(sample.ids_GC[:, -1] == ORDER[-1])
        one = draw(step, VOCAB, EXACT, ONE_IN, jnp.asarray(ORDER))  # the first group's
        np.testing.assert_array_equal(one.ids_GC[0, EXACT:], sample.ids_GC[0])
        np.testing.assert_array_equal(counted(one, VOCAB)[0], counted(sample, VOCAB)[0])


def test_sizes_of_samples():
    assert columns(50_304, 8192, 14) == 8192 + 3008
    assert columns(100, 200, 3) == columns(100, 0, 1) == columns(100, 100, 7) == 100
    for exact, one_in in ((200, 3), (0, 1), (40, 1)):
        sample = draw(3, 100, exact, one_in)
        assert sorted(sample.ids_GC[0].tolist()) == list(range(100))
        assert np.all(sample.counts_C == 1)
    for exact, one_in in ((-1, 3), (5, 0)):
        refused(f"{exact} exact ids and 1 in {one_in}", draw, 0, 100, exact, one_in)


@pytest.mark.parametrize(
    ("cap", "chunk", "of", "groups"),
    [
        ("asymmetric", 4, "ahead", 1),
        pytest.param("none", 3, "several", 2, marks=pytest.mark.slow),
        *(pytest.param(cap, 4, "several", 1, marks=pytest.mark.slow) for cap in OTHERS),
        pytest.param("asymmetric", None, "ahead", 5, marks=pytest.mark.slow),
    ],
)
def test_value_and_gradients(case, cap, chunk, of, groups):
    table, x, targets, weights = case
    targets, weights = TARGETS[of](targets, weights)
    sample = draw(1, VOCAB, EXACT, ONE_IN, jnp.asarray(ORDER), groups)
    scored = counted(sample, VOCAB)[0].nonzero()[0]
    assert np.isin(targets, scored).any() and not np.isin(targets, scored).all()

    def ours(table, x):
        how = dict(cap=CAPS[cap], chunk=chunk)
        return sampled_cross_entropy(head, table, x, targets, weights, sample, **how)

    (total, loss), (dtable, dx) = both(ours)(table, x)
    total_, loss_, dtable_, dx_ = oracle(table, x, targets, weights, sample, cap)
    assert float(total) == pytest.approx(total_, rel=1e-5)
    np.testing.assert_allclose(loss, loss_, atol=1e-5)
    np.testing.assert_allclose(dtable, dtable_, atol=1e-5)
    np.testing.assert_allclose(dx, dx_, atol=1e-5)
    np.testing.assert_allclose(jax.jit(ours)(table, x)[1], loss, atol=1e-5)
    untouched = np.setdiff1d((counted(sample, VOCAB).sum(0) == 0).nonzero()[0], targets.ravel())
    assert groups == 5 or of == "ahead" or len(untouched) > 0
    np.testing.assert_array_equal(dtable[untouched], 0)


@pytest.mark.parametrize(
    ("cap", "of", "groups"),
    [
        ("asymmetric", "ahead", 4),
        *(pytest.param("asymmetric", of, 1, marks=pytest.mark.slow) for of in ("ahead", "one")),
        *(pytest.param(cap, "several", 1, marks=pytest.mark.slow) for cap in OTHERS),
    ],
)
def test_partition_sum_and_its_gradient_are_unbiased(case, cap, of, groups):
    """10,000 draws against float64: of a target that is always in, of others and of one in the
    last, short stratum."""
    table, x, targets, weights = case
    x, targets = x[:1, :4], np.int32([[2, 20, 33, 42]])
    targets = TARGETS[of](targets, targets)[0]
    ones = np.zeros(targets.shape, np.float32)
    ones[0] = 1

    @jax.jit
    @jax.vmap
    def estimates(step):
        """The loss of each token's first target, and its gradients: with respect to x, and for
        token 1 to the table."""
        sample = draw(step, VOCAB, EXACT, ONE_IN, groups=groups)

        def total(table, x, ones):
            how = dict(cap=CAPS[cap], chunk=2)
            return sampled_cross_entropy(head, table, x, targets, ones, sample, **how)

        dx, loss = jax.grad(total, argnums=1, has_aux=True)(table, x, ones)
        second = ones * jnp.array([0, 1, 0, 0])[None, None]
        return loss[0], dx[0], jax.grad(total, has_aux=True)(table, x, second)[0]

    loss, dx, dtable = (np.asarray(a, np.float64) for a in estimates(jnp.arange(DRAWS)))
    table64, x64 = np.asarray(table, np.float64), np.asarray(x, np.float64)[0]
    first = np.asarray(targets)[0, 0]
    z, slope = BENDS[cap](x64 @ table64.T)
    own, own_slope = (np.take_along_axis(a, first[:, None], -1)[:, 0] for a in (z, slope))
    terms = np.exp(z) * slope
    # The partition sum is exp(loss + z), and its gradient that times the gradient of loss + z.
    sums = np.exp(loss + own)
    dsums = sums[..., None] * (dx + own_slope[:, None] * table64[first])
    dtable[:, first[1]] += own_slope[1] * x64[1]
    for found, expected in (
        (sums, np.exp(z).sum(-1)),
        (dsums, terms @ table64),
        (sums[:, 1, None, None] * dtable, terms[1, :, None] * x64[1]),
    ):
        error = 4 * found.std(0) / DRAWS**0.5 + 2e-6 * np.abs(expected).max()
        np.testing.assert_array_less(np.abs(found.mean(0) - expected), error)
    assert np.all(sums.std(0) > 0.01 * sums.mean(0))
    # The loss is the logarithm, too small by half the relative variance; its gradient is off by as
    # much.
    relative = sums.var(0) / sums.mean(0) ** 2
    bias = np.log(np.exp(z).sum(-1)) - own - loss.mean(0)
    assert np.all(bias > 0) and np.all(bias < relative)


def test_partition_sum_of_fp8_logits_is_unbiased(case):
    """exp(loss) is the partition sum over the target's own term; the full softmax goes through the
    same FP8 head."""
    table, x, targets, weights = case
    own, x, cap = functools.partial(fp8.head, scales=SCALES), x[:1, :4], CAPS["asymmetric"]
    targets, weights = TARGETS["ahead"](targets[:1, :4], weights[:1, :4])

    def loss(step):
        sample = draw(step, VOCAB, EXACT, ONE_IN)
        return sampled_cross_entropy(own, table, x, targets, weights, sample, cap=cap)[1]

    found = np.exp(np.asarray(jax.jit(jax.vmap(loss))(jnp.arange(DRAWS)), np.float64))
    full = jax.jit(functools.partial(cross_entropy, own, cap=cap))(table, x, targets, weights)[1]
    expected = np.exp(np.asarray(full, np.float64))
    assert np.all(found.std(0) > 0.001 * expected)
    near = 4 * found.std(0) / DRAWS**0.5 + 2e-6 * expected
    np.testing.assert_array_less(np.abs(found.mean(0) - expected), near)


def test_accidental_hits_are_taken_out(case):
    """A sample that holds the target at 5 is one that does not; only the others' counts matter."""
    table, x, _, weights = case
    targets = np.full((3, 10), 20)
    with_it = Sample(jnp.array([[0, 1, 20, 30]]), jnp.array([1.0, 1.0, 5.0, 5.0]), jnp.arange(0))
    without = Sample(jnp.array([[0, 1, 30]]), jnp.array([1.0, 1.0, 5.0]), jnp.arange(0))

    def ours(table, x, sample):
        return sampled_cross_entropy(head, table, x, targets, weights, sample, cap=None)[0]

    found, expected = (
        jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(table, x, s) for s in (with_it, without)
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found, expected)


@pytest.mark.parametrize(
    ("exact", "one_in", "groups", "scales", "of"),
    [
        (EXACT, 1, 2, None, "several"),
        pytest.param(EXACT, 1, 2, SCALES, "ahead", marks=pytest.mark.slow),
        pytest.param(VOCAB, 5, 1, None, "one", marks=pytest.mark.slow),
        pytest.param(EXACT, 1, 1, SCALES, "one", marks=pytest.mark.slow),
    ],
)
def test_a_sample_of_everything_is_the_full_softmax(case, exact, one_in, groups, scales, of):
    """With FP8 too: a target's own row is divided, rounded and multiplied as a column is."""
    table, x, targets, weights = case
    targets, weights = TARGETS[of](targets, weights)
    small, own = 1e-9 * weights, functools.partial(fp8.head, scales=scales)
    sample, cap = draw(3, VOCAB, exact, one_in, jnp.asarray(ORDER), groups), CAPS["sigmoid"]

    def sampled(table, x):
        return sampled_cross_entropy(own, table, x, targets, small, sample, cap=cap, chunk=4)

    def full(table, x):
        return cross_entropy(Head(own, 4), table, x, targets, small, cap=cap)

    found, expected = (both(f)(table, x) for f in (sampled, full))
    np.testing.assert_allclose(found[0][1], expected[0][1], atol=2e-6)
    assert float(found[0][0]) == pytest.approx(float(expected[0][0]), rel=1e-6)
    # In e5m2 a number is within an eighth; gradients of one token as two targets are rounded one by
    # one.
    near = 1e-6 if scales is None else 0.01 if of == "one" else 0.125
    for a, b in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, atol=near * float(jnp.abs(b).max()))


def test_groups_that_do_not_divide_are_refused(case):
    sample = draw(0, VOCAB, EXACT, ONE_IN, groups=3)
    refused("10 tokens cannot be cut into 3", sampled_cross_entropy, head, *case, sample, cap=None)


def test_bf16(case):
    table, x, targets, weights = case
    table, x = table.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    sample = draw(1, VOCAB, EXACT, ONE_IN)
    _, loss_, dtable_, dx_ = oracle(table, x, targets[None], weights[None], sample, "sigmoid")

    def ours(table, x):
        return sampled_cross_entropy(head, table, x, targets, weights, sample, cap=CAPS["sigmoid"])

    (_, loss), (dtable, dx) = both(ours)(table, x)
    assert loss.dtype == jnp.float32 and dx.dtype == dtable.dtype == jnp.bfloat16
    np.testing.assert_allclose(loss, loss_, atol=0.05)
    for found, expected in ((dx, dx_), (dtable, dtable_)):
        near = 0.02 * np.abs(expected).max()
        np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=near)


def test_gradient_of_a_frequent_row_is_summed_in_fp32():
    """1,024 tokens that each add 1/2 to a bf16 row; a bf16 sum would stop at 128."""
    table, x = jnp.zeros((2, 1), jnp.bfloat16), jnp.ones((1, 1024, 1), jnp.bfloat16)
    targets, sample = jnp.zeros((1, 1024), jnp.int32), draw(0, 2, 2, 1)

    def ours(table):
        ones = jnp.ones((1, 1024))
        return sampled_cross_entropy(head, table, x, targets, ones, sample, cap=None)[0]

    found = jax.jit(jax.grad(ours))(table)[:, 0].astype(jnp.float32)
    np.testing.assert_array_equal(found, [-512, 512])


def test_nothing_of_the_size_of_logits_is_saved(case):
    table, x, targets, weights = case
    x = np.tile(x, (1, 20, 1))
    targets, weights = (np.tile(a, (1, 20)) for a in (targets, weights))
    sample = draw(0, VOCAB, EXACT, ONE_IN)

    def ours(table, x):
        cap = CAPS["sigmoid"]
        return sampled_cross_entropy(head, table, x, targets, weights, sample, cap=cap)[0]

    leaves = jax.tree.leaves(jax.eval_shape(lambda table, x: jax.vjp(ours, table, x)[1], table, x))
    assert leaves and all(leaf.size <= x.size for leaf in leaves)


def test_counting_leaves_total_and_other_gradients():
    targets, weights = jnp.array([[3, 0, 3, 4]]), jnp.array([[0.5, 1.0, 0.1, 0.0]])

    def total(x, counts):
        return 0.1 * count(jnp.square(x), counts, targets, weights)

    value, (dx, dcounts) = jax.value_and_grad(total, argnums=(0, 1))(3.0, jnp.zeros(5))
    assert float(value) == pytest.approx(0.9) and float(dx) == pytest.approx(0.6)
    np.testing.assert_array_equal(dcounts, [1, 0, 0, 2, 0])


def test_counts_are_added_up_in_int32():
    """GPUs add single fp32 numbers by compare-and-swap (jax issue 38806), slowly where many are the
    same one."""
    total = lambda counts: count(1.0, counts, jnp.array([[3, 0, 3]]), jnp.ones((1, 3)))
    program = str(jax.make_jaxpr(jax.grad(total))(jnp.zeros(5)))
    assert re.findall(r"(\w+)\[5\] = scatter-add", program) == ["i32"]
