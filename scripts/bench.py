"""``jspeed bench`` from a checkout: ``python scripts/bench.py``."""

from jspeed.commands.main import main

main("bench")
