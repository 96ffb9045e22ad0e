"""Records of runs: run.json and its checks, the records folder, preregistered runs, tracks, and the
loss plot.

Nothing here imports jax or reads a clock: a record can be checked, ranked and drawn on any machine.
"""
