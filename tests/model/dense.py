"""Attention and its gradients in float64 NumPy, with a dense mask: the oracle of every attention
test."""

import numpy as np


def mask(tokens, bos, window):
    """bool ``[B, T, T]``: may the query (second axis) see the key (third axis)?"""
    length = tokens.shape[1]
    t, s = np.arange(length)[:, None], np.arange(length)[None, :]
    seen = (s <= t) & (t - s < (window or length))
    ids = np.cumsum(tokens == bos, axis=1)
    return seen & (ids[:, :, None] == ids[:, None, :])


def forward(q, k, v, scale, seen):
    scores = np.einsum("bthk,bshk->bhts", q, k) * scale
    scores = np.where(seen[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshk->bthk", weights, v), weights


def backward(q, k, v, scale, seen, dout, near=True):
    """Gradients with respect to q, k, v, from the scores and to the values where ``near``, bool
    ``[T, T]``."""
    _, w = forward(q, k, v, scale, seen)
    dv = np.einsum("bhts,bthk->bshk", w * near, dout)
    dw = np.einsum("bthk,bshk->bhts", dout, v)
    ds = w * near * (dw - (dw * w).sum(-1, keepdims=True)) * scale
    return np.einsum("bhts,bshk->bthk", ds, k), np.einsum("bhts,bthk->bshk", ds, q), dv


def distance(found, expected) -> float:
    """Root mean square error relative to the root mean square of what is expected."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))
