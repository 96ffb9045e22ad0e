"""``jspeed evaluate`` from a checkout: ``python scripts/evaluate.py``."""

from jspeed.cli.main import main

main("evaluate")
