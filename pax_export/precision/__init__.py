"""Mixed precision: policies for modules, and loss scales."""

from pax_export.precision._loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    adjust,
    unscale,
)
from pax_export.precision._mixed import (
    default_mp_policy,
    mixed_precision,
    remove_policies,
    under_policy,
)
from pax_export.precision._policy import apply_mp_policy, policy_of, unwrap_mp_policy

# Names that are imported but not in `__all__` are for other packages of pax_export.
__all__ = [
    "DynamicLossScale",
    "NoOpLossScale",
    "StaticLossScale",
    "apply_mp_policy",
    "mixed_precision",
    "policy_of",
    "remove_policies",
    "unwrap_mp_policy",
]
