"""Find ``shard_map`` errors that JAX does not report: weights used without a gather, results that
are not reduced.

Under jit a weight that is sharded over the batch's axis is gathered by the compiler. In
``shard_map`` each device has its part, and a program that forgets the collective still runs, as a
different model on every device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
from jax.extend.core import jaxprs_in_params

from jspeed.base.jax_versions import scan_sizes, source_line
from jspeed.plan import hlo
from jspeed.plan.findings import Finding, axes_of

REDUCE = {"psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
SPREAD = {"psum_scatter", "reduce_scatter", "ppermute", "all_to_all", "axis_index"}
# What a weight goes through without being used yet.
SHAPING = {
    "convert_element_type",
    "reshape",
    "transpose",
    "squeeze",
    "broadcast_in_dim",
    "slice",
    "dynamic_slice",
}
SHAPING |= {"copy", "sharding_constraint", "optimization_barrier", "concatenate"}


class Origin(NamedTuple):
    """Where a value in a ``shard_map`` comes from, in mesh axes."""

    varies: frozenset[str] = frozenset()  # axes along which devices have other values
    rows: frozenset[str] = frozenset()  # axes that split its batch
    parts: frozenset[str] = frozenset()  # axes that split its weight


class Seen(NamedTuple):
    """What a walk through a program has seen."""

    findings: dict[tuple[str, str], Finding]  # by name and place
    # of a matmul's result in a shard_map: along which axes devices have others
    spread: dict[Any, frozenset[str]]


def check_shard_map(jaxpr: Any) -> list[Finding]:
    """Return what :func:`walk` finds wrong in a step, whose last argument is data and all others
    its state."""
    return list(walk(jaxpr, [*[False] * (len(jaxpr.in_avals) - 1), True]).findings.values())


def walk(jaxpr: Any, data: Sequence[bool]) -> Seen:
    """Look into every ``shard_map`` of a traced program. ``data``: whether each argument is rows of
    the batch.

    ``ungathered-weight``: rows of the batch are multiplied by one device's part of a weight.
    ``unreduced-result``: a result is said to be the same on all devices along an axis along which
    it is not.
    """
    seen = Seen({}, {})
    _outside(jaxpr.jaxpr, data, seen)
    return seen


def _outside(jaxpr: Any, data: Sequence[bool], seen: Seen) -> list[bool]:
    """Walk what is not in ``shard_map``: which values come from data."""
    env: dict[Any, bool] = dict(zip(jaxpr.invars, data, strict=True))

    def of(atom: Any) -> bool:
        return not isinstance(atom, jax.extend.core.Literal) and env.get(atom, False)

    for eqn in jaxpr.eqns:
        given = [of(atom) for atom in eqn.invars]
        body = _bodies(eqn)
        if eqn.primitive.name == "shard_map":
            _check(eqn, given, seen)
        results = [any(given)] * len(eqn.outvars)
        if (
            len(body) == 1
            and len(body[0].invars) == len(given)
            and eqn.primitive.name != "shard_map"
        ):
            results = _outside(body[0], given, seen)[: len(eqn.outvars)]
        env |= zip(eqn.outvars, results, strict=False)
    return [of(atom) for atom in jaxpr.outvars]


def _check(eqn: Any, data: Sequence[bool], seen: Seen) -> None:
    """Look into one ``shard_map``."""
    origins = []
    for spec, is_data in zip(eqn.params["in_specs"], data, strict=True):
        axes = axes_of(spec)
        origins.append(
            Origin(axes, axes, frozenset()) if is_data else Origin(axes, frozenset(), axes)
        )
    results = _inside(eqn.params["jaxpr"], origins, seen)
    sizes, made = (
        eqn.params["mesh"].shape,
        {out: e for e in eqn.params["jaxpr"].eqns for out in e.outvars},
    )
    for number, (origin, spec) in enumerate(zip(results, eqn.params["out_specs"], strict=True)):
        var = eqn.params["jaxpr"].outvars[number]
        where = _where(made[var] if var in made else eqn)
        for axis in sorted(origin.varies - axes_of(spec)):
            if sizes[axis] > 1:
                text = (
                    f"{where}: result {number} of a shard_map is said to be the same along mesh"
                    f" axis '{axis}', but each device computes its own: a psum, pmean or all_gather"
                    " is missing"
                )
                seen.findings["unreduced-result", f"{where} {number} {axis}"] = Finding(
                    "unreduced-result", "error", text, float(sizes[axis]), 1.0
                )


def _inside(jaxpr: Any, origins: Sequence[Origin], seen: Seen) -> list[Origin]:
    """Walk a program of one device: where its results come from."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env: dict[Any, Origin] = dict(zip(jaxpr.invars, origins, strict=True))

    def of(atom: Any) -> Origin:
        return Origin() if isinstance(atom, jax.extend.core.Literal) else env.get(atom, Origin())

    for eqn in jaxpr.eqns:
        given = [of(atom) for atom in eqn.invars]
        results = _results(eqn, given, seen)
        env |= zip(eqn.outvars, results, strict=True)
    return [of(atom) for atom in jaxpr.outvars]


