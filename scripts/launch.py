"""``jspeed launch`` from a checkout: ``python scripts/launch.py``."""

from jspeed.cli.main import main

main("launch")
