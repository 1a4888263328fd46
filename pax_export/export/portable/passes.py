"""The passes in order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pax_export.export.portable import layout_rules as layout_rules
from pax_export.export.portable.arithmetic import computed
from pax_export.export.portable.flatten import flattened
from pax_export.export.portable.fold import folded
from pax_export.export.portable.layout import laid_out
from pax_export.export.portable.padding import padded_inside
from pax_export.export.portable.program import PortableProgram, Weight
from pax_export.export.portable.recognize import recognized
from pax_export.export.portable.recurrent import recurrent_kept

T = TypeVar("T")


@dataclass(frozen=True)
class PassOptions:
    """What a target wants.

    Attributes:
        fold: let weights be computed anew: scales folded into them.
        compute: with `fold`, do all arithmetic of weights; a target that computes what depends on
            constants has no need of it.
        keep: keep functions whole that runtimes have operators for.
        features_first: lay arrays out for runtimes that convolve ``[batch, features, ...]``.
    """

    fold: bool = True
    compute: bool = True
    keep: bool = True
    features_first: bool = True


def optimized(
    program: Any,
    leaves: Sequence[Weight],
    names: Mapping[int, str],
    options: PassOptions,
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
        made = recognized(recurrent_kept(made))
    made = padded_inside(made)
    # Scales are found by the axis of their features, which is simplest in the model's layout.
    if options.fold:
        made = folded(made)
    if options.features_first:
        made = laid_out(made)
    # The others leave arithmetic and transposes of weights behind.
    return computed(made) if options.fold and options.compute else made


def written_fast(
    optimize: Callable[[], PortableProgram],
    write: Callable[[PortableProgram | None], T],
    refused: tuple[type[Exception], ...],
) -> tuple[T, PortableProgram | None, tuple[str, ...]]:
    """Writes the optimized program, or the traced one where a pass or a rule fails on that.

    Args:
        optimize: makes the program simpler.
        write: writes that program, or for None the one that was traced.
        refused: the errors by which `write` says that a program cannot be written.

    Returns:
        What was written, the program (None for the traced one), and notes for the report.

    Raises:
        Exception: of `refused`; it says what of the traced program cannot be written.
    """
    program, reason = None, None
    try:
        program = optimize()
    except Exception as error:  # a pass that fails is no reason to refuse a model
        reason = error
    if program is not None:
        try:
            return write(program), program, program.notes
        except refused as error:
            reason = error
    # Where this is refused, too, its error names what the user wrote.
    made = write(None)
    note = f"the program as it was traced, which may be slow: {reason!r}"
    warnings.warn(
        f"The file has {note}. This is a mistake of pax_export; please report it.",
        RuntimeWarning,
        stacklevel=2,
    )
    return made, None, (note,)
