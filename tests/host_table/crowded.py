"""``jspeed run`` whose process 1 has room for few rows of its share of a table."""

import os

from jspeed.cli.main import main
from jspeed.host_table import in_run

if os.environ["RANK"] == "1":
    in_run.SHARES = (0.01,)
main("run")
