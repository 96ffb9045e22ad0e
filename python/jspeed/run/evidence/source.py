"""What the text of a recipe may do on a track with rules: define functions of arrays, and nothing
to the program that scores them.

A recipe is Python and runs in the trainer; and again wherever somebody reproduces or audits it. So
its stored text is read: by its names alone, which is a check and no proof.
"""

import ast
from collections.abc import Iterator
from functools import cache

from jspeed.recipes import known_recipes, packaged

# Besides those that jspeed's own recipes import.
MODULES = {
    "__future__", "collections", "collections.abc", "dataclasses", "functools", "itertools", "math",
    "typing", "numpy", "optax", "jax", "jax.lax", "jax.nn", "jax.nn.initializers", "jax.numpy",
    "jax.random", "jax.tree", "jspeed.model", "jspeed.optim",
}  # fmt: skip
UNDER = (
    "jspeed.model.",
    "jspeed.optim.",
    "jspeed.speedrun.",
    "jax.experimental.pallas",
    "optax.",
)
# Python's own functions that reach what a name does not say, or a file.
FUNCTIONS = {
    "breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals", "input", "locals",
    "object", "open", "setattr", "super", "type", "vars",
}  # fmt: skip
# What modules, frames and arrays have that reaches the rest of the program, or a file.
REACHING = {
    "builtins", "config", "cr_frame", "ctypes", "ctypeslib", "extend", "f_back", "f_globals",
    "f_locals", "fromfile", "fromregex", "gc", "genfromtxt", "gi_frame", "importlib", "inspect",
    "interpreters", "load", "loadtxt", "memmap", "modules", "os", "sys", "tb_frame", "tb_next",
    "tofile", "traceback",
}  # fmt: skip


def beyond(source: str) -> Iterator[str]:
    """Yield what ``source`` does that no recipe needs, as phrases with the line.

    A text that is no Python yields that.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        yield f"is no Python: {error}"
        return
    for node in ast.walk(tree):
        if what := found(node):
            yield f"{what} in line {getattr(node, 'lineno', 1)}"


def found(node: ast.AST) -> str | None:
    """Return what is wrong with one ``node`` of the tree, None: nothing."""
    match node:
        case ast.Import(names=names):
            return imports(alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names):
            names_of = [alias.name for alias in names]
            if hidden := next(filter(reaches, names_of), None):
                return f"imports {hidden}"
            inner = [f"{module}.{name}" for name in names_of if module == "jspeed"]
            return imports(inner or [module or "."])
        case ast.ClassDef(name=name) if not names_fields(node):
            return f"defines class {name}"
        case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
            return f"changes attribute {name}"
        case ast.Attribute(attr=name) if reaches(name):
            return f"uses attribute {name}"
        case ast.Name(id=name) if name in FUNCTIONS or name.startswith("__"):
            return f"uses {name}"
    return None


def names_fields(node: ast.ClassDef) -> bool:
    """Return whether a class is a NamedTuple that names its fields, and nothing more: what stands
    in it cannot run, but for the types' expressions, which are read like any other."""
    fields = node.body if ast.get_docstring(node) is None else node.body[1:]
    return (
        [ast.unparse(base) for base in node.bases] == ["NamedTuple"]
        and not node.keywords
        and not node.decorator_list
        and all(isinstance(field, ast.AnnAssign) and field.value is None for field in fields)
    )


def imports(names: Iterator[str] | list[str]) -> str | None:
    """Return that one of the modules ``names`` is none that a recipe needs."""
    for name in names:
        if name not in MODULES | of_the_house() and not name.startswith(UNDER):
            return f"imports {name}"
    return None


@cache
def of_the_house() -> set[str]:
    """Return the modules from which recipes that come with jspeed import."""
    trees = [ast.parse(packaged(name).read_text()) for name in known_recipes()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def reaches(name: str) -> bool:
    """Whether a name reaches the rest of the program: one of Python's or a module's own."""
    return name.startswith("_") or name.startswith("register") or name in REACHING
