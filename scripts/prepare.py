"""``jspeed prepare`` from a checkout: ``python scripts/prepare.py``."""

from jspeed.commands.main import main

main("prepare")
