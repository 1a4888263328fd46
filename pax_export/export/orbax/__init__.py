"""orbax.export's interface on top of this package's exporter.

A program written for orbax.export imports this instead:

    from pax_export.export.orbax import ExportManager, JaxModule, ServingConfig
"""

from pax_export.export.orbax import dtensor_utils
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
from pax_export.export.orbax.jax_module import JaxModule
from pax_export.export.orbax.serving_config import ServingConfig

__all__ = [
    "ExportManager",
    "JaxModule",
    "ServingConfig",
    "dtensor_initialized",
    "dtensor_utils",
    "get_current_dtensor_mesh",
    "get_current_mesh",
    "get_pspec_from_jax_arrays",
    "initialize_dtensor",
    "maybe_enable_dtensor_export_on",
    "shutdown_dtensor",
]
