"""Optimizers and schedules as optax transformations; what optax has already is used from there."""
