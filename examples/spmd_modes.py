"""Three ways to spread one program over devices: automatic, explicit and manual sharding, for one layer and one step.

    python examples/spmd_modes.py                 # on eight virtual CPU devices

Each mode prints how its arrays lie, and all three must agree to 1e-6. The layer is sigmoid(x @ w + b); the step is
gradient descent on the mean squared error.

What these lessons get wrong elsewhere, put right here:
* A step's result must be fed back in. A loop that calls step(params, ...) with the first parameters again and again
  trains nothing, and its loss still falls once.
* Weights cut over the data axis are no mistake under automatic or explicit sharding: that is FSDP, the compiler
  gathers them, and the numbers stay the same. Only in manual mode does each device see its part alone.
* In manual mode nothing is summed unless you say so: jax.lax.pmean of the gradient, or every device trains its own.
* jax.make_mesh makes axes Explicit unless told otherwise, so state axis_types.
* On a CPU with few cores, block now and then: 64 steps in flight on eight virtual devices abort the process.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

P = PartitionSpec
DEVICES = 8
ROWS, WIDTH = 1024, 32
RATE, STEPS, SHOWN = 0.01, 100, (0, 1, 2, 20, 40, 60, 80, 100)

Params = dict[str, jax.Array]


def forward(params: Params, x: jax.Array) -> jax.Array:
    """Return sigmoid(x @ w + b): ``[rows, 1]``."""
    return jax.nn.sigmoid(x @ params["w"] + params["b"][None])


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean squared error over the rows at hand."""
    return jnp.mean((forward(params, x) - y) ** 2)


def step(params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
    """Return the parameters after one step of gradient descent, and the loss before it."""
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value


def make_data() -> tuple[Params, np.ndarray, np.ndarray]:
    """Draw rows, on which side of a plane each lies (0 or 1), and zeros to start from.

    One key draws both, as in the lesson this is after, so that its numbers can be compared: do not do so elsewhere.
    """
    key = jax.random.key(1701)
    x, plane = jax.random.normal(key, (ROWS, WIDTH)), jax.random.normal(key, (WIDTH, 1))
    start = {"w": jnp.zeros((WIDTH, 1)), "b": jnp.zeros(1)}
    return start, np.asarray(x), np.asarray(x @ plane > 0, np.float32)


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    """A mesh of all devices along one axis, ``data``."""
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))


def put(mesh: jax.sharding.Mesh, params: Params, x: np.ndarray, y: np.ndarray) -> Any:
    """Put rows over the devices, and parameters whole on each."""
    rows, whole = NamedSharding(mesh, P("data", None)), NamedSharding(mesh, P())
    return jax.device_put(params, whole), jax.device_put(x, rows), jax.device_put(y, rows)


def show(name: str, array: jax.Array) -> None:
    """Print an array's sharding and what one device holds of it."""
    part = array.addressable_shards[0].data.shape
    print(f"  {name:<8}{str(jax.typeof(array)):<22}{str(array.sharding.spec):<24}{part} on each of {DEVICES}")


def train(one_step: Any, params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, list[float]]:
    """Take ``STEPS`` steps, each from where the one before ended; return the losses after ``SHOWN`` of them."""
    losses = []
    for number in range(STEPS + 1):
        after, value = one_step(params, x, y)
        if number in SHOWN:
            losses.append(float(value))  # reading it waits for the device, so few steps are in flight
        params = after if number < STEPS else params
    return params, losses


def automatic() -> tuple[Params, list[float]]:
    """The compiler decides: say how inputs lie, write the program as for one device."""
    params, x, y = put(mesh_of(AxisType.Auto), *make_data())
    print("automatic: jit, Auto axes")
    show("x", x)
    out = jax.jit(forward)(params, x)
    show("forward", out)
    return train(jax.jit(step), params, x, y)


def explicit() -> tuple[Params, list[float]]:
    """The sharding is part of the type: jax.typeof shows it, and what has no one answer is an error, not a guess."""
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        params, x, y = put(mesh, *make_data())
        print("explicit: jit, Explicit axes")
        show("x", x)
        show("forward", jax.jit(forward)(params, x))
        return train(jax.jit(step), params, x, y)


def manual() -> tuple[Params, list[float]]:
    """shard_map: the program of one device, with every exchange written out."""
    mesh = mesh_of(AxisType.Auto)
    params, x, y = put(mesh, *make_data())
    print("manual: shard_map")

    def on_one_device(params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
        print(f"  inside, one device sees x as {x.shape}")
        value, grads = jax.value_and_grad(loss)(params, x, y)
        value, grads = jax.lax.pmean((value, grads), "data")  # without this, eight different models
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value

    # check_vma=False: the transpose of a whole parameter would otherwise be a sum over devices already.
    on_all = partial(jax.shard_map, mesh=mesh, check_vma=False)
    one_step = on_all(on_one_device, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    out = jax.jit(on_all(forward, in_specs=(P(), P("data")), out_specs=P("data")))(params, x)
    show("forward", out)
    return train(jax.jit(one_step), params, x, y)


def collectives() -> None:
    """A sum of each part, and the sum of all: what a collective is."""
    mesh = mesh_of(AxisType.Auto)
    x = jnp.arange(32.0)

    def part_and_all(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(part, keepdims=True), jax.lax.psum(jnp.sum(part), "data")

    parts, all_of_it = jax.shard_map(part_and_all, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P()))(x)
    print(f"sums of parts {np.asarray(parts).astype(int).tolist()}, psum {int(all_of_it)}")


def main() -> None:
    """Run the three modes and compare them."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_default_matmul_precision", "highest")
    collectives()
    results = [mode() for mode in (automatic, explicit, manual)]
    for name, (_, losses) in zip(("automatic", "explicit", "manual"), results, strict=True):
        print(f"{name:<10}" + " ".join(f"{value:.7f}" for value in losses))
    first, first_losses = results[0]
    for params, losses in results[1:]:
        np.testing.assert_allclose(losses, first_losses, atol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, first)
    print("all three agree to 1e-6")


if __name__ == "__main__":
    main()
