"""Read and write parameters as safetensors: under a recipe's own names, or as Hugging Face has GPT-2."""

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.experimental import multihost_utils

from jspeed.errors import BadInput, nearest
from jspeed.files import atomic_path, open_regular, read_json, sha256_of
from jspeed.recipe import Recipe, leaves
from jspeed.run.find_recipe import LoadedRecipe

FILE = "model.safetensors"
BF16 = np.dtype(jnp.bfloat16)
HASH_KEY = "sha256"  # in the metadata of our own files: the file's hash, taken with HASH_PLACEHOLDER there
HASH_ENTRY, HASH_PLACEHOLDER = b'"sha256":"%s"', b"0" * 64
OWN = {"format": "jspeed", HASH_KEY: HASH_PLACEHOLDER.decode()}  # metadata of our files; Hugging Face's say "pt"
Tensors = dict[str, np.ndarray]

# Parameters of a recipe that is a GPT-2 (gpt2, llmc) -> Hugging Face's names. Its Conv1D holds [in, out], as our banks.
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
# Causal masks that older files hold as if they were parameters.
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


def is_gpt2(recipe: Recipe) -> bool:
    """Whether the parameters of ``recipe`` are those of a GPT-2, and it says how many heads it has."""
    return recipe.parameters.keys() == GPT2_NAMES.keys() and recipe.heads is not None


def gathered(params: Any) -> Tensors:
    """Return the parameters by name, whole and on the host; every process calls this."""
    tensors = {}
    for name, array in leaves(params):
        whole = array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True)
        tensors[name] = np.asarray(jax.device_get(whole))
    return tensors


def nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`jspeed.recipe.leaves`."""
    tree: dict[str, Any] = {}
    for name, value in tensors.items():
        *path, last = name.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def own_metadata(found: LoadedRecipe, **more: str) -> dict[str, str]:
    """Return the metadata of a file of our own format."""
    return OWN | {"recipe": found.recipe.name, "recipe_hash": found.hash} | more


def own_config(found: LoadedRecipe, tokenizer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what config.json says of a recipe and of the facts of its ``tokenizer``."""
    config = {"recipe": found.recipe.name, "recipe_hash": found.hash, "fields": found.fields}
    return config | {"overrides": found.overrides, "tokenizer": tokenizer}


