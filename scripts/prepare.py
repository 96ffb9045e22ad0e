"""``jspeed prepare`` from a checkout: ``python scripts/prepare.py``."""

from jspeed.cli.main import main

main("prepare")
