"""FLOPs of custom calls, which HLO does not contain."""
