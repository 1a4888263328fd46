"""Keys of orbax.export."""

from __future__ import annotations

import enum

__all__ = ["ExportModelType"]


class ExportModelType(enum.Enum):
    """The type of model that an `ExportManager` writes.

    Only ``TF_SAVEDMODEL`` is supported; orbax's own ``ORBAX_MODEL`` has no public writer.

    Example:
        >>> ExportModelType.TF_SAVEDMODEL.name
        'TF_SAVEDMODEL'
    """

    TF_SAVEDMODEL = "TF_SAVEDMODEL"
    ORBAX_MODEL = "ORBAX_MODEL"


#: The key of the only method, where `apply_fn` is one function.
DEFAULT_METHOD_KEY = "jax_module_default_method"
