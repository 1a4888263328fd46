"""The passes, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pax_export.export.portable import layout_rules as layout_rules
from pax_export.export.portable.arithmetic import computed
from pax_export.export.portable.flatten import flattened
from pax_export.export.portable.fold import folded
from pax_export.export.portable.layout import laid_out
from pax_export.export.portable.padding import padded_inside
from pax_export.export.portable.program import PortableProgram, Weight
from pax_export.export.portable.recognize import recognized


@dataclass(frozen=True)
class Options:
    """What a target wants.

    Attributes:
        fold: let weights be computed anew: scales folded into them, transposes made.
        keep: keep functions whole that runtimes have operators for.
        features_first: lay arrays out for runtimes that convolve ``[batch, features, ...]``.
    """

    fold: bool = True
    keep: bool = True
    features_first: bool = True


def optimized(
    program: Any,
    leaves: Sequence[Weight],
    names: Mapping[int, str],
    options: Options,
    count: int | None = None,
) -> PortableProgram:
    """A traced program as one that runtimes run fast.

    Args:
        program: the closed jaxpr; its first operands are the leaves.
        leaves: their names and values.
        names: of large arrays that the program holds, by `id`.
        options: what the target wants.
        count: of how many results there are; all, unless it is given.
    """
    # Calls hide from all others what stands beside what.
    made = flattened(program, leaves, names, count)
    # Functions are found as they were written: folding and layouts take them apart.
    if options.keep:
        made = recognized(made)
    made = padded_inside(made)
    # Scales are found by the axis of their features, which is simplest in the model's layout.
    if options.fold:
        made = folded(made)
    if options.features_first:
        made = laid_out(made)
    # The others leave arithmetic and transposes of weights behind.
    return computed(made) if options.fold else made
