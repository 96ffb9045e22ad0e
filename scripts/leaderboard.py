"""``jspeed leaderboard`` from a checkout: ``python scripts/leaderboard.py``."""

from jspeed.commands.main import main

main("leaderboard")
