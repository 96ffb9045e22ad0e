"""Gradients of weights in the form that a CPU multiplies fastest.

The gradient of ``w_DF`` in ``x_BTD @ w_DF`` is a sum over lanes and positions. XLA's compiler for
CPUs copies both operands of such a matmul into another order, and takes 1.5 times as long as for
two matrices. So lanes and positions become one axis first. Losses of ``stdlib`` stay the same to
the bit.
"""

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, primitives


def flattened(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return a traced ``program`` whose sums over several leading axes of two arrays are matmuls of
    two axes, loops and calls included. Its arguments and results are the same."""
    return program.replace(jaxpr=_of_jaxpr(program.jaxpr))


def _of_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    return jaxpr.replace(eqns=[_of_equation(eqn) for eqn in jaxpr.eqns])


def _of_equation(eqn: JaxprEqn) -> JaxprEqn:
    if eqn.primitive is primitives.dot_general_p:
        return _flat(eqn)
    return eqn.replace(params={name: _of_value(value) for name, value in eqn.params.items()})


def _of_value(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return flattened(value)
    if isinstance(value, Jaxpr):
        return _of_jaxpr(value)
    return tuple(map(_of_value, value)) if type(value) is tuple else value


def _flat(eqn: JaxprEqn) -> JaxprEqn:
    """Return a matmul that sums over its first axes, two or more, as a call that sums over one."""
    (left, right), batch = eqn.params["dimension_numbers"]
    axes = tuple(range(len(left)))
    if len(axes) < 2 or any(map(len, batch)) or not tuple(left) == tuple(right) == axes:
        return eqn
    params = eqn.params | {"dimension_numbers": (((0,), (0,)), ((), ()))}

    def dot(*arrays: jax.Array) -> jax.Array:
        rows = [array.reshape(-1, *array.shape[len(axes) :]) for array in arrays]
        return primitives.dot_general_p.bind(*rows, **params)

    arrays: list[Any] = [variable.aval for variable in eqn.invars]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    (call,) = jax.make_jaxpr(jax.jit(dot))(*shapes).eqns
    program = call.params["jaxpr"]
    here = [each.replace(source_info=eqn.source_info) for each in program.eqns]
    within = program.replace(jaxpr=program.jaxpr.replace(eqns=here))
    return eqn.replace(primitive=call.primitive, params=call.params | {"jaxpr": within})
