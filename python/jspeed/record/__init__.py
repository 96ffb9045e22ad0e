"""Evidence of runs: the run.json schema, the records folder with its table, and pictures of the loss.

Nothing here imports jax or reads a clock: a record can be checked, ranked and drawn on any machine.
"""

from jspeed.record.picture import curves_svg, loss_svg
from jspeed.record.schema import SCHEMA, STATUSES, read_run, write_run

__all__ = ["SCHEMA", "STATUSES", "curves_svg", "loss_svg", "read_run", "write_run"]
