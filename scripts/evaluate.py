"""``jspeed evaluate`` from a checkout: ``python scripts/evaluate.py``."""

from jspeed.standard_streams import exit_on_ctrl_c

exit_on_ctrl_c(__name__)

from jspeed.commands.main import main

if __name__ == "__main__":
    main("evaluate")
