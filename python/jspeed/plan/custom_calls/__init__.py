"""What calls of kernels cost whose FLOPs XLA's own text does not say."""
