"""A stage: steps that share every shape. Recipes list them, the loader follows them; no jax in here."""

from dataclasses import dataclass
from typing import Any

from jspeed.fields import Count


@dataclass(frozen=True)
class Stage:
    """A run of steps that share every array shape, so that one executable serves them all.

    ``lane_len`` and ``max_doc_len`` are tokens. ``max_docs`` caps the documents in one lane. ``windows`` holds
    one attention window per layer: how many tokens a query sees, itself included; an empty tuple means the whole
    lane before it. ``scored`` is how many tokens of the vocabulary a training step scores, where that is a sample
    (:mod:`jspeed.model.sampled`): FLOPs are counted by it; None means all. ``own`` is what the recipe's functions want
    to know of the stage besides, fixed at compile time; nobody else reads it.
    """

    steps: Count
    lane_len: Count
    max_doc_len: Count | None = None
    max_docs: Count | None = None
    windows: tuple[Count, ...] = ()
    scored: Count | None = None
    own: Any = None
