"""Output of a run: terminal, metrics.jsonl, TensorBoard, Weights & Biases."""
