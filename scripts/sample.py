"""``jspeed sample`` from a checkout: ``python scripts/sample.py``."""

from jspeed.standard_streams import starts

starts(__name__)

from jspeed.commands.main import main

if __name__ == "__main__":
    main("sample")
