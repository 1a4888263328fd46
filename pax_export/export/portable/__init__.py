"""Passes over traced programs, shared by all targets.

`passes.py` has the simplifying passes in order, and docs/decisions/portable.md the gain of each;
`decompose` runs after them, and replaces primitives that a target lacks.
"""

from pax_export.export.portable.decompositions import NotDecomposedError as NotDecomposedError
from pax_export.export.portable.decompositions import decompose as decompose
from pax_export.export.portable.decompositions import not_decomposed as not_decomposed
from pax_export.export.portable.passes import PassOptions as PassOptions
from pax_export.export.portable.passes import optimized as optimized
from pax_export.export.portable.passes import written_fast as written_fast
from pax_export.export.portable.program import PortableProgram as PortableProgram
from pax_export.export.portable.program import Weight as Weight
from pax_export.export.portable.real_numbers import NotWrittenError as NotWrittenError
from pax_export.export.portable.real_numbers import in_parts as in_parts
from pax_export.export.portable.real_numbers import in_real_numbers as in_real_numbers
from pax_export.export.portable.round_between import has_half_between as has_half_between
from pax_export.export.portable.rules import EXACT as EXACT
from pax_export.export.portable.rules import NotInTargetError as NotInTargetError
from pax_export.export.portable.rules import ProgramConverter as ProgramConverter
from pax_export.export.portable.rules import Rule as Rule
from pax_export.export.portable.rules import RuleTable as RuleTable
