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
from pax_export.export.portable.round_between import rounded_between, without_half

T = TypeVar("T")


@dataclass(frozen=True)
class PassOptions:
    """The options of a target.

    Attributes:
        fold: fold scales into weights.
        compute: with `fold`, evaluate all arithmetic on weights; not needed by targets that fold
            constants.
        keep: keep functions for which runtimes have operators.
        move: move transposes to where they are not needed.
        features_first: with `move`, convolve ``[batch, features, ...]``, else ``[batch, ...,
            features]``.
        integers: pass integers from a quantized layer to the next, through float32 at most.
    """

    fold: bool = True
    compute: bool = True
    keep: bool = True
    move: bool = True
    features_first: bool = True
    integers: bool = False


def optimized(
    program: Any,
    leaves: Sequence[Weight],
    names: Mapping[int, str],
    options: PassOptions,
    count: int | None = None,
) -> PortableProgram:
    """Optimizes a traced program for a runtime.

    Args:
        program: the closed jaxpr; its first operands are the leaves.
        leaves: their names and values.
        names: names of large constants, by `id`.
        options: the options of the target.
        count: the number of results; default: all.
    """
    # Calls hide adjacent equations from all other passes.
    made = flattened(program, leaves, names, count)
    if options.integers:
        made = without_half(made)
    # Functions are found as they were written: folding and layouts take them apart.
    if options.keep:
        made = recognized(recurrent_kept(made))
    made = padded_inside(made)
    # Scales are found by the axis of their features, which is simplest in the model's layout.
    if options.fold:
        made = folded(made)
    if options.integers:
        made = rounded_between(made)
    if options.move:
        made = laid_out(made, options.features_first)
    # The others leave arithmetic and transposes of weights behind.
    return computed(made) if options.fold and options.compute else made


def written_fast(
    program_of: Callable[[PassOptions | None], PortableProgram],
    options: PassOptions,
    write: Callable[[PortableProgram], T],
) -> tuple[T, PortableProgram]:
    """Writes the optimized program, or the traced one if a pass or a rule fails.

    Args:
        program_of: returns the program after the passes with these options, or for None the traced
            one.
        options: the options of the target.
        write: writes a program.

    Returns:
        The result of `write`, and the written program, whose notes are for the report.

    Raises:
        UnsupportedOperationError: about the traced program.
    """
    try:
        program = program_of(options)
        return write(program), program
    except Exception as error:  # no reason to refuse a model
        reason = error
    # If this is refused, too, its error names the user's operation.
    traced = program_of(None)
    made = write(traced)
    note = f"the program as it was traced, which may be slow: {reason!r}"
    warnings.warn(
        f"The file has {note}. This is a mistake of pax_export; please report it.",
        RuntimeWarning,
        stacklevel=2,
    )
    return made, traced.noted(note)
