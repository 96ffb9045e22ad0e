"""Check how a function of your own is sharded: work that devices repeat, communication, copies,
wrong results.

    print(check(step, params, x, y, data=("x", "y")))
    print(picture(x))

The function does not run: it is compiled for the devices on which its arguments lie, and matmuls
and collectives are read from the compiled program. Eight virtual devices of a CPU will do:
``jax.config.update("jax_num_cpu_devices", 8)``.
"""

import inspect
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import rich.table
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from rich.console import Console, RenderableType
from rich.text import Text

from jspeed.errors import BadInput
from jspeed.parallel.describe import tiles
from jspeed.parallel.replicas import drift
from jspeed.plan import cost, findings, hlo
from jspeed.plan.findings import Finding, axes_of
from jspeed.plan.schema import MatmulRow
from jspeed.plan.shard_map_checks import walk
from jspeed.plan.views.tables import Table
from jspeed.plan.views.terminal import LEVELS, print_table
from jspeed.recipe import leaves

WIDTH = 120  # characters of a printed line
ROUNDING = 0.05  # of a factor: padding, and what XLA rewrites


class Placed(NamedTuple):
    """Where an argument or a result lies."""

    name: str  # x, params/up, result/0
    # what jax.typeof says: float32[16,8,32], or float32[16@data,8,32] where mesh axes are Explicit
    type: str
    sharding: Sharding | None  # None: the compiled program does not read it
    local: tuple[int, ...]  # shape on one device
    bytes: int  # on one device
    copies: int  # devices that hold the same
    # a sharding over more axes of the mesh; None where no dimension divides
    fewer: PartitionSpec | None


class Exchange(NamedTuple):
    """A collective of the compiled program."""

    kind: str  # all-reduce, all-gather, ...
    along: tuple[str, ...]  # mesh axes
    bytes: int  # on one device, in one run
    source: str  # file:line; empty if XLA keeps none
    runs: int


@dataclass(frozen=True, repr=False)
class Report:
    """What :func:`check` found; ``print`` shows all of it."""

    devices: int
    mesh: Mapping[str, int]
    # FLOPs of the matmuls on all devices over those that they need; None without matmuls
    factor: float | None
    # by source line; ``redundancy`` is the line's factor, None where XLA keeps no line
    matmuls: list[MatmulRow]
    collectives: list[Exchange]
    arguments: list[Placed]
    results: list[Placed]
    findings: list[Finding]  # errors first

    @property
    def replicated(self) -> list[Placed]:
        """Arguments with copies that need not be, the largest first. They cost memory and are no
        error."""
        return sorted(
            (one for one in self.arguments if one.fewer is not None), key=lambda one: -one.bytes
        )

    def __repr__(self) -> str:
        mesh = "".join(f", {axis}={size}" for axis, size in self.mesh.items())
        needed = (
            "no matmuls"
            if self.factor is None
            else f"matmuls take {self.factor:.2f} times the FLOPs they need"
        )
        lines = [Text(f"{one.level}: {one.name}: {one.text}") for one in self.findings]
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        return _text(Text(f"{devices}{mesh}: {needed}"), *self._tables(), *lines)

    def _tables(self) -> Iterator[Table]:
        yield Table(
            "matmuls",
            ["line", "runs", "on a device", "FLOPs of all", "times those needed"],
            [
                [hlo.file_and_line(row["source"]) or "unknown", str(row["count"]),
                _shape(row["shape"]),
                 f"{row['flops']:,.0f}", f"{row['redundancy']:.2f}" if row["redundancy"] else "-"]
                for row in self.matmuls
            ],
            "A line's forward and backward matmuls together; of the largest: batch x rows x \
contracted x columns.",
        )  # fmt: skip
        yield Table(
            "collectives",
            ["kind", "along", "bytes a device", "runs", "line"],
            [
                [
                    one.kind,
                    " ".join(one.along),
                    f"{one.bytes:,}",
                    str(one.runs),
                    hlo.file_and_line(one.source),
                ]
                for one in self.collectives
            ],
            "XLA for CPUs writes a reduce-scatter as an all-reduce, or an all-to-all, and a slice.",
        )
        yield Table(
            "arrays",
            ["name", "type", "sharding", "on a device", "bytes", "copies", "with fewer copies"],
            [
                [one.name, one.type, str(getattr(one.sharding, "spec", "" if one.sharding else
                "not used")),
                 _shape(one.local), f"{one.bytes:,}", str(one.copies), str(one.fewer or "")]
                for one in (*self.arguments, *self.results)
            ],
        )  # fmt: skip


