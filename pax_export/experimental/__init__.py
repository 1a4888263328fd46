"""PAX's names for what may still change its form."""

from pax_export.core import load_state_dict as load_weights_from_dict
from pax_export.core import mutable
from pax_export.core import state_dict as save_weights_to_dict
from pax_export.experimental._default_policy import default_mp_policy
from pax_export.optim import apply_scaled_gradients

__all__ = [
    "apply_scaled_gradients",
    "default_mp_policy",
    "load_weights_from_dict",
    "mutable",
    "save_weights_to_dict",
]
