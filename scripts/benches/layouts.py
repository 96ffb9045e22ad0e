"""``jspeed bench layouts``: which layouts each recipe takes, as check_layout says: the table of
docs/reference/layouts.md."""

import re
from collections.abc import Iterable
from pathlib import Path

from jspeed.base.files import write_whole
from jspeed.errors import BadInput
from jspeed.parallel.layout import LAYOUTS, MODES, check_layout
from jspeed.plan.estimates import abstract_mesh
from jspeed.recipe import Recipe
from jspeed.recipes import known_recipes
from jspeed.run.find_recipe import find

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "layouts.md"
MARKED = re.compile(
    "(<!-- layouts: made by scripts/bench.py layouts -->\n).*(<!-- /layouts -->)", re.DOTALL
)
SIZES = range(2, 9)  # of the axis that a layout shards over


def layouts(write: bool = False) -> None:
    """Print which layouts each recipe takes with its own fields, and why not the others.

    Args:
        write: Put the table into docs/reference/layouts.md instead, between its markers.
    """
    made = table(find(name, trace=False).recipe for name in known_recipes())
    if write:
        write_whole(PAGE, with_table(PAGE.read_text(), made))
    else:
        print(made)


def with_table(page: str, made: str) -> str:
    """Return ``page`` with the table ``made`` between its markers. Raises BadInput where they are
    missing."""
    if not MARKED.search(page):
        raise BadInput(
            f"{PAGE} lacks the markers that {MARKED.pattern} looks for; put them where the table"
            " belongs"
        )
    return MARKED.sub(lambda found: f"{found[1]}{made}\n{found[2]}", page)


def table(recipes: Iterable[Recipe]) -> str:
    """Return the table as Markdown, its reasons below it: a recipe takes a layout and endings if it
    takes each."""
    columns = [*LAYOUTS, *MODES]
    lines = [
        f"| recipe | {' | '.join(f'`{name}`' for name in columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    reasons: list[str] = []
    for recipe in recipes:
        cells = []
        for name in columns:
            takes, why = answer(recipe, name if name in LAYOUTS else f"dp{name}")
            if why and why not in reasons:
                reasons.append(why)
            cells.append(takes or f"no ({reasons.index(why) + 1})")
        lines.append(f"| `{recipe.name}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for number, why in enumerate(reasons, 1))])


def answer(recipe: Recipe, layout: str) -> tuple[str, str]:
    """Return ("yes", or the mesh axis with the first of ``SIZES`` that divides; why ``layout`` is
    refused)."""
    why = ""
    over = {to for to in LAYOUTS.get(layout, LAYOUTS["dp"]).rules.values() if to != "data"}
    for size in SIZES if over else SIZES[:1]:
        try:
            check_layout(layout, abstract_mesh({"data": 2} | dict.fromkeys(over, size)), recipe)
        except BadInput as error:
            why = why or str(error).partition(";")[0]
            continue
        return ("yes" if size == SIZES[0] else f"{min(over)}={size}"), ""
    return "", why.removeprefix(f"--layout {layout} ").replace(
        f"recipe {recipe.name}", "the recipe"
    )
