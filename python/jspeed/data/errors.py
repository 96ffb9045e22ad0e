"""Exceptions of the loader and of data folders; each text is a complete error message."""

from jspeed.errors import BadInput


class ShardError(BadInput, OSError):
    """A shard cannot be found, opened or read."""


class ShardFormatError(ShardError, ValueError):
    """A file is not a valid shard: its magic number, version, token count or size is wrong."""


class ShardTruncatedError(ShardError):
    """A shard changed its size or was written to after it was opened."""


class TokenRangeError(ShardError, ValueError):
    """A shard holds a token id outside the vocabulary."""


class StateMismatchError(BadInput, ValueError):
    """A saved loader state belongs to other data or other settings."""


class DocOverflowError(BadInput, ValueError):
    """A lane holds more documents than ``max_docs``."""


class LoaderForkedError(BadInput, RuntimeError):
    """A loader or index is used in a fork of the process that made it."""
