"""Custom kernels: what one says of itself, and which there are.

They are the folder ``jspeed/kernels``, which nothing else imports. Without it attention is XLA's,
and recipes are computed in plain JAX. Its files are imported when one of their kernels is used:
Pallas is slow to import, and a JAX may lack a part of it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from jspeed.base.jax_versions import lower_kernels_once
from jspeed.errors import BadInput, first_line

FOLDER = "jspeed.kernels"
Run: TypeAlias = Callable[..., Any]
Case: TypeAlias = tuple[Run, Run, list[Any]]
"""A kernel, the same in plain JAX, and the arrays that both take."""
Kind: TypeAlias = Literal["attention_forward", "attention_backward", "fp8_matmul", "other"]
"""Of a kernel, as ``jspeed plan`` predicts its time."""


class Refused(BadInput):
    """A kernel does not support these shapes, dtypes or devices; another path may."""


def _any_size(*sizes: int) -> bool:
    return True


class Kernel(NamedTuple):
    """What a function of the model is given to compute with: ``run``, where it ``accepts(sizes)``;
    for other sizes it takes plain JAX."""

    run: Run
    accepts: Callable[..., bool] = _any_size


class Sizes(NamedTuple):
    """Of an example: tokens, channels of a model and of its MLP, heads."""

    tokens: int
    width: int
    mlp_width: int
    heads: int


class CustomKernel(NamedTuple):
    """A kernel that replaces a part of a recipe: its name in recipes and in run.json, and its parts
    by theirs, for the preflight."""

    name: str
    kernel: Kernel
    examples: Callable[[Sizes], Mapping[str, Case]]


class Chip(NamedTuple):
    """A kind of device: JAX's platform, and CUDA's compute capability as (9, 0), if it has one."""

    platform: str
    capability: tuple[int, ...] | None


class Attending(NamedTuple):
    """What a recipe asks of attention: within documents (``packed``), whose length a bound limits
    (``bounded``); channels of a head, None where they are not known."""

    packed: bool
    bounded: bool = False
    width: int | None = None


class Backend(NamedTuple):
    """A kernel of attention: ``attend(q, k, v, scale=, window=, ...)``. Of documents it ``reads``
    their numbers (``ids_BT=``) or where they start (``offsets_BO=``).

    Of ``longest``, ``gradient_window`` and ``doc_tagged``
    (:func:`jspeed.model.attention.attention`) it knows those that it ``takes``. ``runs_on(chip)``:
    whether it may be asked for there; ``suits(chip, attending)``: whether it is taken by itself.
    ``file``: what must be importable.
    """

    attend: Run
    reads: Literal["ids_BT", "offsets_BO"]
    runs_on: Callable[[Chip], bool]
    suits: Callable[[Chip, Attending], bool]
    takes: frozenset[str] = frozenset()
    file: str = ""


class Available(NamedTuple):
    """What a device has: attention backends, the fastest first; custom kernels; and a line on those
    that it would have with another JAX."""

    attention: tuple[str, ...]
    custom: frozenset[str]
    lacking: str | None


class Array(Protocol):
    """An array in a compiled program: its dtype as HLO writes it (bf16, f8e4m3fn), its shape on one
    device, and its bytes."""

    @property
    def dtype(self) -> str: ...
    @property
    def dims(self) -> tuple[int, ...]: ...
    @property
    def bytes(self) -> int: ...


class Call(NamedTuple):
    """A kernel's call in a compiled program: which one, the numbers of its :func:`label`, and all
    that JAX calls it (``path``). Documents have at most ``longest`` tokens."""

    kernel: str
    numbers: Mapping[str, int]
    path: str
    operands: Sequence[Array]
    results: Sequence[Array]
    longest: int | None


class Price(NamedTuple):
    """What a call costs: FLOPs, and bytes beyond reading each operand and writing each result once.
    ``dims`` of a matmul: batch, rows, contracted, columns."""

    kind: Kind
    flops: float = 0.0
    more_bytes: int = 0
    dtype: str = ""
    dims: tuple[int, ...] = ()


def label(file: str, kernel: str, **numbers: int | None) -> str:
    """Return the name under which :func:`price` finds a ``kernel`` of ``jspeed/kernels/FILE.py`` in
    a compiled program, with the numbers that its price needs besides shapes."""
    known = (f"{name}{number}" for name, number in numbers.items() if number is not None)
    return "__".join((file, kernel, *known))


def price(
    path: str, operands: Sequence[Array], results: Sequence[Array], longest: int | None
) -> Price | None:
    """Return what the kernel that is labelled in ``path`` costs, by its file's own ``price``; None
    where none is, or it leaves that to its arrays."""
    for word in re.findall(r"\w+", path):
        file, *rest = word.split("__")
        if rest and (folder := _folder()) and file in folder.PRICED:
            numbers = {name.rstrip("0123456789"): name for name in rest[1:]}
            numbers = {name: int(text.removeprefix(name)) for name, text in numbers.items()}
            call = Call(rest[0], numbers, path, operands, results, longest)
            found: Price | None = _file(file).price(call)
            return found
    return None


def backends() -> Mapping[str, Backend]:
    """Return the attention backends beside ``xla``, the fastest first."""
    folder = _folder()
    return folder.backends() if folder else {}


def custom_kernel(name: str) -> CustomKernel:
    """Return a custom kernel. Raises ImportError where this JAX lacks what it needs."""
    lower_kernels_once()
    return next(one for one in _file(import_module(FOLDER).CUSTOM[name]).CUSTOM if one.name == name)


def available(chip: Chip, attending: Attending) -> Available:
    """Return what devices like ``chip`` have for a recipe; ``xla``, which runs anywhere, last."""
    folder = _folder()
    if folder is None:
        return Available(("xla",), frozenset(), None)
    names = folder.custom_kernels(chip)
    suited = {name: one for name, one in backends().items() if one.suits(chip, attending)}
    files = {name: folder.CUSTOM[name] for name in names}
    files |= {name: one.file for name, one in suited.items() if one.file}
    broken = {name: why for name, file in files.items() if (why := _fault(file))}
    lacking = None
    if broken:
        kinds = (("custom kernels", broken.keys() & names), ("attention", broken.keys() - names))
        without = " and ".join(f"{kind} {', '.join(sorted(some))}" for kind, some in kinds if some)
        lacking = f"this JAX has no {next(iter(broken.values()))}: without {without}"
    return Available(
        (*(name for name in suited if name not in broken), "xla"),
        names.difference(broken),
        lacking,
    )


def _folder() -> ModuleType | None:
    """The folder of kernels; None where it was taken away."""
    try:
        return import_module(FOLDER)
    except ModuleNotFoundError as error:
        if error.name != FOLDER:
            raise
        return None


def _file(name: str) -> Any:
    return import_module(f"{FOLDER}.{name}")


def _fault(file: str) -> str | None:
    """What a file of kernels would import and cannot."""
    try:
        _file(file)
    except ImportError as error:
        return error.name or first_line(error)
    return None
