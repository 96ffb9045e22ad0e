"""What the examples of custom kernels share: numbers, documents, and a function beside the same
with a kernel, gradients included."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.model.custom_kernels import Kernel, Run


def normal(*shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> list[Any]:
    """Return an array of normal numbers of each shape; the same in every process."""
    draw = np.random.default_rng(0)
    return [draw.normal(size=shape).astype(dtype) for shape in shapes]


def starts(lanes: int, length: int) -> np.ndarray:
    """Return tokens ``[lanes, length]``, int32: 1 where one of two or three documents begins."""
    tokens = np.zeros((lanes, length), np.int32)
    tokens[:, :: 2 * length // 5] = 1
    return tokens


def with_gradients(run: Run, kernel: Kernel) -> tuple[Run, Run]:
    """Return two functions of gradients and arrays, which compute ``run(*arrays, kernel=)`` and its
    gradients: with ``kernel``, and in plain JAX in fp32, so that only the kernel rounds."""

    def both(own: Kernel | None, gradients: Any, *arrays: Any) -> Any:
        if own is None:
            gradients, arrays = jax.tree.map(lambda a: a.astype(jnp.float32), (gradients, arrays))
        out, back = jax.vjp(partial(run, kernel=own), *arrays)
        return out, back(gradients)

    return partial(both, kernel), partial(both, None)
