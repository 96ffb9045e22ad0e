"""Helper: find custom calls in optimised HLO."""

from jspeed.plan.hlo import Instruction, instructions, paired


def custom_calls(text: str, target: str = "") -> list[Instruction]:
    """Return the calls of library kernels and foreign functions whose target begins with ``target``."""
    return [i for i in paired(instructions(text)) if i.opcode == "custom-call" and i.target.startswith(target)]
