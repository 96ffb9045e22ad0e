"""Fused kernels behind the model primitives: attention (GPU, TPU), QK-norm, composed heads, FP8 casts, MLP matmuls."""
