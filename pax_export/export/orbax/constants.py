"""The names that orbax's programs use as keys."""

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

# Keys of `jax2tf_kwargs` and `jax2obm_kwargs`.
JAX2OBM_KWARGS = "jax2obm_kwargs"
PSPECS = "pspecs"
NATIVE_SERIALIZATION_PLATFORMS = "native_serialization_platforms"
POLYMORPHIC_CONSTRAINTS = "polymorphic_constraints"
CHECKPOINT_PATH = "checkpoint_path"
WEIGHTS_NAME = "weights_name"
DEFAULT_WEIGHTS_NAME = "weights"
XLA_FLAGS_PER_PLATFORM = "xla_flags_per_platform"
JAX_MESH = "jax_mesh"
BATCH_OPTIONS = "batch_options"
CONVERTER_OPTIONS = "converter_options"

DEFAULT_PRE_PROCESSOR_NAME = "pre_processor"
DEFAULT_POST_PROCESSOR_NAME = "post_processor"

DEFAULT_SUPPLEMENTAL_FILENAME = "orchestration.pb"
OBM_TF_SAVED_MODEL_SUB_FOLDER = "tf_saved_model/"
ORBAX_CHECKPOINT_MIME_TYPE = "application/x.orbax-checkpoint"
