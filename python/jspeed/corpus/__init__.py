"""From documents to token shards: sources, downloads, tokenizers, train/validation split. Never
imports jax."""

from collections.abc import Callable

Progress = Callable[[int, int | None], None]
"""Is called, from any thread, with what is newly done (bytes or files) and, where known, what there
is in all."""


def no_progress(count: int, total: int | None) -> None:
    """Show nothing."""
