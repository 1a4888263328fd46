"""Training steps, and optimizers as modules."""

from pax_export.optim._opax import load_opax
from pax_export.optim._optax import OptaxOptimizer, from_optax
from pax_export.optim._steps import apply_gradients, apply_scaled_gradients, build_update_fn

# Names that are imported but not in `__all__` are for other packages of pax_export.
__all__ = [
    "OptaxOptimizer",
    "apply_gradients",
    "apply_scaled_gradients",
    "build_update_fn",
    "from_optax",
]
