"""``jspeed bench`` from a checkout: ``python scripts/bench.py``."""

from jspeed.cli.main import main

main("bench")
