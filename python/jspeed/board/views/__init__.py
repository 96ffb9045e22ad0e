"""Views of the leaderboard: in the terminal, as an HTML page, as a block in README.md."""
