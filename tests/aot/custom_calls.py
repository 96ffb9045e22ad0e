"""Helper: find custom calls in optimised HLO."""

import json
from typing import Any

from jspeed.plan.hlo import Instruction, instructions, paired


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
