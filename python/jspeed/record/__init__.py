"""Evidence of runs: run.json, the records folder, statistics, the leaderboard as tables and page, pictures of the loss.

Nothing here imports jax or reads a clock: a record can be checked, ranked and drawn on any machine.
"""
