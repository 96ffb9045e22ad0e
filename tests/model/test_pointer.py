"""The pointer against sums in float64, against automatic differentiation, and with a KV cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.model import fp8, pointer
from jspeed.model.attention import find_documents
from jspeed.model.kv_cache import advance, empty
from jspeed.model.losses import Head, asymmetric_cap, cross_entropy, multi_token_targets, softcap

VOCAB = 23
COPY = 21
BOS = 20
ROWS = 2
LENGTH = 37
WIDTH = 6
CAP = asymmetric_cap(23, 5, 7.5)
head = functools.partial(fp8.head, scales=None)


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 8, size=(ROWS, LENGTH + 1))  # few, so that many are copies
    tokens[0, 13] = tokens[1, 30] = BOS
    shapes = dict(
        table=(VOCAB, WIDTH), x=(ROWS, LENGTH, WIDTH), q=(WIDTH, 4), k=(WIDTH, 4), none=(4,)
    )
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return params, tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)


@functools.partial(jax.jit, static_argnames="window")
def log_probabilities(params, tokens, window):
    q, k = params["x"] @ params["q"], params["x"] @ params["k"]
    logits = softcap(head(params["table"], params["x"]), CAP)
    return pointer.log_probabilities(
        logits, COPY, q, k, params["none"], tokens, find_documents(tokens, BOS), window
    )


@functools.partial(jax.jit, static_argnames=("window", "chunk", "cap"))
def loss(params, tokens, targets, weights, window, chunk=None, cap=CAP):
    q, k, x = params["x"] @ params["q"], params["x"] @ params["k"], params["x"]
    first = targets if targets.ndim == 2 else targets[0]
    found = pointer.copies(q, k, params["none"], tokens, first, find_documents(tokens, BOS), window)
    several = targets, weights
    if targets.ndim == 2:
        several = targets[None], weights[None]
    of_targets = pointer.with_copying(*several, COPY)
    mixed = Head(head, chunk, mix=pointer.mix)
    return cross_entropy(mixed, params["table"], x, *of_targets, *found, cap=cap)


def in_float64(params, tokens, window):
    """Probabilities [B, T, V], token by token."""
    p = {name: np.asarray(array, np.float64) for name, array in params.items()}
    q, k, tokens = p["x"] @ p["q"], p["x"] @ p["k"], np.asarray(tokens)
    written = np.exp(23 / (1 + np.exp(-(p["x"] @ p["table"].T + 5) / 7.5)))
    written /= written.sum(axis=-1, keepdims=True)
    found = np.zeros((ROWS, LENGTH, VOCAB))
    for row in range(ROWS):
        for t in range(LENGTH):
            document = max([0, *(s for s in range(t + 1) if tokens[row, s] == BOS)])
            seen = [s for s in range(max(document, t - window), t)]
            weights = np.exp([*(q[row, t] @ k[row, s] for s in seen), q[row, t] @ p["none"]])
            weights /= weights.sum()
            share = written[row, t, COPY]
            others = written[row, t] * (np.arange(VOCAB) != COPY) / (1 - share)
            found[row, t] = others * (1 - share * (1 - weights[-1]))
            for s, weight in zip(seen, weights, strict=False):
                found[row, t, tokens[row, s]] += share * weight
    return found


@pytest.mark.parametrize(
    "window", [12, *(pytest.param(window, marks=pytest.mark.slow) for window in (1, 100))]
)
def test_probabilities_and_losses_are_those_of_float64(case, window):
    params, tokens, targets = case
    expected = in_float64(params, tokens, window)
    np.testing.assert_allclose(expected.sum(axis=-1), 1, atol=1e-12)
    np.testing.assert_allclose(
        np.exp(log_probabilities(params, tokens, window)), expected, atol=2e-6
    )
    weights = np.linspace(0.5, 1, ROWS * LENGTH, dtype=np.float32).reshape(ROWS, LENGTH)
    total, found = loss(params, tokens, targets, weights, window, chunk=10)
    of_targets = -np.log(np.take_along_axis(expected, targets[..., None], axis=-1))[..., 0]
    np.testing.assert_allclose(found, of_targets, atol=1e-5)
    np.testing.assert_allclose(total, np.sum(of_targets * weights), rtol=1e-6)


@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.slow), 10])
def test_gradients_are_those_of_automatic_differentiation(case, chunk):
    params, tokens, targets = case
    weights = np.full((ROWS, LENGTH), 0.3, np.float32)
    several = jax.jit(multi_token_targets)(targets, weights, np.float32([1.0, 0.5]))

    def plain(params):
        losses = -jnp.take_along_axis(
            log_probabilities(params, tokens, 9), targets[..., None], axis=-1
        )[..., 0]
        later = jax.nn.log_softmax(softcap(head(params["table"], params["x"]), CAP), axis=-1)
        losses -= (
            0.5
            * jnp.take_along_axis(later, several[0][1][..., None], axis=-1)[..., 0]
            * (several[1][1] > 0)
        )
        return 0.3 * jnp.sum(losses)

    expected = jax.jit(jax.value_and_grad(plain))(params)
    found = jax.jit(jax.value_and_grad(lambda params: loss(params, tokens, *several, 9, chunk)[0]))(
        params
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name in params:
        scale = np.abs(expected[1][name]).max()
        assert scale > 1e-3
        np.testing.assert_allclose(
            found[1][name], expected[1][name], atol=2e-5 * scale, err_msg=name
        )


def test_nothing_is_copied_from_later_tokens_or_other_documents(case):
    params, tokens, _ = case
    before = np.asarray(log_probabilities(params, tokens, 9))

    def changed_by(place):
        other = tokens.copy()
        other[0, place] += 1
        after = log_probabilities(params, other, 9)
        return set(np.flatnonzero(np.any(before != np.asarray(after), axis=(0, 2))))

    # as a key of the nine tokens after it
    assert 26 in changed_by(25) and changed_by(25) <= set(range(26, 35))
    assert changed_by(10) in ({11}, {12}, {11, 12})


def test_without_a_share_the_loss_is_the_plain_one(case):
    params, tokens, targets = case
    weights = np.ones(targets.shape, np.float32)
    params["x"][..., 0] = 1
    params["table"][COPY] = 0
    params["table"][COPY, 0] = -200
    found = loss(params, tokens, targets, weights, 9, cap=None)
    plain = jax.jit(functools.partial(cross_entropy, head, cap=None))(
        params["table"], params["x"], targets, weights
    )
    np.testing.assert_allclose(found[1], plain[1], atol=1e-6)


def test_token_by_token_with_a_cache_as_all_at_once(case):
    params, tokens, _ = case

    def forward(of_tokens):
        """A model whose state is a function of the token alone."""
        state = jnp.asarray(params["table"])[of_tokens]
        logits = softcap(head(params["table"], state), CAP)
        arguments = (
            logits,
            COPY,
            state @ params["q"],
            state @ params["k"],
            params["none"],
            of_tokens,
        )
        return pointer.log_probabilities(*arguments, find_documents(of_tokens, BOS), 9)

    one_more = jax.jit(functools.partial(advance, forward))
    expected, cache = jax.jit(forward)(tokens), empty(forward, ROWS, LENGTH)
    found = []
    for t in range(LENGTH):
        cache, now = one_more(cache, np.full(ROWS, t), tokens[:, t : t + 1])
        found.append(now)
    np.testing.assert_allclose(np.exp(np.concatenate(found, axis=1)), np.exp(expected), atol=1e-6)
