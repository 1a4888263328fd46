"""Functions of statistics, which ONNX has none of, written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import Refused, rule
from pax_export.export.formats.onnx.values import AnyValue
from pax_export.export.formats.special import FUNCTIONS, written_out


def _rule(name: str) -> Callable[..., Any]:
    def written(
        writer: Writer, results: Sequence[Any], *operands: AnyValue, **parameters: Any
    ) -> list[AnyValue]:
        structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands]
        function = written_out(name, structs)
        if function is None:
            raise Refused(f"of {structs[0].dtype}")
        return writer.inline(jax.make_jaxpr(function)(*structs), operands)

    return written


for _name in FUNCTIONS:
    rule(_name)(_rule(_name))
