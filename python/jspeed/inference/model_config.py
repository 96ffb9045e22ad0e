"""config.json of a folder with a model, a run's or a GPT-2's, and the recipe that it describes."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp

from jspeed.base.files import read_input
from jspeed.corpus.gpt2_tokenizer import gpt2_facts
from jspeed.data.manifest import TokenizerFacts
from jspeed.errors import BadInput
from jspeed.fields import check_json, parse_json
from jspeed.inference.gpt2 import (
    BUFFERS,
    GPT2Config,
    check_config,
    check_sizes,
    from_gpt2,
    gpt2_sets,
    is_gpt2,
)
from jspeed.recipe import Context, Recipe, init_parameters
from jspeed.run.evidence.foreign_code import allow
from jspeed.run.export import FILE, LEFT_OUT, OWN, as_parameters, load
from jspeed.run.find_recipe import LoadedRecipe, find


class OwnConfig(TypedDict):
    """What is read of the config.json of a run or an export."""

    recipe: str
    overrides: NotRequired[dict[str, Any]]
    tokenizer: NotRequired[TokenizerFacts | None]


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a folder with a model.

    Raises BadInput when there is none, it is neither one of ours nor a GPT-2's, or a GPT-2 that
    recipe gpt2 is not.
    """
    path = folder / "config.json"
    if not os.path.exists(path):
        raise BadInput(
            f"{folder} has no config.json; give a run directory, an exported folder, or a folder"
            " with GPT-2's config.json and model.safetensors"
        )
    remedy = "copy or download it again"
    config = parse_json(read_input(path, remedy), path, _check, remedy)
    if config.get("model_type") == "gpt2":
        check_config(path, config)
    return config


def _check(config: Any) -> None:
    is_gpt2 = isinstance(config, dict) and config.get("model_type") == "gpt2"
    if not is_gpt2 and not (isinstance(config, dict) and "recipe" in config):
        raise BadInput(
            "it describes neither; expected a run of jspeed or a GPT-2 (model_type gpt2)"
        )
    check_json(config, GPT2Config if is_gpt2 else OwnConfig)


def find_trained(folder: Path, config: Mapping[str, Any], trust: bool = False) -> LoadedRecipe:
    """Return the recipe of the model in ``folder``, whose ``config`` was read: its own copy, or
    gpt2 of its size. Its own copy runs where it is jspeed's, was trained here, or with ``trust``
    (:mod:`jspeed.run.evidence.foreign_code`)."""
    if config.get("model_type") == "gpt2":
        return find("gpt2", [*gpt2_sets(config), "COMPUTE=float32"], trace=False)
    source = folder / "recipe.py"
    if not source.is_file():
        raise BadInput(
            f"{folder} has no recipe.py, the recipe it was trained with; it is of an older jspeed"
        )
    allow(source, trust)
    overrides = config.get("overrides", {})
    sets = [f"{name}={value!r}" for name, value in overrides.items() if name.isupper()]
    fitted = config.get("tokenizer") if "tokens" in overrides else None
    loaded = find(str(source), sets, tokens=fitted, trace=False)  # it has been trained with it
    # init_from, tokens
    added = {name: value for name, value in overrides.items() if not name.isupper()}
    return replace(loaded, fields=loaded.fields | added, overrides=loaded.overrides | added)


def same_function(one: Recipe, other: Recipe) -> bool:
    """Whether both compute the same logits of the same parameters, which have the shapes of
    ``other``."""
    params = jax.eval_shape(lambda: init_parameters(other.parameters, jax.random.key(0)))
    lasts = [(recipe, recipe.stages[-1]) for recipe in (one, other)]
    lane_len = min(last.lane_len for _, last in lasts)
    tokens = jax.ShapeDtypeStruct((1, lane_len), jnp.int32)
    programs = []
    for recipe, last in lasts:
        ctx = Context(
            replace(last, lane_len=lane_len, windows=recipe.eval_windows or last.windows),
            training=False,
        )
        lowered = jax.jit(lambda p, t, recipe=recipe, ctx=ctx: recipe.forward(p, t, ctx)).lower(
            params, tokens
        )
        programs.append(lowered.as_text())
    return programs[0] == programs[1]


def departures(path: Path, loaded: LoadedRecipe, tokenizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a run of ``loaded`` on ids of ``tokenizer`` departs from what the parameters at
    ``path`` are for."""
    folder = path if path.is_dir() else path.parent
    try:
        config = read_config(folder)
        trained = find_trained(folder, config)
        if not same_function(trained.recipe, loaded.recipe):
            names = [
                name
                for name in trained.fields
                if name.isupper() and trained.fields[name] != loaded.fields.get(name)
            ]
            fields = ", ".join(
                f"{name} {trained.fields[name]!r}, here {loaded.fields.get(name)!r}"
                for name in names
            )
            how = fields if trained.source == loaded.source else f"by recipe {trained.recipe.name}"
            yield f"the parameters of {path} were trained to compute something else ({how})"
        facts = (
            gpt2_facts(folder, config)
            if config.get("model_type") == "gpt2"
            else config.get("tokenizer")
        )
        if (
            facts
            and tokenizer
            and any(facts.get(name) != tokenizer.get(name) for name in ("tokenizer", "symbols"))
        ):
            yield (
                f"the parameters of {path} are for other ids of text, those of {facts['tokenizer']}"
            )
    except BadInput as error:
        yield f"how the parameters of {path} were trained is not known: {error}"


def read_parameters(path: Path, recipe: Recipe) -> dict[str, Any]:
    """Return the parameters of ``recipe`` from our file or GPT-2's: those that
    :func:`jspeed.run.export.as_parameters` takes.

    Raises BadInput also for a GPT-2 whose config.json does not describe ``recipe``.
    """
    tensors, metadata = load(path, BUFFERS)
    if metadata.get("format") != OWN["format"]:
        if not is_gpt2(recipe):
            raise BadInput(
                f"{path} is not a jspeed file and recipe {recipe.name} is not a GPT-2; use recipe"
                " gpt2"
            )
        config = read_config(path if path.is_dir() else path.parent)
        if config.get("model_type") != "gpt2":
            raise BadInput(
                f"{path}: config.json describes a run of jspeed but {FILE} is not its; copy both"
                " again"
            )
        check_sizes(path, config, recipe)
        # one array, two names
        tensors |= {name: tensors[kept] for name, kept in metadata.items() if kept in tensors}
        tensors = from_gpt2(
            tensors, path, recipe, tied=config.get("tie_word_embeddings") is not False
        )
    return as_parameters(path, tensors, recipe, metadata.get(LEFT_OUT, ""))
