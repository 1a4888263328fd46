"""The table of rules that write primitives as ONNX operators.

A rule is a function ``rule(builder, *operands, **parameters)``: `operands` are `Value`s,
`parameters` those of the primitive, and `builder.results` the shapes and dtypes of the results. It
returns the name of its only result, or one per result, not yet rounded to its dtype, and raises
`NotInTargetError` for unsupported cases.
"""

from __future__ import annotations

from pax_export.export.portable import RuleTable

RULES = RuleTable()
rule = RULES.rule
