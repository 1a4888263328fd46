"""What a layer that changes in train mode says where it may not change."""

from __future__ import annotations

from pax_export._errors import ImmutableModuleError
from pax_export.core import Module


def closed_in_train_mode(error: ImmutableModuleError, layer: Module) -> ImmutableModuleError:
    """The error for a call of a layer in train mode where the layer is not open for change.

    Most often somebody forgot `eval`, which an error about an attribute would not say.
    ``error`` is that one; it stays if the layer was opened, but under another trace.
    """
    if not error.what.startswith("Cannot set an attribute of an immutable module"):
        return error
    return ImmutableModuleError(
        "Cannot set an attribute of an immutable module: in train mode this layer changes its "
        "state at each call.",
        where=repr(layer),
        got="a call in train mode that no pax.pure, % or mutable() has open for change",
        write="model.eval()(x) where nothing is trained; in training model, y = model % x",
    )
