"""Functions of statistics, which TFLite has none of, written out."""

from __future__ import annotations

from typing import Any

from pax_export.export.formats.special import FUNCTIONS, written_out
from pax_export.export.formats.tflite.rule import RULES, NotInTfliteError, Operation, rule


# What has a rule by now is an operation of TFLite, or made of some.
@rule(*(FUNCTIONS.keys() - RULES.keys()), thin=True)
def written(op: Operation, *operands: Any) -> Any:
    function = written_out(op.name, op.operands)
    if function is None:
        raise NotInTfliteError(f"of {op.dtype}")
    return op.call(function, op.operands, operands)
