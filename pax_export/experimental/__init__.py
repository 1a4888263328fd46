"""Names of PAX's experimental API."""

from pax_export.core import load_state_dict as load_weights_from_dict
from pax_export.core import mutable
from pax_export.core import state_dict as save_weights_to_dict
from pax_export.experimental import graph
from pax_export.flattener import Flattener
from pax_export.lazy import LazyModule, materialize
from pax_export.optim import apply_scaled_gradients
from pax_export.precision import default_mp_policy

__all__ = [
    "Flattener",
    "LazyModule",
    "apply_scaled_gradients",
    "default_mp_policy",
    "graph",
    "load_weights_from_dict",
    "materialize",
    "mutable",
    "save_weights_to_dict",
]
