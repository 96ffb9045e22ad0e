"""What a run had learned before its clock started, as far as its programs show: the numbers that
they carry as constants, and what they ask the host for."""

import numpy as np

from jspeed.data.tokens import GPT2_BOS
from jspeed.errors import BadInput
from jspeed.model.prefixes import gpt2_prefixes
from jspeed.recipe import Recipe
from jspeed.record.schema import Carried, CarriedArray, Programs
from jspeed.run.compute.inside import described, text_hash
from jspeed.run.compute.program import Program

NAMED = 64  # numbers of an array from which on it is listed by itself


def carried(recipe: Recipe, program: Program) -> Carried | None:
    """Return run.json's ``carried``; None where nothing was compiled, as without jit.

    What follows from GPT-2's tokenizer alone (:func:`jspeed.model.prefixes.gpt2_prefixes`) is part
    of the data and not counted.
    """
    if not program.inside:
        return None
    numbers: dict[str, int] = {}
    arrays: list[CarriedArray] = []
    for name, inside in program.inside.items():
        numbers[name] = len(inside.scalars)
        for array in inside.arrays.values():
            count = 0 if of_tokenizer(array, recipe) else described(array)
            numbers[name] += count
            if count >= NAMED:
                shape, dtype = list(array.shape), str(array.dtype)
                arrays.append({"program": name, "shape": shape, "dtype": dtype, "numbers": count})
    return {
        "numbers": numbers,
        "places": {name: inside.places for name, inside in program.inside.items()},
        "arrays": arrays,
        "calls": sorted(program.host_calls()),
    }


def programs_of(program: Program) -> Programs:
    """Return run.json's ``programs``."""
    first, evaluation = program.others
    steps = {id(step): step for step in program.compiled}
    named = {"initial state": [first], "step": list(steps.values()), "evaluation": [evaluation]}
    return {
        "loaded": program.loaded,
        "sha256": {
            name: [text_hash(each.as_text() or "") for each in some] for name, some in named.items()
        },
    }


def of_tokenizer(array: np.ndarray, recipe: Recipe) -> bool:
    """Whether ``array`` is the table of prefixes of GPT-2's tokens."""
    if recipe.data.bos_id != GPT2_BOS or array.ndim != 1 or len(array) < recipe.data.vocab_size:
        return False
    try:
        return np.array_equal(array, gpt2_prefixes(GPT2_BOS, len(array)))
    except BadInput:  # its vocabulary is not on this machine, so the array is not from there
        return False
