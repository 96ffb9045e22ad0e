"""A training stage: consecutive steps with the same array shapes, so one compiled program. Imports
no jax."""

from dataclasses import dataclass
from typing import Any

from jspeed.fields import Count


@dataclass(frozen=True)
class Stage:
    """Consecutive steps of the same array shapes, compiled once.

    ``lane_len``, the length of a row of the batch, and ``max_doc_len`` are tokens. ``max_docs``
    caps the documents in one lane. ``windows`` holds one attention window per layer: how many
    tokens a query sees, itself included; an empty tuple means the whole lane before it. ``scored``
    is how many tokens of the vocabulary a training step scores, where that is a sample
    (:mod:`jspeed.model.sampled`): FLOPs are counted by it; None means all. ``every``: parameters
    are updated at least every so many steps, whatever their ``ParamSpec.every``; None: as that
    says. ``own`` is static data for the recipe's own functions.
    """

    steps: Count
    lane_len: Count
    max_doc_len: Count | None = None
    max_docs: Count | None = None
    windows: tuple[Count, ...] = ()
    scored: Count | None = None
    every: Count | None = None
    own: Any = None
