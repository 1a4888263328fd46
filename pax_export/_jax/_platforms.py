"""How jax's operations become StableHLO: rules for platforms, and for no platform at all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from pax_export._jax._not_decomposed import eigenvalues_or_nan, factor_or_nan
from pax_export._jax._private import private, say_less

_GENERAL = "jax.interpreters.mlir._lowerings"
_SPECIFIC = "jax.interpreters.mlir._platform_specific_lowerings"
_NEUTRAL = "pax_export_any"


def call_here(exported: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs on this machine what was lowered for `neutral_platform`."""
    here = jax.default_backend()
    # jax knows a GPU by the names of its makers only.
    names = {"gpu": ("cuda", "rocm")}.get(here, (here,))
    return list(dataclasses.replace(exported, platforms=names).call(list(operands)))


def _rules() -> tuple[Any, Any] | None:
    """The rules of jax for all platforms, and those for each; nothing where they are elsewhere."""
    found = private(_GENERAL), private(_SPECIFIC)
    return None if None in found else found


def lowering_rules() -> list[Any]:
    """The tables of rules that an export goes by: for all platforms, and for each that has some."""
    rules = _rules()
    if rules is None:
        _say_less()
        return []
    general, specific = rules
    return [general, *(specific[name] for name in ("cpu", "cuda", "rocm", "tpu"))]


def _say_less() -> None:
    for name in (_GENERAL, _SPECIFIC):
        if private(name) is None:
            say_less(name)


@functools.cache
def allow_symbolic_padding() -> None:
    """Lets the gradient of a max pool be lowered for TPUs where its padding is symbolic.

    jax's rules for CPU and GPU pad first, and take any padding; the one for TPU
    wants numbers, and is still asked first.
    """
    rules = _rules()
    if rules is None:
        return _say_less()
    from jax import export as jax_export

    general, specific = rules
    pool = jax.lax.select_and_scatter_add_p
    first, pads = general[pool].rule, specific["cpu"][pool].rule

    def rule(context: Any, *operands: Any, padding: Any, **parameters: Any) -> Any:
        symbolic = any(jax_export.is_symbolic_dim(size) for pair in padding for size in pair)
        return (pads if symbolic else first)(context, *operands, padding=padding, **parameters)

    entry = dataclasses.replace(general[pool], rule=rule)
    for platform in ("tpu", neutral_platform()):
        specific[platform][pool] = entry


@functools.cache
def neutral_platform() -> str:
    """A platform to lower for that no machine has, so that only general rules apply to it.

    jax asks its rules by the platform's name, and takes those without a platform
    where it finds none.  `eigh` has no such rule; the one for TPUs is general.  Neither it nor
    the one of `cholesky` says where there is no decomposition: that is added.
    `approx_max_k` and its sister are a call into XLA, and exact here.
    """
    rules = _rules()
    if rules is None:
        _say_less()
        return _NEUTRAL
    from jax.interpreters import mlir

    general, specific = rules
    own = specific[_NEUTRAL]
    linalg = jax.lax.linalg
    own[linalg.eigh_p] = eigenvalues_or_nan(specific["tpu"][linalg.eigh_p])
    own[linalg.cholesky_p] = factor_or_nan(general[linalg.cholesky_p])
    exact = mlir.lower_fun(_exact_top_k, multiple_results=True)
    top_k = jax.lax.approx_top_k_p
    own[top_k] = dataclasses.replace(general[top_k], rule=exact)
    return _NEUTRAL


def _exact_top_k(operand: Any, **parameters: Any) -> tuple[Any, Any]:
    """What jax's approximation gives on CPUs: the best of all, in order."""
    axis = parameters["reduction_dimension"]
    like, _ = jax.eval_shape(lambda x: jax.lax.approx_top_k_p.bind(x, **parameters), operand)
    sign = 1 if parameters["is_max_k"] else -1
    values, places = jax.lax.top_k(sign * jax.numpy.moveaxis(operand, axis, -1), like.shape[axis])
    return jax.numpy.moveaxis(sign * values, -1, axis), jax.numpy.moveaxis(places, -1, axis)
