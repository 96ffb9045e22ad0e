"""Find a recipe by name or path, read its file with fields replaced by ``--set``, fit it to the
data, and hash it."""

import ast
import hashlib
import json
import os
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jspeed.base.files import as_text, cache_folder, read_regular
from jspeed.data.manifest import read_manifest
from jspeed.data.tokens import TOKENIZERS
from jspeed.errors import BadInput, Terminated, nearest, type_and_line
from jspeed.fields import expected, recipe_hash
from jspeed.recipe import Context, Recipe, init_parameters, without_sparse
from jspeed.recipes import FOLDER, locate
from jspeed.run.check_recipe import check_loss, check_recipe
from jspeed.run.options import Options, check_steps

OFF_TRACK = "own-tokens"  # the track, without rules, of a recipe on other tokens than its own
IDENTITY = ("tokenizer", "vocab_size", "bos_id")  # what a manifest says of its tokens
# which follow the rows that a recipe with PAD trains on
ROW_FIELDS = ("LANE_LEN", "EVAL_LEN", "EVAL_TOKENS")
GPT2_TABLE = "jspeed.model.prefixes"  # knows GPT-2's tokens only


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, its file and source, its resolved fields and those changed by ``--set`` or to fit
    data (``note``)."""

    recipe: Recipe
    path: Path
    source: str
    fields: dict[str, Any]
    overrides: dict[str, Any]
    note: str | None = None

    @property
    def hash(self) -> str:
        """Hash of source and resolved fields (see :func:`jspeed.fields.recipe_hash`)."""
        return recipe_hash(self.source, self.fields)

    @property
    def source_sha256(self) -> str:
        """SHA-256 of the source as it was read."""
        return hashlib.sha256(self.source.encode()).hexdigest()


def find(
    name_or_path: str,
    sets: Sequence[str] = (),
    *,
    tokens: Mapping[str, Any] | None = None,
    trace: bool = True,
) -> LoadedRecipe:
    """Read the recipe called ``name_or_path`` (a name, or a path that ends in ``.py``).

    A *field* is a module-level ``NAME = literal`` with an upper-case name, of a value that JSON can
    hold. ``sets`` are ``FIELD=VALUE`` texts; the file is read as if those lines held the new
    values, so everything derived from them follows. Without ``trace`` its functions are not tried,
    which takes seconds for a hundred layers. ``tokens``: what :func:`for_tokens` found, for which
    the fields must fit. Raises :class:`BadInput` for an unknown name or field, a value of another
    type, and a file that fails, ends the program or has no RECIPE.
    """
    path = locate(os.path.expanduser(name_or_path))
    source, code, fields, overrides = read(path, sets)
    module = types.ModuleType(as_text(path.stem))
    module.__file__ = str(path)
    with blamed(path):
        exec(code, module.__dict__)
        recipe = getattr(module, "RECIPE", None)
        if not isinstance(recipe, Recipe):
            example = FOLDER / "stdlib.py"
            raise BadInput(
                f"recipe file {path} defines no RECIPE; end it with RECIPE = Recipe(...), as"
                f" {example} does"
            )
        if tokens is not None:
            recipe = on_tokens(recipe, fields | overrides, tokens)
            overrides["tokens"] = dict(tokens)
        check_recipe(recipe)
        if trace:
            check_functions(recipe)
    return LoadedRecipe(recipe, path, source, fields | overrides, overrides)


@contextmanager
def blamed(path: Path) -> Iterator[None]:
    """Raise :class:`BadInput` for what code of the recipe file at ``path`` raises."""
    try:
        yield
    except (BadInput, KeyboardInterrupt, Terminated):
        raise
    except SystemExit as error:
        raise BadInput(
            f"recipe file {path} ends the program{_line_in(error, path)} by"
            f" sys.exit({error.code!r}); a recipe only defines what to train"
        ) from None
    except BaseException as error:
        raise BadInput(
            f"recipe file {path} fails{_line_in(error, path)} with {type(error).__name__}:"
            f" {_said(error)}; correct it"
        ) from error


@contextmanager
def checked_if_it_fails(loaded: LoadedRecipe) -> Iterator[None]:
    """Where compiling fails by a fault of the recipe's functions, say so as :func:`find` does. To
    try them before would trace the loss twice, and where programs are loaded once too often."""
    try:
        yield
    except (BadInput, jax.errors.JaxRuntimeError):
        raise
    except (Exception, SystemExit):
        with blamed(loaded.path):
            check_functions(loaded.recipe)
        raise


def _said(error: BaseException) -> str:
    """Return what an error says as one line of at most 300 characters: optax names labels in its
    second."""
    text = str(error).partition("\n---")[0]  # JAX's words about its own frames
    return " ".join(text.split())[:300] or "no message"


def read(
    path: Path, sets: Sequence[str]
) -> tuple[str, types.CodeType, dict[str, Any], dict[str, Any]]:
    """Return a recipe's source, its code with ``sets`` in place, its fields, and those of
    ``sets``."""
    try:
        source = read_regular(path).decode("utf-8-sig")
        source = source.replace("\r\n", "\n").replace("\r", "\n")
        tree = ast.parse(source, filename=as_text(path))
        literals = _fields(tree)
        fields = {name: ast.literal_eval(node.value) for name, node in literals.items()}
        overrides = dict(_override(text, fields, path) for text in sets)
        for name, value in overrides.items():
            literals[name].value = ast.copy_location(
                ast.parse(repr(value), mode="eval").body, literals[name].value
            )
        # XLA takes names in UTF-8 only
        code = compile(ast.fix_missing_locations(tree), as_text(path), "exec")
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise BadInput(
            f"recipe file {path} cannot be read as Python: {type_and_line(error)}; correct it"
        ) from None
    return source, code, fields, overrides


def load_recipe(options: Options, trace: bool = True) -> LoadedRecipe:
    """Return the recipe, fitted to the tokens of its data folder where that has a manifest;
    ``trace`` as of :func:`find`.

    Raises BadInput, also where it has fewer steps than the options ask for.
    """
    loaded = find(options.recipe_or_default, options.set_, trace=trace)
    check_steps(options, loaded.recipe, loaded.fields)
    folder = options.data or cache_folder() / "data" / loaded.recipe.data.name
    manifest = read_manifest(folder) if folder.is_dir() else None
    return for_tokens(loaded, options.set_, manifest, trace) if manifest else loaded


def for_tokens(
    loaded: LoadedRecipe, sets: Sequence[str], facts: Mapping[str, Any], trace: bool = True
) -> LoadedRecipe:
    """Return the recipe ``loaded`` with ``sets``, for data whose tokens have these ``facts`` (of a
    manifest).

    If they are not the recipe's, its VOCAB (padded as before), BOS and PAD become theirs where
    ``sets`` says nothing else. It leaves its track; so do its lanes where it pads rows and the
    data's are of another length. One without VOCAB stays as it is. Raises :class:`BadInput` for a
    VOCAB of ``sets`` that is too small, and for a recipe that needs GPT-2's tokens.
    """
    data = loaded.recipe.data
    fields = loaded.fields
    count = facts["vocab_size"]
    bos = facts["bos_id"]
    known, vocab = TOKENIZERS.get(data.name), fields.get("VOCAB")
    what = f"the data hold {count:,} ids of {facts['tokenizer']}"
    if GPT2_TABLE in loaded.source and facts["tokenizer"] != "gpt2":
        raise BadInput(
            f"{what}, but recipe {loaded.recipe.name} uses a table of GPT-2's ({GPT2_TABLE});"
            " prepare them with --tokenizer gpt2, or give another recipe"
        )
    free = fields.keys() - loaded.overrides.keys()
    reads_bos = "BOS" in free or data.align is not None and "BOS" not in fields
    same = known in (None, facts["tokenizer"]) and (bos in (None, data.bos_id) or not reads_bos)
    same = same and (count == data.vocab_size if known else count <= data.vocab_size)
    rows = _rows(fields, facts) if "LANE_LEN" in free else {}
    if same and not rows or not isinstance(vocab, int):
        return loaded
    if "BOS" in fields and bos is None:
        bos = count  # which no text has
    size = max(count, (loaded.overrides.get("BOS", bos) or 0) + 1)
    if loaded.overrides.get("VOCAB", size) < size:
        raise BadInput(
            f"{what}, for which VOCAB={vocab} is too small; give VOCAB={size}, or leave it out"
        )
    step = min(vocab & -vocab, 128) if vocab != data.vocab_size else 1
    wanted = {"VOCAB": -(-size // step) * step, "BOS": bos, "PAD": facts.get("pad_id")}
    wanted = rows if same else wanted | rows
    more = [
        f"{name}={value}" for name, value in wanted.items() if name in free and value is not None
    ]
    its = {name: facts[name] for name in IDENTITY}
    fitted = find(str(loaded.path), [*sets, *more], tokens=its, trace=trace)
    what += f" in rows of {rows['LANE_LEN']}" if rows else ""
    what += f", and so {' '.join(more)}" if more else ""
    return replace(
        fitted, note=f"{what}: other tokens than recipe {loaded.recipe.name}'s, so on no track"
    )


def _rows(fields: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields for data in padded rows of another length than a recipe's: of as many rows
    of evaluation."""
    row, sizes = (
        facts.get("source", {}).get("row"),
        [fields[name] for name in ROW_FIELDS if name in fields],
    )
    if (
        "PAD" not in fields
        or [type(size) for size in (row, *sizes)] != [int] * 4
        or row == sizes[0]
    ):
        return {}
    return {"LANE_LEN": row, "EVAL_LEN": row, "EVAL_TOKENS": sizes[2] // max(1, sizes[1]) * row}


def on_tokens(recipe: Recipe, fields: Mapping[str, Any], tokens: Mapping[str, Any]) -> Recipe:
    """Return a recipe whose ``fields`` fit ``tokens`` with these for its data, off its track."""
    bos = fields.get("BOS", tokens["bos_id"])
    if bos is None:
        bos = min(recipe.data.bos_id, tokens["vocab_size"] - 1)
    data = replace(recipe.data, vocab_size=max(tokens["vocab_size"], bos + 1), bos_id=bos)
    return replace(recipe, data=data, track=OFF_TRACK)


def check_functions(recipe: Recipe) -> None:
    """Trace forward, loss and optimizer on shapes alone. Raises what they raise, and
    :class:`BadInput` for results of other shapes."""
    stage = recipe.stages[0]
    params = jax.eval_shape(lambda: init_parameters(recipe.parameters, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((1, stage.lane_len), jnp.int32)
    weights = jax.ShapeDtypeStruct((1, stage.lane_len), jnp.float32)
    ctx = Context(stage, training=True)
    total, loss_BT = jax.eval_shape(
        lambda p, t, w: recipe.loss(p, t, t, w, ctx), params, tokens, weights
    )
    check_loss(recipe, total, loss_BT, tokens)
    logits = jax.eval_shape(
        lambda p, t: recipe.forward(p, t, replace(ctx, training=False)), params, tokens
    )
    if logits.shape[:-1] != tokens.shape:
        raise BadInput(
            f"recipe {recipe.name}: forward returns shape {logits.shape}; expected (batch, tokens,"
            f" vocabulary), the first two {tokens.shape}"
        )
    jax.eval_shape(recipe.optimizer().init, without_sparse(recipe, params))


def _fields(tree: ast.Module) -> dict[str, ast.Assign]:
    fields = {}
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id.isupper()
        ):
            with suppress(ValueError):
                _plain(node.value)
                fields[node.targets[0].id] = node
    return fields


def _plain(text: str | ast.expr) -> Any:
    """Return the literal that ``text`` is; raises ValueError where it is none, or none that JSON
    can hold."""
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return value


def _override(text: str, fields: dict[str, Any], path: Path) -> tuple[str, Any]:
    name, equals, value_text = text.partition("=")
    name = name.strip().upper().replace("-", "_")
    known = ", ".join(fields)
    flag = f"--set {' '.join(text.split())}"  # an error message is one line
    if name not in fields:
        raise BadInput(
            f"{flag}: {path.name} has no field {name!r}{nearest(name, fields)}; known: {known}"
        )
    old = fields[name]
    if not equals:
        raise BadInput(f"{flag}: there is no value; write {name}=VALUE (now {old!r})")
    value: Any = value_text
    with suppress(ValueError):
        value = _with_types_of(_plain(value_text), old)
    if type(value) is not type(old) and old is not None:
        wanted = expected(type(old))
        raise BadInput(
            f"{flag}: field {name} of {path.name} is {wanted} (now {old!r}), found"
            f" {value_text!r}; give {wanted}"
        )
    return name, value


def _with_types_of(value: Any, old: Any) -> Any:
    """Convert JSON types in ``value`` to those of ``old``: lists to tuples, text keys to ints, ints
    to floats."""
    if isinstance(old, float) and type(value) is int:
        return float(value)
    if isinstance(old, tuple) and isinstance(value, (list, tuple)):
        patterns = [*old, *old[-1:] * len(value)]
        return tuple(map(_with_types_of, value, patterns)) if old else tuple(value)
    if isinstance(old, dict) and isinstance(value, dict):
        pattern, whole = next(iter(old.values()), None), any(isinstance(key, int) for key in old)
        return {
            int(key) if whole and str(key).lstrip("-").isdigit() else key: _with_types_of(
                item, old.get(key, pattern)
            )
            for key, item in value.items()
        }
    return value


def _line_in(error: BaseException, path: Path) -> str:
    """Return `` at line N`` of the file at ``path``, the deepest that ``error`` went through, or
    nothing."""
    steps = traceback.walk_tb(error.__traceback__)
    lines = [number for frame, number in steps if frame.f_code.co_filename == as_text(path)]
    return f" at line {lines[-1]}" if lines else ""
