"""``jspeed launch`` from a checkout: ``python scripts/launch.py``."""

from jspeed.commands.main import main

main("launch")
