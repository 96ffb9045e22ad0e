"""Optimizers and schedules that optax lacks, as optax transformations."""
