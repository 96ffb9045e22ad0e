"""``jspeed export``: write a trained model as safetensors, in jspeed's layout or Hugging Face's for
a GPT-2."""

import json
from itertools import chain
from pathlib import Path
from typing import Annotated

from jspeed.base.standard_streams import without_logs
from jspeed.cli.flags import Command
from jspeed.errors import BadInput
from jspeed.fields import Folder, Wants


def export(
    model: Annotated[Path, Wants("MODEL", positional=True)],
    out: Folder,
    own: bool = False,
    table: bool = False,
    trust: bool = False,
) -> None:
    """Write a trained model as a folder of safetensors.

    A GPT-2 (recipe gpt2) becomes what transformers' GPT2LMHeadModel and AutoTokenizer read. Every
    other recipe becomes model.safetensors with its own names, config.json (recipe, its hash and
    fields, tokenizer) and recipe.py, which sample, evaluate and run --init-from read.

    Args:
        model: A run directory, one of its checkpoints (RUN/checkpoints/STEP), or an exported
            folder.
        out: Folder to make.
        own: Write a GPT-2 too in the recipe's own way, which one that computes something else
            needs.
        table: Write the tables too that a run had in the host's memory, as the rows in use.
        trust: Run the recipe.py of a folder that is none of jspeed's and was not trained here.
    """
    with without_logs():
        import shutil

        from jspeed.base.files import write_whole
        from jspeed.corpus.shards.output_folder import atomic_folder, require_empty
        from jspeed.data.tokens import copy_tokenizer
        from jspeed.inference.gpt2 import gpt2_config, gpt2_sets, is_gpt2, to_gpt2
        from jspeed.inference.model_config import same_function
        from jspeed.inference.trained import load_model
        from jspeed.run.export import FILE, LEFT_OUT, own_config, own_metadata, save
        from jspeed.run.find_recipe import find

    require_empty(out)
    loaded = load_model(model, trust=trust, whole=False)
    if table and not loaded.tables:
        raise BadInput(
            f"{model} has no table from the host's memory beside its parameters; leave --table out"
        )
    tensors, recipe = loaded.tensors(), loaded.recipe
    as_gpt2 = is_gpt2(recipe) and not own
    config = (
        gpt2_config(recipe, loaded.facts) if as_gpt2 else own_config(loaded.found, loaded.facts)
    )
    if as_gpt2 and not same_function(find("gpt2", gpt2_sets(config), trace=False).recipe, recipe):
        raise BadInput(
            f"recipe {recipe.name} has GPT-2's parameters but computes something else of them than"
            " transformers would; give --own"
        )
    with atomic_folder(out) as folder:
        copy_tokenizer(loaded.folder or model, folder, loaded.facts)
        missing = ""
        if as_gpt2:
            missing = _add_tokenizer(folder, loaded.facts["tokenizer"])
            save(folder / FILE, to_gpt2(tensors), {"format": "pt"})
        else:
            absent = {LEFT_OUT: ", ".join(loaded.tables)} if loaded.tables else {}
            save(folder / FILE, tensors, own_metadata(loaded.found, **absent))
            for file in chain.from_iterable(loaded.tables.values()) if table else ():
                shutil.copyfile(file, folder / file.name)
            write_whole(folder / "recipe.py", loaded.found.source)
            config = {"model_type": "jspeed"} | config
        write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
    others = sorted(path.name for path in out.iterdir() if path.name != FILE)
    print(
        f"{out}: {FILE} ({sum(array.nbytes for array in tensors.values()) / 1e6:,.1f} MB),"
        f" {', '.join(others)}"
    )
    if missing:
        print(f"no tokenizer file is part of it: {missing.replace('OUT', repr(str(out)))}")
    if not as_gpt2:
        print(
            f"transformers cannot read it, for recipe {recipe.name} is no GPT-2; jspeed sample,"
            " evaluate and run --init-from can"
        )


def _add_tokenizer(folder: Path, name: str) -> str:
    """Write GPT-2's tokenizer into ``folder``, where ``name`` is that. Return what is missing and
    how to get it; nothing where a file is there."""
    from jspeed.base.files import write_whole
    from jspeed.corpus.gpt2_tokenizer import gpt2_tokenizer_file
    from jspeed.data.tokens import GPT2, TOKENIZER_FILE

    if (folder / TOKENIZER_FILE).exists():
        return ""
    if name != GPT2["tokenizer"]:
        return f"the text's tokenizer is {name}, which transformers has not; give its model ids"
    try:
        write_whole(folder / TOKENIZER_FILE, gpt2_tokenizer_file())
    except BadInput:
        return (
            "GPT-2's vocabulary cannot be fetched; transformers writes it by"
            " AutoTokenizer.from_pretrained('gpt2').save_pretrained(OUT)"
        )
    return ""


COMMAND = Command(
    export, ("runs/mine --out model  # to share, or to start from: run RECIPE --init-from model",)
)
