"""Ahead-of-time plans: compile a recipe for absent GPUs, and predict memory, time and bottlenecks
from the HLO."""
