"""``jspeed sample``: generate text with a trained model."""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from jspeed.base.standard_streams import stdout_open, without_logs
from jspeed.cli.flags import Command, refuse
from jspeed.errors import BadInput, escaped, say
from jspeed.fields import Axes, Count, File, NotNegative, Rule, Wants, integer

MOST_TEXTS = 10_000  # all are one batch
MOST_BYTES = 10_000_000  # of a prompt
Share = Annotated[float, Rule("a number above 0 and at most 1", lambda value: 0 < value <= 1)]


def sample(
    model: Annotated[Path, Wants("MODEL", positional=True)],
    prompt: str | None = None,
    prompt_file: File | None = None,
    number: Annotated[int, integer(1, MOST_TEXTS)] | None = None,
    tokens: Count | None = None,
    temperature: NotNegative | None = None,
    top_k: Annotated[Count | None, Wants("K")] = None,
    top_p: Annotated[Share | None, Wants("P")] = None,
    seed: Annotated[int, integer(0, 2**32 - 1)] = 0,
    stop: str | None = None,
    bos: bool = True,
    mesh: Axes | None = None,
    trust: bool = False,
) -> None:
    """Generate text with a trained model, to the end of a document or for a number of tokens.

    The first text appears while it is generated; the others, generated in the same batch, follow.
    Control characters, which byte-level models produce too, appear as \\x1b.

    Args:
        model: A run directory, one of its checkpoints (RUN/checkpoints/STEP), an exported folder,
            or a folder with GPT-2's config.json and model.safetensors.
        prompt: Text to continue; default: the recipe's, or nothing.
        prompt_file: File with the text to continue, instead.
        number: How many texts; default: the recipe's, or 1 with a prompt.
        tokens: Most new tokens of a text; default: the recipe's.
        temperature: 0 takes the most probable token, 1 draws from the model's probabilities;
            default: the recipe's.
        top_k: Draw from the k most probable tokens only.
        top_p: Draw from the fewest tokens that together have this probability.
        seed: Seed of the draws; another one gives other texts.
        stop: End a text before this string.
        bos: Put the token that begins a document, such as <|endoftext|>, before the prompt, as in
            training; --no-bos leaves it out, as transformers and nanoGPT do.
        mesh: Spread the parameters over these devices, for example data=8.
        trust: Run the recipe.py of a folder that is none of jspeed's and was not trained here.
    """
    with without_logs():
        from jspeed.base.compile_cache import use_compile_cache
        from jspeed.inference.generate import GREEDY, Generator, Sampling, write
        from jspeed.inference.trained import load_model
        from jspeed.parallel.mesh import mesh_for

    text = read_prompt(prompt, prompt_file)
    use_compile_cache()
    loaded = load_model(model, mesh_for(mesh), trust)
    defaults = loaded.recipe.sample
    if number is None:
        number = defaults.number if text is None else 1
    if not number:
        raise BadInput(
            f"recipe {loaded.recipe.name} samples nothing by itself; give --prompt or --number"
        )
    if temperature is None:
        temperature = defaults.temperature
    if temperature < GREEDY:
        draws = {"--top-k": top_k, "--top-p": top_p, "--seed": seed or None}
        refuse(draws, f"--temperature {temperature:g} draws nothing")
    sampling = Sampling(temperature, defaults.top_k if top_k is None else top_k, top_p, seed, bos)
    if text is None:
        text = defaults.prompt
    if loaded.gpt2 and bos and text and (first := loaded.facts["bos_id"]) is not None:
        name = "<|endoftext|>" if loaded.facts["tokenizer"] == "gpt2" else f"token {first}"
        say(
            f"note: {name} comes before the prompt, as before a document in training; --no-bos"
            " leaves it out"
        )
    length = defaults.tokens if tokens is None else tokens
    stops = list(filter(None, [as_given("--stop", stop)]))
    prompts = [text] * number
    print_texts(prompts, write(Generator(loaded, number, sampling), prompts, length, stops))


def print_texts(prompts: Sequence[str], pieces: Iterable[Sequence[str]]) -> None:
    """Print the first text while it is generated, then the others; stop when stdout is closed.

    ``pieces``: what is new of each text, token by token.
    """
    from jspeed.inference.generate import joined

    texts = list(prompts)
    for number, new in enumerate(pieces):
        print(escaped(new[0] if number else prompts[0] + new[0]), end="", flush=True)
        if not stdout_open():
            return
        texts = [text + piece for text, piece in zip(texts, new, strict=True)]
    print()
    if len(texts) > 1:
        others = escaped(joined(texts[1:]))
        print(others if "\n" not in texts[0].strip("\n") else f"{'-' * 15}\n{others}")
    sys.stdout.flush()


def read_prompt(prompt: str | None, file: Path | None) -> str | None:
    """Return the prompt, or None when none is given. Raises BadInput for both, or a file that is
    not text."""
    if file is not None and prompt is not None:
        raise BadInput("found both --prompt and --prompt-file; give one of them")
    if file is None:
        return as_given("--prompt", prompt)
    try:
        with file.open("rb") as opened:  # a pipe is welcome here
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise BadInput(
                f"--prompt-file {file} holds more than {MOST_BYTES:,} bytes; a model's context is"
                " far shorter"
            )
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"--prompt-file {file} cannot be read as UTF-8 ({error}); give a text file"
        ) from None


def as_given(flag: str, text: str | None) -> str | None:
    """Return the UTF-8 that was typed, whatever the locale. Raises BadInput for half a
    character."""
    try:
        return text and os.fsencode(text).decode()
    except UnicodeError:
        raise BadInput(f"{flag} is not UTF-8; give whole characters") from None


COMMAND = Command(
    sample,
    (
        "runs/mine  # what the recipe samples",
        'runs/mine --prompt "The sea" --number 3 --temperature 0.8  # three texts that begin so',
        (
            'gpt2/ --prompt "The sea" --temperature 0 --no-bos  # the greedy text of a GPT-2, as'
            " other tools give it"
        ),
    ),
    {"sampling": "number tokens temperature top_k top_p seed stop bos"},
)
