"""Read and write parameters as safetensors: under a recipe's own names, or as Hugging Face has GPT-2."""

import hashlib
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.experimental import multihost_utils

from jspeed.corpus.gpt2_tokenizer import gpt2_facts
from jspeed.data.manifest import TokenizerFacts
from jspeed.errors import BadInput, nearest
from jspeed.files import atomic_path, open_regular, read_json, sha256_of
from jspeed.recipe import Recipe, leaves
from jspeed.run.find_recipe import LoadedRecipe, find
from jspeed.run.model_config import find_trained, gpt2_sets, read_config, same_function

FILE = "model.safetensors"
BF16 = np.dtype(jnp.bfloat16)
HASH_KEY = "sha256"  # in the metadata of our own files: the file's hash, taken with HASH_PLACEHOLDER there
HASH_ENTRY, HASH_PLACEHOLDER = b'"sha256":"%s"', b"0" * 64
OWN = {"format": "jspeed", HASH_KEY: HASH_PLACEHOLDER.decode()}  # metadata of our files; Hugging Face's say "pt"
LEFT_OUT, STEP = "left_out", "step"  # in the metadata of our own files: tables that it does not hold; steps made
Tensors = dict[str, np.ndarray]

# Parameters of a recipe that is a GPT-2 (gpt2) -> Hugging Face's names. Its Conv1D holds [in, out], as our banks.
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
WRAPPERS = re.compile(r"((_orig_mod|module|transformer)\.)*")  # of torch.compile, DistributedDataParallel, a head
# Causal masks that older files hold as if they were parameters.
BUFFERS = re.compile(WRAPPERS.pattern + r"h\.\d+\.attn\.(bias|masked_bias)")
DTYPES = ("F64", "F32", "F16", "BF16")
OTHER_FILES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")  # of models, not safetensors


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

    bf16 becomes fp32. Raises BadInput for a file that is missing, not safetensors, of other numbers than floats of 16
    bits or more (masks are left out), or changed since it was written.
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
                    kind = opened.get_slice(name).get_dtype()
                    if kind in DTYPES:
                        array = opened.get_tensor(name)
                        tensors[name] = array.astype(np.float32) if array.dtype == BF16 else array
                    elif not BUFFERS.fullmatch(name):
                        wanted = ", ".join(DTYPES)
                        raise BadInput(f"{file} holds {name} in {kind}, quantised; give a file in one of {wanted}")
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
    if path.is_dir() and (others := sorted(each.name for each in path.iterdir() if each.suffix in OTHER_FILES)):
        raise BadInput(
            f"{path} {found} but {others[0]}; convert it where its library is: with transformers, "
            f"AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER) writes {FILE}"
        )
    raise BadInput(f"{path} {found}; give a run directory, an exported folder or a folder with GPT-2's {FILE}")


def read_parameters(path: Path, recipe: Recipe) -> dict[str, Any]:
    """Return the parameters of ``recipe`` from our file or GPT-2's, in its dtypes, as a tree of NumPy arrays.

    A table of positions that is longer than the recipe's is cut (nanoGPT's block crop). Raises BadInput for missing,
    extra or differently shaped tensors, and for a GPT-2 whose config.json does not describe ``recipe``.
    """
    tensors, metadata = load(path)
    if metadata.get("format") != OWN["format"]:
        if not is_gpt2(recipe):
            raise BadInput(f"{path} is not a jspeed file and recipe {recipe.name} is not a GPT-2; use recipe gpt2")
        config = read_config(path if path.is_dir() else path.parent)
        if config.get("model_type") != "gpt2":
            raise BadInput(f"{path}: config.json describes a run of jspeed but {FILE} is not its; copy both again")
        _check_sizes(path, config, recipe)
        tensors |= {name: tensors[kept] for name, kept in metadata.items() if kept in tensors}  # one array, two names
        tensors = from_gpt2(tensors, path, recipe, tied=config.get("tie_word_embeddings") is not False)
    specs = dict(leaves(recipe.parameters))
    _same_names(path, tensors, specs, recipe, metadata.get(LEFT_OUT, ""))
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
                "to those it was trained with"
            )
        arrays[name] = array.astype(spec.dtype)
    return nested(arrays)


