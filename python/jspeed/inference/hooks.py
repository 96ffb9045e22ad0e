"""What this room adds to a run: samples of its text, and parameters of other models to start
from."""

from dataclasses import replace
from pathlib import Path

from jspeed.base.files import write_whole
from jspeed.errors import escaped, first_line
from jspeed.inference.generate import Sampling, joined, sample
from jspeed.inference.model_config import departures, read_parameters
from jspeed.inference.trained import load_model
from jspeed.record.run_json import read_run
from jspeed.run.hooks import Hooks
from jspeed.run.options import Options

# the library's files begin with comments, and so would a sample
STDLIB_PROMPT = "    def __init__(self, "


def write_samples(options: Options, run_dir: Path) -> None:
    """Generate the recipe's samples with the trained model, where they are asked for; print and
    save them."""
    if not options.sample:
        return
    try:
        model = load_model(run_dir)
        asked = model.recipe.sample
        if not asked.number:
            return
        sampling = Sampling(asked.temperature, asked.top_k)
        prompt = asked.prompt or (STDLIB_PROMPT if "python" in read_run(run_dir)["data"] else "")
        texts = sample(model, [prompt] * asked.number, asked.tokens, sampling)
        print(f"{run_dir}/samples.txt:\n{escaped(joined(texts))}")
        write_whole(run_dir / "samples.txt", joined(texts) + "\n")
    # no vocabulary, a recipe of its own kind, no memory, no room: the run ended well
    except Exception as error:
        print(f"no sample: {first_line(error)}")


def add(hooks: Hooks) -> Hooks:
    """Return ``hooks`` with this room's."""
    return replace(
        hooks, read_parameters=read_parameters, departures=departures, afterwards=write_samples
    )
