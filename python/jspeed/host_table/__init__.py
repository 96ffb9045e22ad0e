"""A table of embeddings in the host's memory, for one that no device holds.

A step names its rows, gathers them, and returns their gradients:

>>> import ml_dtypes, numpy as np
>>> from jspeed.host_table import RowTable, load, save
>>> table = RowTable(1_000_000, 64, capacity=10_000)
>>> rows = np.array([7, 123_456, 7])
>>> buffer = table.gather(rows)  # bfloat16 [3, 64], zeros as yet
>>> gradients = np.ones((3, 64), ml_dtypes.bfloat16)
>>> rates = dict(learning_rate=0.01, beta2=0.95, eps=1e-10, weight_decay=0.0)
>>> table.update(0, rows, gradients, **rates)
>>> print(table.gather(rows, buffer)[:, 0])
[-0.0100098 -0.0100098 -0.0100098]
>>> table
RowTable(1000000 x 64, 2 of 10000 rows in use)

A checkpoint holds the rows in use. The table that is loaded goes on with the same bits:

>>> save(table, folder / "table.safetensors")
>>> copy = load(folder / "table.safetensors")
>>> bool((copy.gather(rows) == buffer).all())
True

The rule of an update is :func:`jspeed.optim.rows.row_adam`. Runs with ``--table host`` use it
(:mod:`jspeed.host_table.in_run`).
"""

from jspeed._dataloader import RowTable
from jspeed.host_table.checkpoint import load, save

__all__ = ["RowTable", "load", "save"]