def check(function: Callable[..., Any], *arguments: Any, data: str | Sequence[str] = ()) -> Report:
    """Compile ``function`` for the shardings of ``arguments`` and report what its devices do.

    ``arguments`` are arrays, or ``jax.ShapeDtypeStruct`` with a sharding, or trees of them. A
    function that is jitted keeps the shardings that it states. ``data`` names the parameters of
    ``function`` whose first dimension is the batch: with it, weights on the batch's mesh axis are
    told apart. That is FSDP under jit, and an error in a ``shard_map`` that does not gather them.

    Raises :class:`BadInput` where ``data`` names no parameter, and what JAX raises for the
    function.
    """
    traced = (function if hasattr(function, "trace") else jax.jit(function)).trace(*arguments)
    lowered = traced.lower()
    # A program that was kept has the source lines of whoever compiled the same one first.
    with_lines = "jax_compilation_cache_include_metadata_in_key"
    usual = jax.config.values[with_lines]
    jax.config.update(with_lines, True)
    try:
        compiled = lowered.compile()
    finally:
        jax.config.update(with_lines, usual)
    trees = lowered.args_info[0]  # without static arguments
    parameters = _parameters(function, len(arguments), len(trees))
    data = [data] if isinstance(data, str) else data
    if unknown := set(data) - set(parameters):
        raise BadInput(
            f"data={data}: there is no parameter {min(unknown)!r}; there are"
            f" {', '.join(parameters)}"
        )
    names = _names(parameters, trees)

    # Of an argument that is not read there is None, which a tree would not count as a leaf.
    structure: Any = jax.tree.structure(trees)
    shardings = structure.flatten_up_to(compiled.input_shardings[0])
    shardings += jax.tree.leaves(compiled.output_shardings)
    avals = [*traced.jaxpr.in_avals, *traced.jaxpr.out_avals]
    everything = zip(
        [*names, *_names(["result"], [traced.out_info])], avals, shardings, strict=True
    )
    placed = [_placed(*one) for one in everything]
    given, results = placed[: len(names)], placed[len(names) :]
    mesh = next((dict(one.mesh.shape) for one in shardings if isinstance(one, NamedSharding)), {})
    devices = max((len(one.device_set) for one in shardings if one), default=1)

    is_data = [one.name.partition("/")[0] in data for one in given]
    seen = walk(traced.jaxpr, is_data)
    kernels = [
        one for one in cost.kernels(str(compiled.as_text())) if not _convolves(one.instruction)
    ]
    ideal = findings.ideal_flops(traced.jaxpr, spread=seen.spread)
    matmuls = findings.matmuls(kernels, ideal, devices)
    missing = ideal.keys() - {row["source"] for row in matmuls}
    for row in matmuls:
        # XLA forgets the lines of some matmuls; one line is left for them
        if not row["source"] and len(missing) == 1:
            row["source"] = min(missing)
            row["redundancy"] = row["flops"] / ideal[row["source"]]
    factor = sum(row["flops"] for row in matmuls) / sum(ideal.values()) if ideal else None
    problems = [
        *seen.findings.values(),
        *findings.redundant(matmuls, ()),
        *_axes(given, is_data, mesh, factor),
        *_drifted(arguments),
    ]
    if any(one.name == "ungathered-weight" for one in problems):
        problems = [one for one in problems if one.name != "fsdp"]
    problems.sort(key=lambda one: list(LEVELS).index(one.level))
    return Report(
        devices, mesh, factor, matmuls, _exchanges(kernels, mesh), given, results, problems
    )


def picture(array: Any) -> str:
    """Draw which devices hold each tile of ``array``, a ``jax.Array``, or a
    ``jax.ShapeDtypeStruct`` with a sharding.

    Raises :class:`BadInput` for an array without a sharding, and where more than two dimensions are
    sharded.
    """
    if getattr(array, "sharding", None) is None:
        kind = type(array).__name__
        raise BadInput(
            f"this {kind} has no sharding and so lies on no devices; jax.device_put(array,"
            " sharding) puts it there"
        )
    grid = rich.table.Table(show_header=False, show_lines=True)
    for row in tiles(array.shape, array.sharding):
        grid.add_row(*row)
    local = _shape(array.sharding.shard_shape(array.shape))
    return _text(Text(f"{jax.typeof(array)} in tiles of {local} on devices"), grid)


