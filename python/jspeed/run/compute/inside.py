"""What the programs of a run hold besides operations: constants, and calls to the host.

A recipe that carries what somebody learned before the clock started carries it as constants.
"""

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.base.jax_versions import literals


@dataclass
class Inside:
    """Constants of a program, by the hash of their bytes, and names of its calls to the host.

    ``places`` are the scalars as often as they occur, slices, and arrays that are joined: a table
    of few different numbers is many places. Of several programs it is the most of one.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    scalars: set[tuple[str, str]] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    places: int = 0

    @property
    def numbers(self) -> int:
        """How many numbers describe all different constants (:func:`described`)."""
        return len(self.scalars) + sum(map(described, self.arrays.values()))

    def join(self, other: "Inside") -> None:
        """Add what is in ``other``."""
        self.arrays |= other.arrays
        self.scalars |= other.scalars
        self.calls |= other.calls
        self.places = max(self.places, other.places)

    def look(self, jaxpr: Any) -> None:
        """Note the constants and calls of ``jaxpr``, a program, and of those inside it."""
        self.places = max(self.places, self._look(jaxpr, {}))

    def _look(self, jaxpr: Any, seen: dict[int, Any]) -> int:
        """Return the places of ``jaxpr``; a function that is called again counts once."""
        for value in getattr(jaxpr, "consts", ()):
            self._constant(value)
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        if id(inner) in seen:
            return 0
        seen[id(inner)] = inner  # which keeps its id
        for value in literals(inner.outvars):
            self._constant(value)
        places = 0
        for equation in inner.eqns:
            name = equation.primitive.name
            if "callback" in name:
                self.calls.add(name)
            scalars = list(literals(equation.invars))
            for value in scalars:
                self._constant(value)
            joined = len(equation.invars) if name == "concatenate" else 0
            places += max(len(scalars), joined) + (name == "slice")
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_has_operations):
                if _has_operations(value):
                    places += self._look(value, seen)
                elif isinstance(value, np.ndarray | jax.Array):
                    self._constant(value)
        return places

    def _constant(self, value: Any) -> None:
        kind = getattr(value, "dtype", np.dtype(float))
        if isinstance(value, jax.core.Tracer) or jax.dtypes.issubdtype(kind, jax.dtypes.extended):
            return
        array = np.asarray(value)
        if array.size == 1:
            self.scalars.add((str(array.dtype), str(array.reshape(-1)[0])))
        elif array.size:
            digest = hashlib.sha256(array.tobytes() + str(array.dtype).encode()).hexdigest()
            self.arrays[digest] = array


def described(array: np.ndarray) -> int:
    """Return how many numbers describe ``array``: two for each stretch of it that is constant or
    counts up, at most all.

    Schedules, ranges and masks are a few. Floats may be two units in the last place off: rounding.
    """
    if array.dtype.kind not in "iufb" and "float" not in str(array.dtype):
        return array.size
    flat = array.reshape(-1).astype(np.float64)
    bends = np.abs(np.diff(flat, 2))
    rounded = 0.0
    if "float" in str(array.dtype):
        rounded = 4 * float(jnp.finfo(array.dtype).eps)
    largest = np.maximum(np.maximum(np.abs(flat[:-2]), np.abs(flat[1:-1])), np.abs(flat[2:]))
    return min(array.size, 2 + int(np.sum(~(bends <= rounded * largest))))


def _has_operations(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


# Of optimised HLO: where in the source an operation is from, and the tables of those places.
PLACES = re.compile(
    r', metadata=\{(?:[^{}"]|"[^"]*")*\}|^(?:File|Function|Stack).*\n(?:\d.*\n)*', re.M
)


def text_hash(text: str) -> str:
    """Return the SHA-256 of the optimised HLO ``text`` of an executable, without where in the
    source it is from: the same for one that was compiled and one that was saved and loaded."""
    return hashlib.sha256(PLACES.sub("", text).encode()).hexdigest()


HOST = re.compile(r'custom_call_target="([^"]*callback[^"]*)"|is_host_transfer=true|\b(outfeed)\(')


def host_calls(text: str) -> set[str]:
    """Return what the optimised HLO ``text`` of an executable asks the host for."""
    if not any(word in text for word in ("callback", "is_host_transfer=true", "outfeed")):
        return set()  # 60 ms of a start for each program
    return {found[1] or found[2] or "host transfer" for found in HOST.finditer(text)}
