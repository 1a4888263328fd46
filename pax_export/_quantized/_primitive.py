"""Primitives of jax with one result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir


def primitive(name: str, plain: Callable[..., Any], **on_platforms: Callable[..., Any]) -> Any:
    """A primitive with one result, lowered as a function of jax; as others where they are named."""
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
    for platform, function in on_platforms.items():
        lowering = mlir.lower_fun(function, multiple_results=False)
        mlir.register_lowering(made, lowering, platform=platform)
    return made


def is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero
