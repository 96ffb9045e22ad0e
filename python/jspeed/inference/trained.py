"""Load a trained model from a run directory, a checkpoint, an exported folder or Hugging Face's GPT-2."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jspeed.corpus.tokenizers import GPT2, Tokenizer, tokenizer_of
from jspeed.data.manifest import TokenizerFacts
from jspeed.errors import BadInput
from jspeed.fields import Count, check_json, integer
from jspeed.files import read_json
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.parallel.mesh import find_devices, make_mesh, put
from jspeed.recipe import Recipe
from jspeed.run.checkpoint import damage, restore, steps_in
from jspeed.run.compute.program import state_shardings
from jspeed.run.compute.step import to_compute_dtype
from jspeed.run.export import FILE, Tensors, gathered, read_parameters
from jspeed.run.find_recipe import LoadedRecipe, find


class OwnConfig(TypedDict):
    """What is read of the config.json of a run or an export."""

    recipe: str
    overrides: NotRequired[dict[str, Any]]
    tokenizer: NotRequired[TokenizerFacts | None]


class GPT2Config(TypedDict):
    """What is read of the config.json of a GPT-2; without ``n_positions`` there is ``n_ctx``."""

    n_layer: Annotated[int, integer(1, 1000)]  # traced one by one
    n_head: Count
    n_embd: Count
    vocab_size: Count
    n_positions: NotRequired[Count | None]
    n_ctx: NotRequired[Count | None]
    tokenizer: NotRequired[TokenizerFacts | None]


@dataclass(frozen=True)
class Model:
    """A recipe, its trained parameters on the devices of ``mesh``, and the facts of its tokenizer (see a manifest).

    ``folder`` holds the tokenizer's file, where it has one.
    """

    found: LoadedRecipe
    params: Any
    mesh: Mesh
    facts: TokenizerFacts
    folder: Path | None = None

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


def load_model(path: Path, mesh: Mesh | None = None) -> Model:
    """Load a run directory (its final parameters, or its newest undamaged checkpoint), one checkpoint of it
    (``RUN/checkpoints/STEP``), an exported folder, or a folder with GPT-2 as Hugging Face has it.

    The parameters are on ``mesh`` (default: this process's first device), sharded by the default layout. Raises
    BadInput with what is there and what was expected.
    """
    mesh = mesh or make_mesh({"data": 1}, find_devices(local=True)[:1])
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise BadInput(f"{path} {what}; give a run directory, a checkpoint of one, or a folder with {FILE}")
    step = None
    run_dir = path
    at = path.absolute()
    if at.name.isdecimal() and at.parent.name == "checkpoints":
        step, run_dir = int(at.name), at.parent.parent
    config = read_config(run_dir)
    if config.get("model_type") == "gpt2":
        found, facts = gpt2_recipe(path, config), config.get("tokenizer") or GPT2
    else:
        found, facts = recipe_of_run(run_dir, config)
    _, shardings = state_shardings(found.recipe, DEFAULT_LAYOUT, mesh)
    if step is None and ((path / FILE).is_file() or "recipe" not in config):
        arrays = read_parameters(path, found.recipe)
        params = jax.tree.map(put, arrays, shardings["params"])
    else:
        params = restored(run_dir / "checkpoints", step, found.recipe, mesh)
    require_finite(params, path)
    return Model(found, params, mesh, facts, run_dir)


def require_finite(params: Any, path: Path) -> None:
    """Raise BadInput for parameters that hold NaN or infinity, of which a model says nothing."""
    finite = jax.jit(lambda params: jax.tree.map(lambda array: jnp.all(jnp.isfinite(array)), params))(params)
    leaves = jax.tree.leaves_with_path(finite)
    bad = [jax.tree_util.keystr(where, simple=True, separator=".") for where, good in leaves if not good]
    if bad:
        raise BadInput(
            f"{path}: {len(bad)} of its parameters hold numbers that are not finite, the first is {bad[0]}; "
            "the training diverged, or the file is damaged: give another model, or a checkpoint (RUN/checkpoints/STEP)"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a folder. Raises BadInput when there is none, or it is not one of ours or GPT-2's."""
    path = folder / "config.json"
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise BadInput(
            f"{folder} has no config.json; give a run directory, an exported folder or a folder with GPT-2"
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read ({type(error).__name__}: {error}); copy it again") from None
    if not isinstance(config, dict) or not (config.get("model_type") == "gpt2" or "recipe" in config):
        raise BadInput(f"{path} describes neither a run of jspeed nor a GPT-2 (model_type gpt2); give another folder")
    try:
        check_json(config, GPT2Config if config.get("model_type") == "gpt2" else OwnConfig)
    except BadInput as error:
        raise BadInput(f"{path}: {error}; copy or download it again") from None
    return config


def recipe_of_run(folder: Path, config: dict[str, Any]) -> tuple[LoadedRecipe, TokenizerFacts]:
    """Return the recipe of a run directory or exported folder, from its own copy, and its tokenizer's facts."""
    source = folder / "recipe.py"
    if not source.is_file():
        raise BadInput(f"{folder} has no recipe.py, the recipe it was trained with; it is of an older jspeed")
    overrides = config.get("overrides", {})
    found = find(str(source), [f"{name}={value!r}" for name, value in overrides.items() if name.isupper()])
    added = {name: value for name, value in overrides.items() if not name.isupper()}  # init_from
    found = replace(found, fields=found.fields | added, overrides=found.overrides | added)
    facts = config.get("tokenizer")
    if facts is None:
        data = found.recipe.data
        if data.bos_id != GPT2["bos_id"]:
            raise BadInput(
                f"{folder}/config.json does not say how text becomes tokens; train on a folder with a manifest"
            )
        facts = GPT2
    return found, facts


def gpt2_recipe(folder: Path, config: dict[str, Any]) -> LoadedRecipe:
    """Return the recipe gpt2 at the size of Hugging Face's ``config``."""
    shape = tuple(config[name] for name in ("n_layer", "n_head", "n_embd"))
    block, vocabulary = config.get("n_positions") or config.get("n_ctx"), config["vocab_size"]
    if block is None:
        raise BadInput(f"{folder}/config.json lacks n_positions; download it again")
    activation = config.get("activation_function", "gelu_new")
    if activation != "gelu_new" or config.get("layer_norm_epsilon", 1e-5) != 1e-5:
        raise BadInput(f"{folder}/config.json asks for another activation or epsilon than GPT-2's; it cannot be loaded")
    sizes = {"given": shape}
    sets = [f"SIZES={sizes!r}", "SIZE=given", f"LANE_LEN={block}", f"VOCAB={vocabulary}", "COMPUTE=float32"]
    return find("gpt2", sets)


def restored(folder: Path, step: int | None, recipe: Recipe, mesh: Mesh) -> Any:
    """Return the parameters of one checkpoint, or of the newest undamaged one. Raises BadInput for none."""
    steps = [step] if step is not None else sorted(steps_in(folder), reverse=True)
    wrong = "there is none"
    for number in steps:
        wrong = damage(folder, number) or ""
        if not wrong:
            return restore(folder, number, state_shardings(recipe, DEFAULT_LAYOUT, mesh)[0])[0]["params"]
    if step is not None:
        raise BadInput(f"{folder / str(step)} is damaged ({wrong}); give another checkpoint, or {folder.parent}")
    raise BadInput(f"{folder.parent} holds neither {FILE} nor a whole checkpoint ({wrong}); train it first")
