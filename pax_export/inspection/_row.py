"""One line of an inspection."""

from __future__ import annotations

from dataclasses import dataclass

Count = int | str


@dataclass(frozen=True)
class Row:
    """A module or an array of a model.

    Counts of a module are those of all that is below it.  A count is a number, or text
    with a formula where inputs have symbolic sizes.

    Attributes:
        path: from the root, with dots, as `net.replace` and errors use it; the root's is
            empty.
        kind: ``"module"`` or ``"array"``.
        depth: how many modules contain it.
        class_name: of a module, its class; of an array, empty.
        name: the name that a module was given, or None.
        mode: of a module ``"train"`` or ``"eval"``.
        shape: of an array.
        inputs: of a module that was called, what its first call took: ``float32[batch,3]``.
        outputs: what that call returned.
        calls: how often the module was called.
        dtype: in which the arrays are kept; several are joined by commas.
        computed_in: the dtype of most of its arithmetic; without inputs, that of its policy.
        role: ``"trainable"``, ``"frozen"`` or ``"state"``; of a module, the
            first of these that an array in it has.
        parameters: how many elements are trainable or frozen.
        bytes: of all arrays, state too.
        flops: additions, multiplications and comparisons of one call, as XLA counts them;
            None without inputs.  Of an export, those of the program in it; None if
            nothing of it can be counted.
        transcendentals: exponentials, logarithms, roots, counted apart; None likewise.
        time_share: of the time of one call, if it was measured.
        function: of a `Lambda`, the name of its function; else empty.

    Example:
        >>> import pax_export as pax
        >>> row = pax.inspect(pax.BatchNorm1D(3))["ema_mean.averages"]
        >>> row.kind, row.role, row.shape
        ('array', 'state', (1, 1, 3))
    """

    path: str
    kind: str
    depth: int = 0
    class_name: str = ""
    name: str | None = None
    mode: str = ""
    shape: tuple[int, ...] | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    calls: int = 0
    dtype: str = ""
    computed_in: str = ""
    role: str = ""
    parameters: int = 0
    bytes: int = 0
    flops: Count | None = None
    transcendentals: Count | None = None
    time_share: float | None = None
    function: str = ""
