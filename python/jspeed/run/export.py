"""Read and write parameters as safetensors: a run's file, an exported one, or a GPT-2's."""

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jspeed.base.files import atomic_path, open_regular, read_json, sha256_of, what_instead
from jspeed.errors import BadInput, nearest
from jspeed.fields import shown
from jspeed.parallel.mesh import whole
from jspeed.recipe import ParamSpec, Recipe, leaves, without_sparse
from jspeed.run.find_recipe import LoadedRecipe

Tensors = dict[str, np.ndarray]

FILE = "model.safetensors"
BF16 = np.dtype(jnp.bfloat16)
# in the metadata of our own files: the file's hash, taken with HASH_PLACEHOLDER there
HASH_KEY = "sha256"
HASH_ENTRY, HASH_PLACEHOLDER = b'"sha256":"%s"', b"0" * 64
# metadata of our files; Hugging Face's say "pt"
OWN = {"format": "jspeed", HASH_KEY: HASH_PLACEHOLDER.decode()}
# in the metadata of our own files: tables that it does not hold; steps made
LEFT_OUT, STEP = "left_out", "step"
LARGE = 4 * 2**30  # bytes of sparse tables, more than which a run writes into no file
NOTHING = re.compile("(?!)")  # matches no name
DTYPES = ("F64", "F32", "F16", "BF16")
# of models, not safetensors
OTHER_FILES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")


def gathered(params: Any) -> Tensors:
    """Return the parameters by name, whole and on the host; every process calls this."""
    return {name: whole(array) for name, array in leaves(params)}


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


def own_metadata(loaded: LoadedRecipe, **more: str) -> dict[str, str]:
    """Return the metadata of a file of our own format."""
    return OWN | {"recipe": loaded.recipe.name, "recipe_hash": loaded.hash} | more


