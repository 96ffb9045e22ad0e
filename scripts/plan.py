"""``jspeed plan`` from a checkout: ``python scripts/plan.py``."""

from jspeed.commands.main import main

main("plan")
