"""Run the layers of a recipe whose layers are alike, one after the other or as a loop."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

Block = Callable[[dict[str, jax.Array], Any], Any]


def run_blocks(
    block: Block, table: Mapping[str, Any], layers: int, params: Mapping[str, jax.Array], x: Any
) -> Any:
    """Apply ``block(p, x)`` for every layer in order; ``p`` holds its part of each parameter that
    stacks layers.

    ``table`` describes ``params`` over all ``layers``. A parameter of one entry per layer gives
    that entry, one of k entries per layer gives ``[k, ...]``. A device that holds fewer layers
    applies only those.
    """
    entries = _entries(table, layers)
    (layers_here,) = {params[name].shape[0] // k for name, k in entries.items()}
    for layer in range(layers_here):
        x = block(
            {
                name: params[name][layer] if k == 1 else params[name][k * layer : k * layer + k]
                for name, k in entries.items()
            },
            x,
        )
    return x


def scan_blocks(
    block: Block, table: Mapping[str, Any], layers: int, params: Mapping[str, jax.Array], x: Any
) -> Any:
    """:func:`run_blocks` by ``jax.lax.scan``: the compiled program holds one layer, however many
    there are.

    ``block`` must return ``x`` in the shapes and dtypes that it was given.
    """
    stacked = {
        name: params[name] if k == 1 else params[name].reshape(-1, k, *params[name].shape[1:])
        for name, k in _entries(table, layers).items()
    }
    return jax.lax.scan(lambda x, p: (block(p, x), None), x, stacked)[0]


def _entries(table: Mapping[str, Any], layers: int) -> dict[str, int]:
    return {name: spec.shape[0] // layers for name, spec in table.items() if spec.stacks_layers}
