"""The longest proper prefix of every token that is itself a token of the vocabulary."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from jspeed.errors import BadInput


def longest_prefixes(vocabulary: Sequence[bytes]) -> NDArray[np.int32]:
    """Return the id of the longest proper prefix of each token that is itself a token, -1 where there is none."""
    ids = {token: id for id, token in enumerate(vocabulary) if token}
    return np.array(
        [
            next((ids[token[:end]] for end in range(len(token) - 1, 0, -1) if token[:end] in ids), -1)
            for token in vocabulary
        ],
        np.int32,
    )


@cache
def gpt2_prefixes(ordinary: int, size: int) -> NDArray[np.int32]:
    """Return :func:`longest_prefixes` of GPT-2's first ``ordinary`` byte pairs: int32 ``[size]``, -1 for other ids.

    An id from ``ordinary`` on is a special token, padding, or what a smaller vocabulary uses it for: no byte pair.

    Raises BadInput when tiktoken can neither find nor fetch the vocabulary.
    """
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        raise BadInput(
            f"tiktoken cannot fetch GPT-2's vocabulary ({type(error).__name__}); connect to the network, "
            "or set TIKTOKEN_CACHE_DIR to a folder that has it"
        ) from None
    found = longest_prefixes([encoding.decode_single_token_bytes(id) for id in range(ordinary)])
    return np.pad(found, (0, size - ordinary), constant_values=-1)
