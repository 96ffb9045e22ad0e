"""Load a trained model from a run directory, a checkpoint, an exported folder or Hugging Face's
GPT-2."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import safetensors
from jax.sharding import Mesh

from jspeed._dataloader import available_memory
from jspeed.cli.satellites import hooks
from jspeed.corpus.gpt2_tokenizer import gpt2_facts
from jspeed.corpus.tokenizers import Tokenizer, tokenizer_of
from jspeed.data.manifest import TokenizerFacts
from jspeed.data.tokens import GPT2
from jspeed.errors import BadInput
from jspeed.inference.model_config import find_trained, read_config, read_parameters
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.parallel.mesh import find_devices, make_mesh, put
from jspeed.recipe import Recipe, leaves
from jspeed.run.checkpoint import damage, restore, steps_in
from jspeed.run.compute.accumulators import by_path, from_paths
from jspeed.run.compute.device import device_of
from jspeed.run.compute.host_tables import files_of, tables_on_host
from jspeed.run.compute.program import state_shardings
from jspeed.run.compute.step import to_compute_dtype
from jspeed.run.export import FILE, LEFT_OUT, STEP, Tensors, gathered
from jspeed.run.find_recipe import LoadedRecipe


@dataclass(frozen=True)
class Model:
    """A recipe, its trained parameters on the devices of ``mesh``, and the facts of its tokenizer
    (see a manifest).

    ``folder`` holds the tokenizer's file, where it has one; ``gpt2``: it is Hugging Face's of a
    GPT-2. ``trained``: the seed and the steps of its run, where they are known. ``tables``: files
    of the tables that its run had in the host's memory, by name.
    """

    found: LoadedRecipe
    params: Any
    mesh: Mesh
    facts: TokenizerFacts
    folder: Path | None = None
    gpt2: bool = False
    trained: tuple[int, int] | None = None
    tables: Mapping[str, Sequence[Path]] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """The recipe, fields as they were in training."""
        return self.found.recipe

    @cached_property
    def compute_params(self) -> Any:
        """The parameters in their compute dtypes."""
        return jax.jit(partial(to_compute_dtype, self.recipe))(self.params)

    def tensors(self) -> Tensors:
        """Return the parameters on the host under their names."""
        return gathered(self.params)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises BadInput where its vocabulary cannot be fetched."""
        return tokenizer_of(self.facts, self.folder)


def load_model(
    path: Path, mesh: Mesh | None = None, trust: bool = False, whole: bool = True
) -> Model:
    """Load a run directory, a checkpoint of one (``RUN/checkpoints/STEP``), an exported folder, or
    a folder with GPT-2 as Hugging Face has it.

    Of a run directory these are its final parameters. Where large tables are left out of those it
    is the checkpoint of the last step; where there are none, the newest undamaged checkpoint.

    The parameters are on ``mesh`` (default: this process's first device), sharded by the default
    layout. So are tables that the run had in the host's memory, or None where not ``whole``. Its
    recipe.py runs where :func:`jspeed.run.evidence.foreign_code.allow` lets it, or with ``trust``.
    Raises BadInput with what is there and what was expected.
    """
    mesh = mesh or make_mesh({"data": 1}, find_devices(local=True)[:1])
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise BadInput(
            f"{path} {what}; give a run directory, a checkpoint of one, or a folder with {FILE}"
        )
    step = None
    run_dir = path
    at = path.absolute()
    if at.name.isdecimal() and at.parent.name == "checkpoints":
        step, run_dir = int(at.name), at.parent.parent
    config = read_config(run_dir)
    loaded = find_trained(run_dir, config, trust)
    facts = facts_of(run_dir, config, loaded.recipe)
    metadata = metadata_of(path / FILE)
    made = metadata.get(STEP) if LEFT_OUT in metadata else None  # of an export it says none
    if made and (run_dir / "checkpoints" / made).is_dir():
        step = int(made)
    recipe, place = loaded.recipe, path
    if step is not None or not os.path.lexists(path / FILE) and "recipe" in config:
        step = undamaged(run_dir / "checkpoints", step)
        place = run_dir / "checkpoints" / str(step)
    if tables := files_of_tables(place, recipe):
        recipe = tables_on_host(recipe)
    shapes, shardings = state_shardings(recipe, DEFAULT_LAYOUT, mesh)
    if step is None:
        params = jax.tree.map(put, read_parameters(path, recipe), shardings["params"])
    else:
        params = restore(place.parent, step, shapes)["params"]
    if tables and whole:
        params = with_tables(loaded.recipe, params, place, mesh)
    require_finite(params, path)
    seed, steps = (
        config.get("options", {}).get("seed"),
        metadata.get(STEP) if step is None else step,
    )
    trained = None if seed is None or steps is None else (int(seed), int(steps))
    return Model(
        loaded, params, mesh, facts, run_dir, config.get("model_type") == "gpt2", trained, tables
    )


