"""The leaderboard to look at: in the terminal, as a page, as a block in README.md."""
