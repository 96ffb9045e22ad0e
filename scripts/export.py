"""``jspeed export`` from a checkout: ``python scripts/export.py``."""

from jspeed.commands.main import main

main("export")
