"""Render HTML pages that open from disk, by Jinja templates beside the code of each view; all values are escaped."""

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jspeed.standard_streams import printable

if TYPE_CHECKING:
    import jinja2

PACKAGE = Path(__file__).parents[1]


def render(template: str, **values: Any) -> str:
    """Return the page that the file ``template``, a path inside the package, makes of ``values``.

    Every value is printed without control characters and escaped, unless it is a ``markupsafe.Markup``. A name that
    is missing raises ``jinja2.UndefinedError``. Templates may also call ``file(NAME)``, the text of a file of the
    package, and filter by ``digest``, the SHA-256 in base64 that a content policy asks for.
    """
    return _environment().get_template(template).render(values)


@cache
def _environment() -> "jinja2.Environment":
    # Imported here because charts of a run need no page.
    import jinja2
    from markupsafe import Markup

    def only_text(value: Any) -> Any:
        return value if hasattr(value, "__html__") else printable(value)

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PACKAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=only_text,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["file"] = lambda name: Markup((PACKAGE / name).read_text(encoding="utf-8"))
    environment.filters["digest"] = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return environment
