"""Fused GPU kernels that layers call: other libraries' attention and our own, attention and MLP, by Pallas."""
