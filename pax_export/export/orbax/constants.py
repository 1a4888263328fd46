"""Keys of orbax.export."""

from __future__ import annotations

import enum

__all__ = ["ExportModelType"]


class ExportModelType(enum.Enum):
    """What an `ExportManager` writes.

    Only ``TF_SAVEDMODEL`` can be written; orbax's own ``ORBAX_MODEL`` has no
    public writer, and `JaxModule` refuses it.

    Example:
        >>> ExportModelType.TF_SAVEDMODEL.name
        'TF_SAVEDMODEL'
    """

    TF_SAVEDMODEL = "TF_SAVEDMODEL"
    ORBAX_MODEL = "ORBAX_MODEL"


#: The key of the only method, where `apply_fn` is one function.
DEFAULT_METHOD_KEY = "jax_module_default_method"
