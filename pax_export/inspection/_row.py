"""One line of an inspection."""

from __future__ import annotations

from dataclasses import dataclass

Count = int | str


@dataclass(frozen=True)
class Row:
    """A module or an array of a model.

    Counts of a module include everything below it. A count is a number, or a formula as text if
    inputs have symbolic sizes.

    Attributes:
        path: the dotted path, as in errors; empty for the root.
        kind: ``"module"`` or ``"array"``.
        depth: the number of modules around it.
        class_name: the class of a module; empty for arrays.
        name: the ``name`` of a module, or None.
        mode: ``"train"`` or ``"eval"`` for a module.
        shape: the shape of an array.
        inputs: the inputs of a module's first call: ``float32[batch,3]``.
        outputs: the outputs of that call.
        calls: the number of calls of the module.
        dtype: the dtype of the arrays; several are joined by commas.
        computed_in: the dtype of most of its arithmetic; without inputs, that of its policy.
        role: ``"trainable"``, ``"frozen"`` or ``"state"``; for a module, the first of these that
            applies to one of its arrays.
        declared: what the class of its layer says of an array, ``"kernel [in, out]"``, see
            `pax_export.Declared`; ``"no declaration"`` for a module with arrays of its own whose
            class says nothing.
        parameters: the number of elements that are trainable or frozen.
        bytes: the size of all arrays, including state.
        flops: additions, multiplications and comparisons of one call, as XLA counts them;
            None without inputs, or if the program of an export cannot be counted.
        transcendentals: exponentials, logarithms, roots, counted separately; None as for ``flops``.
        time_share: the share of the time of one call, if measured.
        function: the name of a `Lambda`'s function; else empty.

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
    declared: str = ""
    parameters: int = 0
    bytes: int = 0
    flops: Count | None = None
    transcendentals: Count | None = None
    time_share: float | None = None
    function: str = ""
