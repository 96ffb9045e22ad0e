"""``jspeed doctor``: what this machine can do."""

from jspeed.commands.flags import Command, File


def doctor(json_: File | None = None) -> None:
    """Say what this machine can do.

    Args:
        json_: Write it here.
    """


COMMAND = Command(doctor)