def _text(*parts: RenderableType | Table) -> str:
    written = io.StringIO()
    console = Console(file=written, width=WIDTH, highlight=False)
    for part in parts:
        if isinstance(part, Table):
            print_table(console, part)
        else:
            console.print(part)
    return written.getvalue().rstrip()


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _parameters(function: Callable[..., Any], given: int, kept: int) -> list[str]:
    """Names of the arguments: those of the function's parameters, unless some are static or it does
    not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    names = [
        one.name
        for one in parameters
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    return (
        names[:kept]
        if given == kept <= len(names)
        else [f"argument {number}" for number in range(kept)]
    )


def _names(roots: Iterable[str], trees: Iterable[Any]) -> list[str]:
    """Slash-joined names of the leaves of all trees, in order."""
    both = zip(roots, trees, strict=True)
    return ["/".join(filter(None, (root, path))) for root, tree in both for path, _ in leaves(tree)]


def _placed(name: str, aval: Any, sharding: Sharding | None) -> Placed:
    if sharding is None:
        return Placed(name, str(aval), None, (), 0, 0, None)
    local = sharding.shard_shape(aval.shape)
    copies = len(sharding.device_set) * prod(local) // max(1, prod(aval.shape))
    fewer = _fewer(local, sharding) if isinstance(sharding, NamedSharding) else None
    return Placed(
        name, str(aval), sharding, local, prod(local) * aval.dtype.itemsize, copies, fewer
    )


def _fewer(local: Sequence[int], sharding: NamedSharding) -> PartitionSpec | None:
    """The sharding, with each axis that it leaves out given to the longest dimension that divides
    by it."""
    lengths, spec = list(local), [*sharding.spec, *[None] * (len(local) - len(sharding.spec))]
    parts = [part if isinstance(part, tuple) else (part,) if part else () for part in spec]
    for axis, size in sharding.mesh.shape.items():
        fits = [dim for dim, length in enumerate(lengths) if length and length % size == 0]
        if size > 1 and fits and axis not in axes_of(sharding.spec):
            dim = max(fits, key=lambda dim: lengths[dim])
            lengths[dim] //= size
            parts[dim] += (axis,)
    if lengths == list(local):
        return None
    while not parts[-1]:
        parts.pop()
    return PartitionSpec(*(part if len(part) > 1 else part[0] if part else None for part in parts))


def _convolves(step: hlo.Instruction) -> bool:
    """Whether it is a convolution of the program, which counts for nothing here, and not a TPU's
    matmul."""
    return step.opcode == "convolution" and "dot_general" not in step.op_name


def _exchanges(kernels: Iterable[cost.Kernel], mesh: Mapping[str, int]) -> list[Exchange]:
    """The collectives, equal ones as one, in the order of the program."""
    runs: Counter[tuple[str, tuple[str, ...], int, str]] = Counter()
    for kernel in kernels:
        if one := kernel.collective:
            source = one.instruction.source
            # What JAX itself adds around the function is said to come from the line above that
            # traces it.
            runs[
                one.kind, one.along(mesh), one.bytes, "" if source.startswith(__file__) else source
            ] += kernel.runs
    return [Exchange(*what, count) for what, count in runs.items()]


def _axes(
    given: Sequence[Placed], is_data: Sequence[bool], mesh: Mapping[str, int], factor: float | None
) -> list[Finding]:
    """Findings about mesh axes; one that no argument lies along is idle only where work is
    repeated."""
    specs = [getattr(one.sharding, "spec", PartitionSpec()) for one in given]
    rows_of = [PartitionSpec(*spec[:1]) for spec, rows in zip(specs, is_data, strict=True) if rows]
    batch = tuple(sorted(frozenset().union(*map(axes_of, rows_of))))
    weights = {
        one.name: spec for one, spec, rows in zip(given, specs, is_data, strict=True) if not rows
    }
    problems = findings.mesh_axis_use(weights, PartitionSpec(batch), mesh)
    return [
        one for one in problems if one.name == "fsdp" or factor is None or factor > 1 + ROUNDING
    ]


def _drifted(arguments: Any) -> list[Finding]:
    """Arguments whose copies differ."""

    def compared(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and leaf.dtype.itemsize <= 4

    far = drift(jax.tree.map(lambda leaf: leaf if compared(leaf) else None, arguments))
    return [
        Finding(
            "copies-differ",
            "error",
            f"arguments{path}: copies that should be equal differ by {most:.2g}",
            most,
            0.0,
        )
        for path, most in far.items()
    ]
