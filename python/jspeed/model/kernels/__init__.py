"""Kernels behind the model primitives: attention (GPU, TPU), QK-norm, XSA, composed heads, FP8 casts, MLPs, sums."""

from typing import Literal, TypeAlias, get_args

OwnKernel: TypeAlias = Literal[
    "MLP",
    "FP8 casts",
    "gradient of a norm",
    "queries and keys",
    "composed heads",
    "pointer",
    "XSA",
    "sums of rows",
    "update of rows",
]
"""What a recipe's OWN_KERNELS stands for; each is checked, used and left out by itself."""

OWN_KERNELS: frozenset[OwnKernel] = frozenset(get_args(OwnKernel))
