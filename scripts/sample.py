"""``jspeed sample`` from a checkout: ``python scripts/sample.py``."""

from jspeed.cli.main import main

main("sample")
