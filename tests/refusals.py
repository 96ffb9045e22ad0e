"""Helper: a call that must be refused as bad input is."""

from collections.abc import Callable
from typing import Any

import pytest

from jspeed.errors import BadInput


def refused(words: str, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> str:
    """Assert that the call ends as exit code 2 does, in one line that the regular expression
    ``words`` finds (any line, if it is empty); return the line."""
    with pytest.raises(BadInput, match=words or None) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value), caught.value
    return str(caught.value)
