"""The record of a run: run.json and its checks, the records folder, announced plans, tracks, the plot of the loss.

Nothing here imports jax or reads a clock: a record can be checked, ranked and drawn on any machine.
"""
