"""Operations that bring a program of their own, made of other operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import Refused, complex_rule, rule
from pax_export.export.formats.onnx.values import AnyValue

Results = Sequence[Any]


@complex_rule("call_hi_primitive")
@rule("call_hi_primitive")
def call_hi_primitive(
    writer: Writer, results: Results, *operands: AnyValue, **parameters: Any
) -> list[AnyValue]:
    """What newer versions of jax keep whole until it is lowered, e.g. `searchsorted`."""
    whole = parameters.get("_prim")
    if whole is None or not hasattr(whole, "expand"):
        raise Refused("of this version of jax")

    def expanded(*flat: Any) -> list[Any]:
        return jax.tree_util.tree_leaves(whole.expand(*whole.in_tree.unflatten(flat)))

    structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands]
    return writer.inline(jax.make_jaxpr(expanded)(*structs), operands)
