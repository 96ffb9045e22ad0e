"""``jspeed plan`` from a checkout: ``python scripts/plan.py``."""

from jspeed.cli.main import main

main("plan")