def save(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file that appears whole or not at all; a hash that its ``metadata`` asks for is filled in.

    Raises BadInput when there is no room for it, or another reason why it cannot be written.
    """
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}  # a scalar stays one
    with atomic_path(path) as temporary:
        try:
            safetensors.numpy.save_file(contiguous, temporary, dict(metadata))
        except safetensors.SafetensorError as error:
            raise OSError(str(error)) from None
        if HASH_KEY in metadata:
            with open(temporary, "r+b") as file:
                header, digest = _digest(file)
                file.seek(8)
                file.write(header.replace(HASH_ENTRY % HASH_PLACEHOLDER, HASH_ENTRY % digest, 1))


def _digest(file: BinaryIO) -> tuple[bytes, bytes]:
    """Return the header of a safetensors file, its hash blanked, and the SHA-256 of that and of all that follows."""
    size = int.from_bytes(file.read(8), "little")
    header = re.sub(HASH_ENTRY % b"[0-9a-f]{64}", HASH_ENTRY % HASH_PLACEHOLDER, file.read(size), count=1)
    digest = hashlib.sha256(header)
    while part := file.read(1 << 20):
        digest.update(part)
    return header, digest.hexdigest().encode()


def _check_hash(path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        if _digest(file)[1].decode() != expected:
            raise BadInput(f"{path} is damaged (its SHA-256 differs); copy it again")


def load(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file, or of a folder that holds one or several.

    bf16 becomes fp32. Raises BadInput for a file that is missing, not safetensors, or changed since it was written.
    """
    tensors: Tensors = {}
    metadata: dict[str, str] = {}
    for file in _files(path):
        try:
            open_regular(file).close()
            with safetensors.safe_open(file, "np") as opened:
                about = opened.metadata() or {}
                if about.get("format") == OWN["format"] and HASH_KEY in about:
                    _check_hash(file, about[HASH_KEY])
                metadata |= about
                for name in opened.keys():
                    array = opened.get_tensor(name)
                    tensors[name] = array.astype(np.float32) if array.dtype == BF16 else array
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise BadInput(f"{file} cannot be read as safetensors ({error}); copy or download it again") from None
    return tensors, metadata


def fingerprint(path: Path) -> str:
    """Return one SHA-256 of the safetensors files of ``path``. Raises BadInput as :func:`load` does."""
    return hashlib.sha256("".join(sha256_of(file) for file in _files(path)).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    index = path / f"{FILE}.index.json"
    if path.is_file():
        return [path]
    if (path / FILE).is_file():
        return [path / FILE]
    if index.is_file():
        try:
            return [path / name for name in sorted(set(read_json(index)["weight_map"].values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{index} cannot be read ({type(error).__name__}: {error}); download it again") from None
    found = "is not a folder" if path.exists() else "does not exist"
    found = f"holds no {FILE}" if path.is_dir() else found
    raise BadInput(f"{path} {found}; give a run directory, an exported folder or a folder with GPT-2's {FILE}")


def read_parameters(path: Path, recipe: Recipe) -> dict[str, Any]:
    """Return the parameters of ``recipe`` from our file or GPT-2's, in its dtypes, as a tree of NumPy arrays.

    A table of positions that is longer than the recipe's is cut (nanoGPT's block crop). Raises BadInput for missing,
    extra or differently shaped tensors.
    """
    tensors, metadata = load(path)
    if metadata.get("format") != OWN["format"]:
        if not is_gpt2(recipe):
            raise BadInput(f"{path} is not a jspeed file and recipe {recipe.name} is not a GPT-2; use recipe gpt2")
        tensors = from_gpt2(tensors, path)
    specs = dict(leaves(recipe.parameters))
    _same_names(path, tensors, specs, recipe)
    arrays = {}
    for name, spec in specs.items():
        array = tensors[name]
        if spec.axes and spec.axes[0] == "position" and len(array) > spec.shape[0]:
            array = array[: spec.shape[0]]
        if "qkv" in spec.axes and array.size == math.prod(spec.shape):
            array = array.reshape(spec.shape)  # Hugging Face, and older files of ours, have the three side by side
        if array.shape != spec.shape:
            raise BadInput(
                f"{path}: {name} has shape {array.shape} but recipe {recipe.name} has {spec.shape}; --set its fields "
                "to the size of the file (of recipe gpt2: SIZE to 124M, 350M, 774M or 1.5B)"
            )
        arrays[name] = array.astype(spec.dtype)
    return nested(arrays)


def _same_names(path: Path, tensors: Tensors, wanted: Mapping[str, Any], recipe: Recipe) -> None:
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing:
        raise BadInput(
            f"{path} lacks {missing[0]} of recipe {recipe.name}{nearest(missing[0], extra)}; use the recipe "
            "it was trained with"
        )
    if extra:
        raise BadInput(
            f"{path} holds {extra[0]}, which recipe {recipe.name} does not have; use the recipe it was trained with"
        )


def from_gpt2(tensors: Mapping[str, np.ndarray], path: Path) -> Tensors:
    """Return Hugging Face's GPT-2 tensors under our names, layers stacked.

    Raises BadInput when one is missing, or there is one more, or the head is not the embedding.
    """
    left = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    left = {name: array for name, array in left.items() if not BUFFERS.fullmatch(name)}
    head = left.pop("lm_head.weight", None)
    if head is not None and not np.array_equal(head, left.get("wte.weight", head[:0])):
        raise BadInput(f"{path}: lm_head.weight differs from wte.weight, but GPT-2's head is its embedding")
    layers = 1 + max((int(name.split(".")[1]) for name in left if re.match(r"h\.\d+\.", name)), default=-1)
    ours = {}
    for name, theirs in GPT2_NAMES.items():
        names = [theirs.format(layer) for layer in range(layers)] if "{}" in theirs else [theirs]
        for wanted in names or [theirs.format(0)]:
            if wanted not in left:
                raise BadInput(f"{path} lacks {wanted}{nearest(wanted, left)}; expected GPT-2 as Hugging Face has it")
        parts = [left.pop(wanted) for wanted in names]
        ours[name] = np.stack(parts) if "{}" in theirs else parts[0]
    if left:
        raise BadInput(f"{path} holds {min(left)}, which GPT-2 does not have; expected GPT-2 as Hugging Face has it")
    return ours


def to_gpt2(params: Mapping[str, np.ndarray]) -> Tensors:
    """Undo :func:`from_gpt2`."""
    theirs: Tensors = {}
    for name, array in params.items():
        if "{}" in GPT2_NAMES[name]:
            parts = (part.reshape(len(part), -1) if part.ndim > 2 else part for part in array)  # q, k, v side by side
            theirs |= {GPT2_NAMES[name].format(layer): part for layer, part in enumerate(parts)}
        else:
            theirs[GPT2_NAMES[name]] = array
    return theirs


def gpt2_config(recipe: Recipe) -> dict[str, Any]:
    """Return the config.json with which transformers' GPT2LMHeadModel loads the tensors of ``recipe``."""
    vocabulary, width = recipe.parameters["embed"].shape
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
        "bos_token_id": recipe.data.bos_id,
        "eos_token_id": recipe.data.bos_id,
    }
