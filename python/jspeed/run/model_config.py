"""config.json of a folder with a model, a run's or a GPT-2's, and the recipe that it describes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp

from jspeed.corpus.tokenizers import GPT2_BOS
from jspeed.data.manifest import TokenizerFacts
from jspeed.errors import BadInput
from jspeed.fields import Count, check_json, integer, shown
from jspeed.files import read_json
from jspeed.recipe import Context, Recipe, init_parameters
from jspeed.run.find_recipe import LoadedRecipe, find


class OwnConfig(TypedDict):
    """What is read of the config.json of a run or an export."""

    recipe: str
    overrides: NotRequired[dict[str, Any]]
    tokenizer: NotRequired[TokenizerFacts | None]


class GPT2Config(TypedDict):
    """What is read of the config.json of a GPT-2 besides ``AS_GPT2``; without ``n_positions`` there is ``n_ctx``."""

    n_layer: Annotated[int, integer(1, 1000)]  # traced one by one
    n_head: Count
    n_embd: Count
    vocab_size: Count
    n_positions: NotRequired[Count | None]
    n_ctx: NotRequired[Count | None]
    n_inner: NotRequired[Count | None]
    tie_word_embeddings: NotRequired[bool | None]
    bos_token_id: NotRequired[int | None]
    eos_token_id: NotRequired[int | list[int] | None]
    tokenizer: NotRequired[TokenizerFacts | None]


# Fields of transformers' GPT2Config that change what a model computes, and the values with which it is a GPT-2. The
# others change its training (dropouts, initializer_range), memory and rounding (use_cache, reorder_and_upcast_attn,
# chunk_size_feed_forward, dtype), other heads (summary_*, labels), what transformers returns and generates, or nothing.
AS_GPT2: Mapping[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "add_cross_attention": (False, None),
    "quantization_config": (None,),
    "pruned_heads": ({}, None),
    "per_layer_config": ({}, None),
}


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a folder with a model.

    Raises BadInput when there is none, it is neither one of ours nor a GPT-2's, or a GPT-2 that recipe gpt2 is not.
    """
    path = folder / "config.json"
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise BadInput(
            f"{folder} has no config.json; give a run directory, an exported folder, or a folder with GPT-2's "
            "config.json and model.safetensors"
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read ({type(error).__name__}: {error}); copy it again") from None
    if not isinstance(config, dict) or not (config.get("model_type") == "gpt2" or "recipe" in config):
        raise BadInput(f"{path} describes neither a run of jspeed nor a GPT-2 (model_type gpt2); give another folder")
    try:
        check_json(config, GPT2Config if config.get("model_type") == "gpt2" else OwnConfig)
    except BadInput as error:
        raise BadInput(f"{path}: {error}; copy or download it again") from None
    if config.get("model_type") == "gpt2":
        _check_gpt2(path, config)
    return config


def _check_gpt2(path: Path, config: Mapping[str, Any]) -> None:
    width, heads = config["n_embd"], config["n_head"]
    if (config.get("n_positions") or config.get("n_ctx")) is None:
        raise BadInput(f"{path} lacks n_positions; download it again")
    if width % heads:
        raise BadInput(f"{path}: n_embd {width} is not a multiple of n_head {heads}; download it again")
    for name, values in {**AS_GPT2, "n_inner": (None, 4 * width)}.items():
        if (value := config.get(name, values[0])) not in values:
            known = " or ".join(str(each) for each in values if each is not None)
            raise BadInput(
                f"{path}: {name} is {shown(value)}, but recipe gpt2 computes a GPT-2 with {name} {known or 'null'}; "
                "use transformers for this one"
            )


def gpt2_sets(config: Mapping[str, Any]) -> list[str]:
    """Return the ``--set`` with which recipe gpt2 has the sizes of a GPT-2's ``config``."""
    sizes = {"given": tuple(config[name] for name in ("n_layer", "n_head", "n_embd"))}
    ids, positions = config["vocab_size"], config.get("n_positions") or config["n_ctx"]
    return [f"SIZES={sizes}", "SIZE=given", f"VOCAB={ids}", f"BOS={min(GPT2_BOS, ids - 1)}", f"LANE_LEN={positions}"]


def find_trained(folder: Path, config: Mapping[str, Any]) -> LoadedRecipe:
    """Return the recipe of the model in ``folder``, whose ``config`` was read: its own copy, or gpt2 of its size."""
    if config.get("model_type") == "gpt2":
        return find("gpt2", [*gpt2_sets(config), "COMPUTE=float32"])
    source = folder / "recipe.py"
    if not source.is_file():
        raise BadInput(f"{folder} has no recipe.py, the recipe it was trained with; it is of an older jspeed")
    overrides = config.get("overrides", {})
    sets = [f"{name}={value!r}" for name, value in overrides.items() if name.isupper()]
    found = find(str(source), sets, tokens=config.get("tokenizer") if "tokens" in overrides else None)
    added = {name: value for name, value in overrides.items() if not name.isupper()}  # init_from, tokens
    return replace(found, fields=found.fields | added, overrides=found.overrides | added)


def same_function(one: Recipe, other: Recipe) -> bool:
    """Whether both compute the same logits of the same parameters, which have the shapes of ``other``."""
    params = jax.eval_shape(lambda: init_parameters(other.parameters, jax.random.key(0)))
    lasts = [(recipe, recipe.stages[-1]) for recipe in (one, other)]
    lane_len = min(last.lane_len for _, last in lasts)
    tokens = jax.ShapeDtypeStruct((1, lane_len), jnp.int32)
    programs = []
    for recipe, last in lasts:
        ctx = Context(replace(last, lane_len=lane_len, windows=recipe.eval_windows or last.windows), training=False)
        lowered = jax.jit(lambda p, t, recipe=recipe, ctx=ctx: recipe.forward(p, t, ctx)).lower(params, tokens)
        programs.append(lowered.as_text())
    return programs[0] == programs[1]
