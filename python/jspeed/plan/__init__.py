"""Ahead-of-time plans: compile a recipe for absent GPUs, and predict memory, time and bottlenecks from the HLO."""

# What JAX lets its allocator take of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
MEMORY_FRACTION = 0.75
TPU_MEMORY_FRACTION = 0.93  # a guess: the runtime keeps about a sixteenth
