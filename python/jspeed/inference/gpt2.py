"""GPT-2 as Hugging Face has it: its config.json, the names and shapes of its tensors, and recipe
gpt2's of its size."""

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np

from jspeed.data.manifest import TokenizerFacts
from jspeed.data.tokens import GPT2_BOS
from jspeed.errors import BadInput
from jspeed.fields import Count, integer, shown
from jspeed.recipe import Recipe
from jspeed.run.export import Tensors
from jspeed.run.find_recipe import find

# Parameters of a recipe that is a GPT-2 (gpt2) -> Hugging Face's names. Its Conv1D holds [in, out],
# as our banks.
GPT2_NAMES = {
    "embed": "wte.weight",
    "positions": "wpe.weight",
    "attention_gain": "h.{}.ln_1.weight",
    "attention_bias": "h.{}.ln_1.bias",
    "qkv": "h.{}.attn.c_attn.weight",
    "qkv_bias": "h.{}.attn.c_attn.bias",
    "out": "h.{}.attn.c_proj.weight",
    "out_bias": "h.{}.attn.c_proj.bias",
    "mlp_gain": "h.{}.ln_2.weight",
    "mlp_bias": "h.{}.ln_2.bias",
    "up": "h.{}.mlp.c_fc.weight",
    "up_bias": "h.{}.mlp.c_fc.bias",
    "down": "h.{}.mlp.c_proj.weight",
    "down_bias": "h.{}.mlp.c_proj.bias",
    "final_gain": "ln_f.weight",
    "final_bias": "ln_f.bias",
}
# of torch.compile, DistributedDataParallel, a head
WRAPPERS = re.compile(r"((_orig_mod|module|transformer)\.)*")
# Causal masks that older files hold as if they were parameters.
BUFFERS = re.compile(WRAPPERS.pattern + r"h\.\d+\.attn\.(bias|masked_bias)")


class GPT2Config(TypedDict):
    """What is read of the config.json of a GPT-2 besides ``AS_GPT2``; without ``n_positions`` there
    is ``n_ctx``."""

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


# Fields of transformers' GPT2Config that change what a model computes, and the values with which it
# is a GPT-2. The others change its training (dropouts, initializer_range), memory and rounding
# (use_cache, reorder_and_upcast_attn, chunk_size_feed_forward, dtype), other heads (summary_*,
# labels), what transformers returns and generates, or nothing.
AS_GPT2: Mapping[str, tuple[Any, ...]] = {
    "activation_function": (
        "gelu_new",
        "gelu_pytorch_tanh",
        "gelu_python_tanh",
        "gelu_fast",
        "gelu_accurate",
    ),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "add_cross_attention": (False, None),
    "quantization_config": (None,),
    "pruned_heads": ({}, None),
    "per_layer_config": ({}, None),
}


def is_gpt2(recipe: Recipe) -> bool:
    """Whether the parameters of ``recipe`` are those of a GPT-2, and it says how many heads it
    has."""
    return recipe.parameters.keys() == GPT2_NAMES.keys() and recipe.heads is not None


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raise BadInput where a GPT-2's ``config``, of the right types, is one that recipe gpt2 is
    not."""
    width, heads = config["n_embd"], config["n_head"]
    if (config.get("n_positions") or config.get("n_ctx")) is None:
        raise BadInput(f"{path} lacks n_positions; download it again")
    if width % heads:
        raise BadInput(
            f"{path}: n_embd {width} is not a multiple of n_head {heads}; download it again"
        )
    for name, values in {**AS_GPT2, "n_inner": (None, 4 * width)}.items():
        if (value := config.get(name, values[0])) not in values:
            known = " or ".join(str(each) for each in values if each is not None)
            raise BadInput(
                f"{path}: {name} is {shown(value)}, but recipe gpt2 computes a GPT-2 with {name}"
                f" {known or 'null'}; use transformers for this one"
            )


def gpt2_sets(config: Mapping[str, Any]) -> list[str]:
    """Return the ``--set`` with which recipe gpt2 has the sizes of a GPT-2's ``config``."""
    sizes = {"given": tuple(config[name] for name in ("n_layer", "n_head", "n_embd"))}
    ids, positions = config["vocab_size"], config.get("n_positions") or config["n_ctx"]
    return [
        f"SIZES={sizes}",
        "SIZE=given",
        f"VOCAB={ids}",
        f"BOS={min(GPT2_BOS, ids - 1)}",
        f"LANE_LEN={positions}",
    ]


