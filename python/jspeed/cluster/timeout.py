"""The time limits that environment variables set."""

import os

from jspeed.errors import BadInput

WAIT_SECONDS = "JSPEED_WAIT_SECONDS"
HEARTBEAT_SECONDS = "JSPEED_HEARTBEAT_SECONDS"
# several times failure.TICK, or processes that are well would be declared dead
LEAST_HEARTBEAT = 2.0


def wait_limit() -> float:
    """Seconds for which processes wait for each other at the start: ``JSPEED_WAIT_SECONDS``
    (120)."""
    return _seconds(WAIT_SECONDS, 120, 0.001)


def heartbeat_limit() -> float:
    """Seconds without a heartbeat after which a process counts as dead:
    ``JSPEED_HEARTBEAT_SECONDS`` (60)."""
    return _seconds(HEARTBEAT_SECONDS, 60, LEAST_HEARTBEAT)


def _seconds(name: str, default: float, least: float) -> float:
    text = os.environ.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not least <= seconds < 1e9:
        raise BadInput(
            f"the environment variable {name} is {text!r}; expected a number of seconds from"
            f" {least:g} on"
        )
    return seconds
