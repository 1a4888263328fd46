"""Functions of statistics, which TFLite has none of, written out."""

from __future__ import annotations

from typing import Any

from pax_export.export.formats.special import FUNCTIONS, written_out
from pax_export.export.formats.tflite.rule import NotInTfliteError, Operation, rule


@rule(*FUNCTIONS, thin=True)
def written(op: Operation, *operands: Any) -> Any:
    function = written_out(op.name, op.operands)
    if function is None:
        raise NotInTfliteError(f"of {op.dtype}")
    return op.call(function, op.operands, operands)
