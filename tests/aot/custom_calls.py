"""Helpers: compile a function for absent GPUs, and find custom calls in optimised HLO."""

import json
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspeed.plan.hlo import Instruction, instructions, paired

ALONE, BY_ROWS = PartitionSpec(), PartitionSpec("data")
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def array_on(mesh: Mesh, shape: tuple[int, ...], dtype: Any, cut: PartitionSpec = ALONE) -> Any:
    """An array that lies on the devices of ``mesh``."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, cut))


def compiled(function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """Compile ``function`` for the devices that the arrays lie on."""
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).compile(options)


def by_rows(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """``function`` on each device's rows."""
    return jax.shard_map(function, mesh=mesh, in_specs=BY_ROWS, out_specs=BY_ROWS, check_vma=False)


def custom_calls(text: str, target: str = "") -> list[Instruction]:
    """Return the calls of library kernels and foreign functions whose target begins so."""
    return [
        i
        for i in paired(instructions(text))
        if i.opcode == "custom-call" and i.target.startswith(target)
    ]


def fmha_config(call: Instruction) -> dict[str, Any]:
    """What XLA tells cuDNN about an attention call."""
    return json.loads(call.attributes.split("backend_config=")[1])["cudnn_fmha_backend_config"]


def fmha_workspace(call: Instruction) -> int:
    """Bytes of workspace of a packed attention's backward pass.

    By cuDNN's frontend 1.16, and as plans of cuDNN 9.19 for an H100 say: dQ and a sum for each
    query in fp32, for every slot, each as long as the graph's sequence.
    """
    config = fmha_config(call)
    batch, heads, queries, _ = map(int, config["intermediate_tensor_shape"]["dimensions"])
    return (
        4
        * batch
        * int(config["max_seg_per_batch"])
        * heads
        * queries
        * (call.arrays[0].dims[-1] + 1)
    )
