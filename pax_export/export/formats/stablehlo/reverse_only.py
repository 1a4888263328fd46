"""A mark on arrays: what is computed from them has gradients, and no forward-mode derivatives.

An exported function carries its gradient, a linear function of cotangents,
and nothing that maps tangents.  jax would say so in words of its own
machinery; the mark says it in ours, before.
"""

from __future__ import annotations

from typing import Any, NoReturn

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pax_export._errors import NotDifferentiableError


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
