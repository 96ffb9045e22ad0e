"""``jspeed run`` from a checkout: ``python scripts/speedrun.py``."""

from jspeed.commands.main import main

main("run")
