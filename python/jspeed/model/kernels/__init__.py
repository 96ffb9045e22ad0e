"""Kernels behind the model primitives: attention (GPU, TPU), QK-norm, XSA, FP8 casts, MLPs,
sums."""
