"""Kernels for GPUs and TPUs, own ones and libraries': attention, QK-norm, XSA, FP8, MLPs, sums.

Nothing else imports this folder: :mod:`jspeed.model.custom_kernels` finds it, and a run its
``preflight``. A file states in ``CUSTOM`` the kernels that replace parts of recipes, and in
``price`` what its kernels cost.
"""

from collections.abc import Mapping

from jspeed.kernels import attention_backends
from jspeed.model.custom_kernels import Backend, Chip

CUSTOM = {
    "FP8 casts": "fp8_cast",
    "MLP": "fused_mlp",
    "XSA": "own_value",
    "gradient of a norm": "norm_gradient",
    "pointer": "pointer_attention",
    "queries and keys": "qk_norm",
    "sums of rows": "row_sums",
    "update of rows": "row_sums",
}
"""Custom kernels by their names in recipes: their files. Each is checked, used, left out by
itself."""

PRICED = frozenset(
    ("fused_attention", "fused_matmul", "pointer_attention", "row_sums", "splash_attention")
)
"""Files whose kernels cost more, or less, than reading and writing their arrays once."""


def custom_kernels(chip: Chip) -> frozenset[str]:
    """Return the names of custom kernels that devices like ``chip`` have: all, on Hopper."""
    return frozenset(CUSTOM if chip.capability == attention_backends.HOPPER else ())


def backends() -> Mapping[str, Backend]:
    """Return the attention backends, the fastest first."""
    return attention_backends.backends()
