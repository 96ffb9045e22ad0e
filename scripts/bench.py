"""Measure what jspeed promises, on the machine at hand."""

from jspeed.terminal import starts

starts(__name__)

from typing import Any

import tyro

from benches.cpu import cpu
from benches.fused import fused
from benches.gpu import gpu
from benches.loader import loader
from benches.quality import quality
from benches.text import generate, tokenise
from jspeed.errors import run_script

if __name__ == "__main__":
    benches: dict[str, Any] = {"cpu": cpu, "fused": fused, "gpu": gpu, "generate": generate, "loader": loader}
    benches |= {"quality": quality, "tokenise": tokenise}
    run_script(lambda: tyro.extras.subcommand_cli_from_dict(benches, description=__doc__))
