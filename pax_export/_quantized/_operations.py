"""Three JAX primitives on integers and scales.

As primitives they stay whole in traced programs, so each format writes them as its runtime has
them, and one that has none takes `dequantized` and an ordinary product in their place.  On a
CPU a product goes over blocks of rows, which reads the integers once; see
docs/decisions/quantization.md for what that is worth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pax_export._quantized._blocks import blockwise
from pax_export._quantized._integers import Form, dequantized


def dequantize(integers: Any, scales: Any, form: Form) -> Any:
    """The numbers that integers and scales stand for."""
    return _dequantize.bind(integers, scales, **form._asdict())


def quantized_dot(x: Any, integers: Any, scales: Any, form: Form, contracted: int) -> Any:
    """``x [..., k]`` times a matrix, over its rows (-2) or its columns (-1)."""
    return _dot.bind(x, integers, scales, contracted=contracted, **form._asdict())


def quantized_rows(index: Any, integers: Any, scales: Any, form: Form) -> Any:
    """Rows of a table, by integers that lie in it."""
    return _rows.bind(index, integers, scales, **form._asdict())


def plain_dot(x: Any, weight: Any, contracted: int) -> Any:
    """The same product of an ordinary matrix."""
    numbers = (((x.ndim - 1,), (weight.ndim + contracted,)), ((), ()))
    dtype = jnp.result_type(x, weight)
    return jax.lax.dot_general(x.astype(dtype), weight.astype(dtype), numbers)


def decomposed_dequantize(integers: Any, scales: Any, **form: Any) -> Any:
    """`dequantize` in other operations of jax."""
    return dequantized(integers, scales, Form(**form))


def decomposed_dot(x: Any, integers: Any, scales: Any, *, contracted: int, **form: Any) -> Any:
    """`quantized_dot` as a product of what `dequantize` gives."""
    return plain_dot(x, dequantize(integers, scales, Form(**form)), contracted)


def _plain(x: Any, integers: Any, scales: Any, *, contracted: int, **form: Any) -> Any:
    return plain_dot(x, dequantized(integers, scales, Form(**form)), contracted)


def _in_blocks(x: Any, integers: Any, scales: Any, *, contracted: int, **form: Any) -> Any:
    return blockwise(x, integers, scales, Form(**form), contracted)


def few_rows(index: Any, integers: Any, scales: Any, **form: Any) -> Any:
    """`quantized_rows` in other operations of jax: of integers, those that are asked for."""
    return dequantized(integers[index], scales[index], Form(**form))


def _primitive(name: str, plain: Callable[..., Any], on_cpu: Callable[..., Any]) -> Any:
    """A primitive with one result, lowered as a function of jax, another one on CPUs."""
    made = Primitive(name)

    @made.def_abstract_eval
    def result(*operands: Any, **told: Any) -> Any:
        structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands]
        (made,) = jax.make_jaxpr(functools.partial(plain, **told))(*structs).out_avals
        return made

    @functools.partial(jax.jit, static_argnames="told")
    def run(*operands: Any, told: tuple[tuple[str, Any], ...]) -> Any:
        return made.bind(*operands, **dict(told))

    made.def_impl(lambda *operands, **told: run(*operands, told=tuple(told.items())))
    mlir.register_lowering(made, mlir.lower_fun(plain, multiple_results=False))
    if on_cpu is not plain:
        mlir.register_lowering(made, mlir.lower_fun(on_cpu, multiple_results=False), platform="cpu")
    return made


_dequantize = _primitive("dequantize", decomposed_dequantize, decomposed_dequantize)
_dot = _primitive("quantized_dot", _plain, _in_blocks)
_rows = _primitive("quantized_rows", few_rows, few_rows)


# --- under transforms -----------------------------------------------------------------
# All three are linear in x and in the scales; tangents are those of ordinary operations, which
# can be transposed.  Integers have none.


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _sum(*tangents: Any) -> Any:
    found = [each for each in tangents if each is not None]
    return functools.reduce(jnp.add, found)


def _jvp_of(
    primitive: Any, of_x: Callable[..., Any] | None, of_scales: Callable[..., Any]
) -> Callable[..., Any]:
    def jvp(primals: Any, tangents: Any, **told: Any) -> tuple[Any, Any]:
        made = primitive.bind(*primals, **told)
        *first, integers, scales = primals
        x_dot = None
        if of_x is not None and not _is_zero(tangents[0]):
            x_dot = of_x(tangents[0], integers, scales, **told)
        s_dot = None
        if not _is_zero(tangents[-1]):
            s_dot = of_scales(*first, integers, tangents[-1], **told)
        if x_dot is None and s_dot is None:
            return made, jnp.zeros_like(made)
        return made, _sum(x_dot, s_dot).astype(made.dtype)

    return jvp


ad.primitive_jvps[_dequantize] = _jvp_of(_dequantize, None, decomposed_dequantize)
ad.primitive_jvps[_dot] = _jvp_of(_dot, _plain, _plain)
ad.primitive_jvps[_rows] = _jvp_of(_rows, None, few_rows)


def _batched(primitive: Any, plain: Callable[..., Any], leading: bool) -> Callable[..., Any]:
    """The rule of `jax.vmap`: where only the first operand is mapped, one more leading axis."""

    def batch(operands: Any, axes: Any, **told: Any) -> tuple[Any, int]:
        of_first, *of_others = axes  # None for what is not mapped
        if leading and of_first is not None and of_others == [None, None]:
            first = jnp.moveaxis(operands[0], axes[0], 0)
            return primitive.bind(first, *operands[1:], **told), 0
        if not leading and None not in axes:  # integers and scales of several arrays
            moved = [jnp.moveaxis(each, axis, 0) for each, axis in zip(operands, axes)]
            return primitive.bind(*moved, **told), 0
        return jax.vmap(functools.partial(plain, **told), axes)(*operands), 0

    return batch


batching.primitive_batchers[_dequantize] = _batched(_dequantize, decomposed_dequantize, False)
batching.primitive_batchers[_dot] = _batched(_dot, _plain, True)
batching.primitive_batchers[_rows] = _batched(_rows, few_rows, True)
