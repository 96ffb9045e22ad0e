"""``jspeed export`` from a checkout: ``python scripts/export.py``."""

from jspeed.cli.main import main

main("export")