def _check_sizes(path: Path, config: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise BadInput where a GPT-2's ``config`` has other sizes than ``recipe``, or fewer positions."""
    vocabulary, width = recipe.parameters["embed"].shape
    ours = {"n_layer": recipe.layers, "n_head": recipe.heads, "n_embd": width, "vocab_size": vocabulary}
    positions, lane_len = config.get("n_positions") or config["n_ctx"], recipe.parameters["positions"].shape[0]
    theirs = {name: config[name] for name in ours} | {"n_positions": min(positions, lane_len)}
    ours["n_positions"] = lane_len
    if theirs == ours:
        return
    differing = [name for name in ours if theirs[name] != ours[name]]
    named = {shape: size for size, shape in find("gpt2", trace=False).fields["SIZES"].items()}
    sizes, given, vocab, bos, lane = gpt2_sets(config)
    size = named.get(tuple(config[name] for name in ("n_layer", "n_head", "n_embd")))
    sets = ([f"SIZE={size}"] if size else [sizes.replace("'", '"'), given]) if {*differing} & {*list(ours)[:3]} else []
    sets += [vocab, bos] if "vocab_size" in differing else []
    sets += [lane] if "n_positions" in differing else []
    raise BadInput(
        f"{path} is a GPT-2 with {', '.join(f'{name} {theirs[name]}' for name in differing)} but recipe {recipe.name} "
        f"has {', '.join(f'{name} {ours[name]}' for name in differing)}; of recipe gpt2, --set {shlex.join(sets)}"
    )


def departures(path: Path, found: LoadedRecipe, tokenizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a run of ``found`` on ids of ``tokenizer`` departs from what the parameters at ``path`` are for."""
    folder = path if path.is_dir() else path.parent
    try:
        config = read_config(folder)
        trained = find_trained(folder, config)
        if not same_function(trained.recipe, found.recipe):
            names = [
                name for name in trained.fields if name.isupper() and trained.fields[name] != found.fields.get(name)
            ]
            fields = ", ".join(f"{name} {trained.fields[name]!r}, here {found.fields.get(name)!r}" for name in names)
            how = fields if trained.source == found.source else f"by recipe {trained.recipe.name}"
            yield f"the parameters of {path} were trained to compute something else ({how})"
        facts = gpt2_facts(folder, config) if config.get("model_type") == "gpt2" else config.get("tokenizer")
        if facts and tokenizer and any(facts.get(name) != tokenizer.get(name) for name in ("tokenizer", "symbols")):
            yield f"the parameters of {path} are for other ids of text, those of {facts['tokenizer']}"
    except BadInput as error:
        yield f"how the parameters of {path} were trained is not known: {error}"


def _same_names(path: Path, tensors: Tensors, wanted: Mapping[str, Any], recipe: Recipe, left_out: str) -> None:
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing:
        remedy = "give a checkpoint of its run, which has it" if left_out else "use the recipe it was trained with"
        what = f"{left_out}, too large for it" if left_out else missing[0]
        raise BadInput(f"{path} lacks {what}, of recipe {recipe.name}{nearest(missing[0], extra)}; {remedy}")
    if extra:
        raise BadInput(
            f"{path} holds {extra[0]}, which recipe {recipe.name} does not have; use the recipe it was trained with"
        )


def from_gpt2(tensors: Mapping[str, np.ndarray], path: Path, recipe: Recipe, tied: bool = True) -> Tensors:
    """Return Hugging Face's GPT-2 tensors under our names, layers stacked; ``tied``: it may lack the head.

    Raises BadInput when one is missing or of another shape, there is one more, or the head is not the embedding.
    """
    left = {WRAPPERS.sub("", name, count=1): each for name, each in tensors.items() if not BUFFERS.fullmatch(name)}
    head = left.pop("lm_head.weight", None)
    if head is None and not tied:
        raise BadInput(f"{path} lacks lm_head.weight, a head of its own by tie_word_embeddings; download it again")
    if head is not None and not np.array_equal(head, left.get("wte.weight", head)):
        raise BadInput(
            f"{path}: lm_head.weight differs from wte.weight, but the head of recipe gpt2 is its embedding; use "
            "transformers for it"
        )
    ours = {}
    for name, theirs in GPT2_NAMES.items():
        stacked = "{}" in theirs
        shape = recipe.parameters[name].shape[stacked:]
        shape = (*shape[:1], math.prod(shape[1:])) if len(shape) > 1 else shape  # queries, keys, values side by side
        names = [theirs.format(layer) for layer in range(recipe.layers)] if stacked else [theirs]
        parts = [_taken(left, wanted, shape, path) for wanted in names]
        ours[name] = np.stack(parts) if stacked else parts[0]
    if left:
        raise BadInput(
            f"{path} holds {min(left)}, which a GPT-2 of {recipe.layers} layers does not have; download it again"
        )
    return ours


def _taken(left: Tensors, name: str, shape: tuple[int, ...], path: Path) -> np.ndarray:
    """Remove and return a tensor of ``shape``; that of positions may be longer."""
    if name not in left:
        raise BadInput(f"{path} lacks {name}; expected GPT-2 as Hugging Face has it")
    array = left.pop(name)
    if array.shape == shape[::-1] != shape and name.startswith("h."):
        raise BadInput(
            f"{path}: {name} has shape {array.shape}, [out, in] as nanoGPT's Linear; transpose c_attn, c_proj and c_fc "
            "to [in, out], as Hugging Face's GPT-2 has them"
        )
    longer = name == "wpe.weight" and array.shape[1:] == shape[1:] and len(array) > shape[0]
    if array.shape != shape and not longer:
        raise BadInput(f"{path}: {name} has shape {array.shape} but config.json says {shape}; download both again")
    return array


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


def gpt2_config(recipe: Recipe, facts: TokenizerFacts) -> dict[str, Any]:
    """Return the config.json with which transformers' GPT2LMHeadModel loads the tensors of ``recipe``."""
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
