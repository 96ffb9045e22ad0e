"""``jspeed run`` from a checkout: ``python scripts/speedrun.py``."""

from jspeed.cli.main import main

main("run")
