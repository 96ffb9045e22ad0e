"""What a run says while it goes on: the terminal, metrics.jsonl, TensorBoard, Weights & Biases, profiler traces."""
