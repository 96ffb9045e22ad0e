"""``jspeed sample`` from a checkout: ``python scripts/sample.py``."""

from jspeed.commands.main import main

main("sample")
