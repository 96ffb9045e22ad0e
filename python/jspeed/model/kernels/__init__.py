"""Kernels behind the model primitives: attention (GPU, TPU), QK-norm, XSA, composed heads, FP8
casts, MLPs, sums."""
