"""The leaderboard: entries judged by their track's rules, statistics, comparisons. Never imports
jax."""
