"""``jspeed evaluate`` from a checkout: ``python scripts/evaluate.py``."""

from jspeed.commands.main import main

main("evaluate")
