"""Train on several processes with a step in plain JAX; jspeed joins them, and they print, fail and
report as one.

jspeed launch --standalone --nproc-per-node 2 --results results.json examples/two_processes.py
python examples/two_processes.py    # one process, the same losses
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jspeed

ROWS, STEPS, RATE = 64, 61, 0.05
TRUTH = np.arange(8, dtype=np.float32)


@jax.jit
def step(weights, x, y):
    """Descend the mean squared error of a linear model: ``x [rows, width]``, ``y [rows]``."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(weights)
    return weights - RATE * gradient, loss


with jspeed.join() as processes:  # before anything asks JAX for devices
    # all processes' devices
    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(AxisType.Auto,))
    cut, whole = NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec())
    weights = jax.device_put(np.zeros_like(TRUTH), whole)
    random = np.random.default_rng(0)
    for number in range(STEPS):
        x = random.standard_normal((ROWS, TRUTH.size), np.float32)
        # a real program reads only its own rows
        mine = np.split(x, processes.count)[processes.index]
        batch = [jax.make_array_from_process_local_data(cut, part) for part in (mine, mine @ TRUTH)]
        weights, loss = step(weights, *batch)
        if number % 20 == 0:
            print(f"step {number}: loss {loss:.4f}")  # printed by process 0 alone
    everyone = processes.gather(
        {"rows": len(mine), "devices": jax.local_device_count(), "loss": loss}
    )
    print(*(f"process {index}: {found}" for index, found in enumerate(everyone)), sep="\n")
    processes.result({"loss": loss, "weights": weights})  # a record for launch --results