def own_config(loaded: LoadedRecipe, tokenizer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what config.json says of a recipe and of the facts of its ``tokenizer``."""
    config = {"recipe": loaded.recipe.name, "recipe_hash": loaded.hash, "fields": loaded.fields}
    return config | {"overrides": loaded.overrides, "tokenizer": tokenizer}


def large_tables(recipe: Recipe) -> tuple[str, ...]:
    """Return the sparse tables that a run's file leaves out: all, if together they have
    more than LARGE bytes.

    They may be larger than a host's memory. Checkpoints hold them, each device's part apart.
    """
    return tuple(_tables(recipe)) if _bytes_of_tables(recipe) > LARGE else ()


def _tables(recipe: Recipe) -> dict[str, ParamSpec]:
    return {path: spec for path, spec in leaves(recipe.parameters) if spec.sparse_rows}


def _bytes_of_tables(recipe: Recipe) -> int:
    specs = _tables(recipe).values()
    return sum(spec.size * jnp.dtype(spec.dtype).itemsize for spec in specs)


def to_write(recipe: Recipe, params: Any, on_host: Callable[[], Tensors] = dict) -> Tensors:
    """Return the parameters that a run writes, by name, whole and on the host; every process calls
    this. ``on_host`` gives the tables that lie there."""
    if large_tables(recipe):
        return gathered(without_sparse(recipe, params))
    return gathered(params) | on_host()


def run_metadata(loaded: LoadedRecipe, step: int, **more: str) -> dict[str, str]:
    """Return the metadata of a file of :func:`to_write` after ``step`` steps."""
    absent = {LEFT_OUT: ", ".join(tables)} if (tables := large_tables(loaded.recipe)) else {}
    return own_metadata(loaded, **{STEP: str(step)} | absent | more)


def note_on_large_tables(recipe: Recipe, saved: bool) -> str:
    """Say what a run's file leaves out, and where it is, or how to keep it."""
    where = (
        "the last checkpoint has it" if saved else "with --checkpoint-every N a checkpoint has it"
    )
    size, names = f"{_bytes_of_tables(recipe) / 1e9:,.1f} GB", ", ".join(_tables(recipe))
    return f"{FILE} leaves out {names}, {size} updated row by row; {where}"


def save(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file that appears whole or not at all; a hash that its ``metadata`` asks
    for is filled in.

    Raises BadInput when there is no room for it, or another reason why it cannot be written.
    """
    # a scalar stays one
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
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
    """Return the header of a safetensors file, its hash blanked, and the SHA-256 of that and of all
    that follows."""
    size = int.from_bytes(file.read(8), "little")
    header = re.sub(
        HASH_ENTRY % b"[0-9a-f]{64}", HASH_ENTRY % HASH_PLACEHOLDER, file.read(size), count=1
    )
    digest = hashlib.sha256(header)
    while part := file.read(1 << 20):
        digest.update(part)
    return header, digest.hexdigest().encode()


def _check_hash(path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        if _digest(file)[1].decode() != expected:
            raise BadInput(f"{path} is damaged (its SHA-256 differs); copy it again")


def load(path: Path, masks: re.Pattern[str] = NOTHING) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file, or of a folder that holds one or
    several.

    bf16 becomes fp32. Raises BadInput for a file that is missing, not safetensors, or changed since
    it was written. So it does for other numbers than floats of 16 bits or more. Tensors called as
    ``masks`` are left out.
    """
    tensors: Tensors = {}
    metadata: dict[str, str] = {}
    for file in _files(path):
        try:
            open_regular(file).close()
            with safetensors.safe_open(file, "np") as opened:
                file_metadata = opened.metadata() or {}
                if file_metadata.get("format") == OWN["format"] and HASH_KEY in file_metadata:
                    _check_hash(file, file_metadata[HASH_KEY])
                metadata |= file_metadata
                for name in opened.keys():
                    kind = opened.get_slice(name).get_dtype()
                    if kind in DTYPES:
                        array = opened.get_tensor(name)
                        tensors[name] = array.astype(np.float32) if array.dtype == BF16 else array
                    elif not masks.fullmatch(name):
                        wanted = ", ".join(DTYPES)
                        raise BadInput(
                            f"{file} holds {name} in {kind}, quantised; give a file in one of"
                            f" {wanted}"
                        )
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise BadInput(
                f"{file} cannot be read as safetensors ({what_instead(file) or error}); copy or"
                " download it again"
            ) from None
    return tensors, metadata


def fingerprint(path: Path) -> str:
    """Return one SHA-256 of the safetensors files of ``path``. Raises BadInput as :func:`load`
    does."""
    return hashlib.sha256("".join(sha256_of(file) for file in _files(path)).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    index = path / f"{FILE}.index.json"
    if path.is_file() or (path.is_symlink() and not path.exists()):
        return [path]
    if os.path.lexists(path / FILE):
        return [path / FILE]
    if index.is_file():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
            if outside := [n for n in names if n == ".." or Path(n).name != n]:
                raise BadInput(
                    f"{index} names {shown(outside[0])}, which is not a file of its own folder;"
                    " download it again, from whom you trust"
                )
            return [path / name for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(
                f"{index} cannot be read ({type(error).__name__}: {error}); download it again"
            ) from None
    what = "is not a folder" if path.exists() else "does not exist"
    what = f"holds no {FILE}" if path.is_dir() else what
    if path.is_dir() and (
        others := sorted(each.name for each in path.iterdir() if each.suffix in OTHER_FILES)
    ):
        raise BadInput(
            f"{path} {what} but {others[0]}; convert it where its library is: with transformers, "
            f"AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER) writes {FILE}"
        )
    raise BadInput(
        f"{path} {what}; give a run directory, an exported folder or a folder with GPT-2's {FILE}"
    )


def read_parameters(path: Path, recipe: Recipe) -> dict[str, Any]:
    """Return the parameters of ``recipe`` from our file: :func:`fitted`. Raises BadInput for
    another's."""
    tensors, metadata = load(path)
    if metadata.get("format") != OWN["format"]:
        raise BadInput(
            f"{path} is not a jspeed file, and jspeed.inference, which reads a GPT-2's, is not"
            " installed; give a run directory or an exported folder"
        )
    return as_parameters(path, tensors, recipe, metadata.get(LEFT_OUT, ""))


def as_parameters(
    path: Path, tensors: Tensors, recipe: Recipe, left_out: str = ""
) -> dict[str, Any]:
    """Return ``tensors``, read from ``path``, as the parameters of ``recipe``, in its dtypes: a
    tree of NumPy arrays, None in the place of tables in the host's memory.

    A table of positions that is longer than the recipe's is cut (nanoGPT's block crop). Raises
    BadInput for missing (but for ``left_out``, for which another file is named), extra or
    differently shaped tensors.
    """
    specs = dict(leaves(recipe.parameters))
    wanted = {name: spec for name, spec in specs.items() if not spec.on_host}
    _same_names(path, tensors, wanted, recipe, left_out)
    arrays: dict[str, Any] = dict.fromkeys(specs)
    for name, spec in wanted.items():
        array = tensors[name]
        if spec.axes and spec.axes[0] == "position" and len(array) > spec.shape[0]:
            array = array[: spec.shape[0]]
        if "qkv" in spec.axes and array.size == math.prod(spec.shape):
            # Hugging Face, and older files of ours, have the three side by side
            array = array.reshape(spec.shape)
        if array.shape != spec.shape:
            raise BadInput(
                f"{path}: {name} has shape {array.shape} but recipe {recipe.name} has {spec.shape};"
                " --set its fields to those it was trained with"
            )
        arrays[name] = array.astype(spec.dtype)
    return nested(arrays)


def _same_names(
    path: Path, tensors: Tensors, wanted: Mapping[str, Any], recipe: Recipe, left_out: str
) -> None:
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing:
        remedy = (
            "give a checkpoint of its run, which has it"
            if left_out
            else "use the recipe it was trained with"
        )
        what = f"{left_out}, too large for it" if left_out else missing[0]
        raise BadInput(
            f"{path} lacks {what}, of recipe {recipe.name}{nearest(missing[0], extra)}; {remedy}"
        )
    if extra:
        raise BadInput(
            f"{path} holds {extra[0]}, which recipe {recipe.name} does not have; use the recipe it"
            " was trained with"
        )
