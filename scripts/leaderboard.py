"""``jspeed leaderboard`` from a checkout: ``python scripts/leaderboard.py``."""

from jspeed.cli.main import main

main("leaderboard")