def _results(eqn: Any, given: list[Origin], seen: Seen) -> list[Origin]:
    name, body = eqn.primitive.name, _bodies(eqn)
    every = _union(given)
    if name == "dot_general":
        result = eqn.outvars[0]
        seen.spread[result] = seen.spread.get(result, frozenset()) | every.varies
        for one, other in (given, given[::-1]):
            for axis in sorted(one.rows & other.parts):
                text = (
                    f"{_where(eqn)}: rows of the batch, spread over mesh axis '{axis}', are"
                    " multiplied by one device's part of a weight: all_gather it first, or this is"
                    " another model on every device"
                )
                seen.findings["ungathered-weight", f"{_where(eqn)} {axis}"] = Finding(
                    "ungathered-weight", "error", text, 1.0, 0.0
                )
    if name in REDUCE or name in SPREAD:
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = frozenset(named if isinstance(named, (tuple, list)) else (named,))
        if name in REDUCE:
            return [Origin(one.varies - axes, one.rows - axes, one.parts - axes) for one in given]
        return [Origin(every.varies | axes, every.rows - axes, frozenset())] * len(eqn.outvars)
    if name == "scan":
        fixed, carried = scan_sizes(eqn)
        while True:
            results = _inside(body[0], given, seen)
            carry = [
                _union(pair) for pair in zip(given[fixed : fixed + carried], results, strict=False)
            ]
            if carry == given[fixed : fixed + carried]:
                return results
            given[fixed : fixed + carried] = carry
    if name == "cond":
        branches = [_inside(branch, given[1:], seen) for branch in body]
        return [_union([*results, given[0]]) for results in zip(*branches, strict=True)]
    if len(body) == 1 and len(body[0].invars) == len(given) and name != "while":
        return _inside(body[0], given, seen)[: len(eqn.outvars)]
    for inner in body:  # of a kind not known here: everything in it may depend on everything
        _inside(inner, [every] * len(inner.invars), seen)
    parts = every.parts if name in SHAPING else frozenset()
    return [Origin(every.varies, every.rows, parts)] * len(eqn.outvars)


def _union(origins: Sequence[Origin]) -> Origin:
    return (
        Origin(*(frozenset().union(*sets) for sets in zip(*origins, strict=True)))
        if origins
        else Origin()
    )


def _bodies(eqn: Any) -> list[Any]:
    """The programs in an equation, the forward one alone of a function with a gradient of its
    own."""
    if "call_jaxpr" in eqn.params:
        return [getattr(eqn.params["call_jaxpr"], "jaxpr", eqn.params["call_jaxpr"])]
    return list(jaxprs_in_params(eqn.params))


def _where(eqn: Any) -> str:
    return hlo.file_and_line(source_line(eqn)) or "an unknown line"