def check_sizes(path: Path, config: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise BadInput where a GPT-2's ``config`` has other sizes than ``recipe``, or fewer
    positions."""
    vocabulary, width = recipe.parameters["embed"].shape
    ours = {
        "n_layer": recipe.layers,
        "n_head": recipe.heads,
        "n_embd": width,
        "vocab_size": vocabulary,
    }
    positions, lane_len = (
        config.get("n_positions") or config["n_ctx"],
        recipe.parameters["positions"].shape[0],
    )
    theirs = {name: config[name] for name in ours} | {"n_positions": min(positions, lane_len)}
    ours["n_positions"] = lane_len
    if theirs == ours:
        return
    differing = [name for name in ours if theirs[name] != ours[name]]
    named = {shape: size for size, shape in find("gpt2", trace=False).fields["SIZES"].items()}
    sizes, given, vocab, bos, lane = gpt2_sets(config)
    size = named.get(tuple(config[name] for name in ("n_layer", "n_head", "n_embd")))
    sets = (
        ([f"SIZE={size}"] if size else [sizes.replace("'", '"'), given])
        if {*differing} & {*list(ours)[:3]}
        else []
    )
    sets += [vocab, bos] if "vocab_size" in differing else []
    sets += [lane] if "n_positions" in differing else []
    raise BadInput(
        f"{path} is a GPT-2 with {', '.join(f'{name} {theirs[name]}' for name in differing)} but"
        f" recipe {recipe.name} has {', '.join(f'{name} {ours[name]}' for name in differing)}; of"
        f" recipe gpt2, --set {shlex.join(sets)}"
    )


def from_gpt2(
    tensors: Mapping[str, np.ndarray], path: Path, recipe: Recipe, tied: bool = True
) -> Tensors:
    """Return Hugging Face's GPT-2 tensors under our names, layers stacked; ``tied``: it may lack
    the head.

    Raises BadInput when one is missing or of another shape, there is one more, or the head is not
    the embedding.
    """
    left = {
        WRAPPERS.sub("", name, count=1): each
        for name, each in tensors.items()
        if not BUFFERS.fullmatch(name)
    }
    head = left.pop("lm_head.weight", None)
    if head is None and not tied:
        raise BadInput(
            f"{path} lacks lm_head.weight, a head of its own by tie_word_embeddings; download it"
            " again"
        )
    if head is not None and not np.array_equal(head, left.get("wte.weight", head)):
        raise BadInput(
            f"{path}: lm_head.weight differs from wte.weight, but the head of recipe gpt2 is its"
            " embedding; use transformers for it"
        )
    ours = {}
    for name, theirs in GPT2_NAMES.items():
        stacked = "{}" in theirs
        shape = recipe.parameters[name].shape[stacked:]
        # queries, keys, values side by side
        shape = (*shape[:1], math.prod(shape[1:])) if len(shape) > 1 else shape
        names = [theirs.format(layer) for layer in range(recipe.layers)] if stacked else [theirs]
        parts = [_taken(left, wanted, shape, path) for wanted in names]
        ours[name] = np.stack(parts) if stacked else parts[0]
    if left:
        raise BadInput(
            f"{path} holds {min(left)}, which a GPT-2 of {recipe.layers} layers does not have;"
            " download it again"
        )
    return ours


def _taken(left: Tensors, name: str, shape: tuple[int, ...], path: Path) -> np.ndarray:
    """Remove and return a tensor of ``shape``; that of positions may be longer."""
    if name not in left:
        raise BadInput(f"{path} lacks {name}; expected GPT-2 as Hugging Face has it")
    array = left.pop(name)
    if array.shape == shape[::-1] != shape and name.startswith("h."):
        raise BadInput(
            f"{path}: {name} has shape {array.shape}, [out, in] as nanoGPT's Linear; transpose"
            " c_attn, c_proj and c_fc to [in, out], as Hugging Face's GPT-2 has them"
        )
    longer = name == "wpe.weight" and array.shape[1:] == shape[1:] and len(array) > shape[0]
    if array.shape != shape and not longer:
        raise BadInput(
            f"{path}: {name} has shape {array.shape} but config.json says {shape}; download both"
            " again"
        )
    return array


def to_gpt2(params: Mapping[str, np.ndarray]) -> Tensors:
    """Undo :func:`from_gpt2`."""
    theirs: Tensors = {}
    for name, array in params.items():
        if "{}" in GPT2_NAMES[name]:
            # q, k, v side by side
            parts = (part.reshape(len(part), -1) if part.ndim > 2 else part for part in array)
            theirs |= {GPT2_NAMES[name].format(layer): part for layer, part in enumerate(parts)}
        else:
            theirs[GPT2_NAMES[name]] = array
    return theirs


def gpt2_config(recipe: Recipe, facts: TokenizerFacts) -> dict[str, Any]:
    """Return the config.json with which transformers' GPT2LMHeadModel loads the tensors of
    ``recipe``."""
    vocabulary, width = recipe.parameters["embed"].shape
    ends = facts.get("end_ids", [facts["bos_id"]])
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocabulary,
        "n_positions": recipe.parameters["positions"].shape[0],
        "n_embd": width,
        "n_layer": recipe.layers,
        "n_head": recipe.heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": facts["bos_id"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "tokenizer": facts,  # for us: transformers reads that of a folder from its files
    }
