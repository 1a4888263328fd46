"""orbax.export's interface on top of this package's exporter.

A program written for orbax.export imports this instead:

    from pax_export.export.orbax import ExportManager, JaxModule, ServingConfig

The modules have orbax's names, so that ``from orbax.export import utils``
becomes ``from pax_export.export.orbax import utils``.
"""

from pax_export.export.orbax import config, constants, dtensor_utils, typing, utils, validate
from pax_export.export.orbax.dtensor_utils import (
    dtensor_initialized,
    get_current_dtensor_mesh,
    get_current_mesh,
    get_pspec_from_jax_arrays,
    initialize_dtensor,
    maybe_enable_dtensor_export_on,
    shutdown_dtensor,
)
from pax_export.export.orbax.export_manager import ExportManager
from pax_export.export.orbax.export_manager_base import ExportManagerBase
from pax_export.export.orbax.jax_module import JaxModule
from pax_export.export.orbax.serving_config import ServingConfig
from pax_export.export.orbax.utils import TensorSpecWithDefault, remove_signature_defaults

__all__ = [
    "ExportManager",
    "ExportManagerBase",
    "JaxModule",
    "ServingConfig",
    "TensorSpecWithDefault",
    "config",
    "constants",
    "dtensor_initialized",
    "dtensor_utils",
    "get_current_dtensor_mesh",
    "get_current_mesh",
    "get_pspec_from_jax_arrays",
    "initialize_dtensor",
    "maybe_enable_dtensor_export_on",
    "remove_signature_defaults",
    "shutdown_dtensor",
    "typing",
    "utils",
    "validate",
]
