"""What others measured of kernels, and a plan priced by it."""
