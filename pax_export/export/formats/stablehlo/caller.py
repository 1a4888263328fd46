"""Calls of a `jax.export.Exported`: fast, under vmap, and differentiated as often as it can be.

jax calls a deserialised function, and can neither batch it nor say in a
sentence why something has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pax_export._errors import NotDifferentiableError
from pax_export.export.formats.stablehlo.exported import Exported

_FLOAT0 = jax.dtypes.float0

Flat = Callable[..., tuple[Any, ...]]


def caller(exported: Exported, order: int, name: str) -> Flat:
    """A jitted function of the flat operands that gives the flat results.

    It works under `jit`, `vmap` (a batched call makes one call after the
    other, as `jax.lax.map` does) and, `order` times, `grad`.

    Args:
        exported: the function.
        order: how many times it can be differentiated.
        name: what errors call it.
    """
    # Tracing a call of an Exported takes several times as long as the call.
    return jax.jit(_differentiable(exported, order, order, name))


def _marked(operand: Any) -> Any:
    floating = jax.numpy.issubdtype(jax.numpy.result_type(operand), jax.numpy.inexact)
    return reverse_only(jax.numpy.asarray(operand)) if floating else operand


def _differentiable(exported: Exported, left: int, order: int, name: str) -> Flat:
    run = jax.custom_batching.sequential_vmap(_flat(exported))

    @jax.custom_vjp
    def call(*operands: Any) -> tuple[Any, ...]:
        return run(*operands)

    def forward(*operands: Any) -> tuple[tuple, tuple]:
        return call(*operands), operands

    def backward(operands: tuple, cotangents: tuple) -> tuple[Any, ...]:
        if not left:
            raise _no_gradient(order, name)
        gradient = exported.vjp()
        # Where nothing has a gradient, numbers without bits stand for it; a
        # loop over a batch does not take these, but it takes booleans.
        given = [np.zeros(c.shape, bool) if c.dtype == _FLOAT0 else c for c in cotangents]
        results = iter(_differentiable(gradient, left - 1, order, name)(*operands, *given))
        return tuple(
            None if aval.dtype == _FLOAT0 else next(results) for aval in gradient.out_avals
        )

    call.defvjp(forward, backward)
    return lambda *operands: call(*map(_marked, operands))


def _flat(exported: Exported) -> Flat:
    """The function of flat operands and results; see `backward` for what has no gradient."""

    def call(*given: Any) -> tuple[Any, ...]:
        operands = [
            np.zeros(value.shape, _FLOAT0) if aval.dtype == _FLOAT0 else value
            for aval, value in zip(exported.in_avals, given)
        ]
        args, kwargs = jax.tree_util.tree_unflatten(exported.in_tree, operands)
        results = jax.tree_util.tree_leaves(exported.call(*args, **kwargs))
        return tuple(result for result in results if result.dtype != _FLOAT0)

    return call


def _no_gradient(order: int, name: str) -> NotDifferentiableError:
    times = {0: "no gradient", 1: "first-order gradients only"}.get(
        order, f"gradients up to order {order} only"
    )
    return NotDifferentiableError(
        f"This function was exported with {times}.",
        where=name,
        got=f"vjp_order={order}",
        write=f"to_stablehlo(..., vjp_order={order + 1})",
    )


def reverse_only(array: Any) -> Any:
    """The same array; `jax.jvp` through it raises, `jax.grad` does not.

    Example:
        >>> import jax
        >>> float(jax.grad(lambda x: reverse_only(x) ** 2)(3.0))
        6.0
    """
    return _mark.bind(array)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotDifferentiableError(
        "An exported function has gradients (reverse mode), and no forward-mode derivatives: "
        "jax.jvp, jax.jacfwd and jax.hessian do not go through it.",
        write="jax.grad, jax.vjp or jax.jacrev; of a gradient, jax.jacrev(jax.grad(f)) "
        "with vjp_order=2",
    )


# The mark, and what it makes of tangents: both the identity, but a tangent
# may only be transposed, never computed.
_mark = Primitive("pax_export_reverse_only")
_tangent = Primitive("pax_export_reverse_only_tangent")
for _each in (_mark, _tangent):
    _each.def_abstract_eval(lambda aval: aval)
batching.defvectorized(_mark)
batching.primitive_batchers[_tangent] = _refuse
_mark.def_impl(lambda array: array)
_tangent.def_impl(_refuse)
mlir.register_lowering(_mark, lambda context, array: [array])
mlir.register_lowering(_tangent, _refuse)
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])
ad.primitive_jvps[_mark] = lambda primals, tangents: (
    _mark.bind(*primals),
    tangents[0] if type(tangents[0]) is ad.Zero else _tangent.bind(tangents[0]),
)