def metadata_of(file: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file, nothing where it cannot be read."""
    with (
        suppress(safetensors.SafetensorError, OSError, ValueError),
        safetensors.safe_open(file, "np") as opened,
    ):
        return opened.metadata() or {}
    return {}


def facts_of(folder: Path, config: Mapping[str, Any], recipe: Recipe) -> TokenizerFacts:
    """Return the facts of the tokenizer of the model in ``folder``.

    Raises BadInput where nothing says how text becomes ids, or where these are more than the model
    has room for.
    """
    if config.get("model_type") == "gpt2":
        facts = gpt2_facts(folder, config)
    elif config.get("tokenizer") is None and recipe.data.bos_id != GPT2["bos_id"]:
        raise BadInput(
            f"{folder}/config.json does not say how text becomes tokens; train on a folder with a"
            " manifest"
        )
    else:
        facts = config.get("tokenizer") or GPT2
    if facts["vocab_size"] > recipe.vocab_size:
        raise BadInput(
            f"{folder}: {facts['tokenizer']} makes {facts['vocab_size']:,} ids of text, but the"
            f" model has room for {recipe.vocab_size:,}; give it the tokenizer that it was trained"
            " with"
        )
    return facts


def require_finite(params: Any, path: Path) -> None:
    """Raise BadInput for parameters that hold NaN or infinity, of which a model says nothing."""
    finite = jax.jit(
        lambda params: jax.tree.map(lambda array: jnp.all(jnp.isfinite(array)), params)
    )(params)
    leaves = jax.tree.leaves_with_path(finite)
    bad = [
        jax.tree_util.keystr(where, simple=True, separator=".")
        for where, good in leaves
        if not good
    ]
    if bad:
        raise BadInput(
            f"{path}: {len(bad)} of its parameters hold numbers that are not finite, the first is"
            f" {bad[0]}; the training diverged, or the file is damaged: give another model, or a"
            " checkpoint (RUN/checkpoints/STEP)"
        )


def undamaged(folder: Path, step: int | None) -> int:
    """Return the step of one checkpoint, or of the newest that is not damaged. Raises BadInput for
    none."""
    steps = [step] if step is not None else sorted(steps_in(folder), reverse=True)
    wrong = "there is none"
    for number in steps:
        wrong = damage(folder, number) or ""
        if not wrong:
            return number
    if step is not None:
        raise BadInput(
            f"{folder / str(step)} is damaged ({wrong}); give another checkpoint, or"
            f" {folder.parent}"
        )
    raise BadInput(
        f"{folder.parent} holds neither {FILE} nor a whole checkpoint ({wrong}); train it first"
    )


def files_of_tables(folder: Path, recipe: Recipe) -> dict[str, list[Path]]:
    """Return the files in ``folder`` of tables that were in the host's memory, by name: of each
    process one."""
    names = [name for name, spec in leaves(recipe.parameters) if spec.sparse_rows]
    return {name: files for name in names if (files := files_of(folder, name))}


def with_tables(recipe: Recipe, params: Any, folder: Path, mesh: Mesh) -> Any:
    """Return ``params`` with the tables whose files are in ``folder``, on the devices of ``mesh``.

    Raises BadInput where a device, or the host's memory, has no room for them.
    """
    moved = tables_on_host(recipe)
    need = sum(2 * spec.size for spec in moved.on_host.values())
    device = device_of(mesh, recipe=recipe)
    # the host has them as rows in use, whole, and on a CPU as an array of JAX's too
    copies = 3 if device.platform == "cpu" else 2
    for what, each, limit in (
        ("of a device", need / mesh.size, device.memory),
        ("of this machine", copies * need, available_memory()),
    ):
        if limit and each > limit:
            raise BadInput(
                f"{folder}: its tables of {need / 1e9:,.1f} GB need {each / 1e9:,.1f} GB {what},"
                f" and there are {limit / 1e9:,.1f}; use more devices (--mesh), or larger ones"
            )
    tables = hooks().host_tables(moved, mesh)
    tables.load(folder)
    places = by_path(recipe, state_shardings(recipe, DEFAULT_LAYOUT, mesh)[1]["params"])
    placed = {name: put(array, places[name]) for name, array in tables.whole().items()}
    return from_paths(recipe, by_path(moved, params) | placed)
