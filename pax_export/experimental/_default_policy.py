"""The default mixed-precision policy of each layer class.

It is a table of layers, so it stands above `nn`; `precision` itself knows none.
"""

from __future__ import annotations

from typing import TypeVar

import jax.numpy as jnp
import jmp

from pax_export import nn
from pax_export.core import Module
from pax_export.precision import apply_mp_policy, policy_of

M = TypeVar("M", bound=Module)

_IN_HALF = (nn.Linear, nn.Conv1D, nn.Conv2D, nn.Conv1DTranspose, nn.Conv2DTranspose)
_IN_FULL = (nn.BatchNorm1D, nn.BatchNorm2D, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def default_mp_policy(module: M) -> M:
    """Puts one layer under the usual policy of its kind.

    Linear layers and convolutions compute in half precision (bfloat16 on TPUs,
    float16 elsewhere); normalizations compute in float32; both keep and return
    float32.  Other modules, and those under a policy already, stay as they are.

    Args:
        module: one layer; for a whole net, ``net.apply(default_mp_policy)``.

    Returns:
        The layer under its policy.

    Example:
        >>> import pax_export as pax
        >>> net = pax.Sequential(pax.Linear(3, 3), pax.Linear(3, 1))
        >>> net = net.apply(pax.experimental.default_mp_policy)
        >>> print(net.summary())
        Sequential
        ├── modules.0: Linear(in_dim=3, out_dim=3, with_bias=True, mp_policy=FHF)
        └── modules.1: Linear(in_dim=3, out_dim=1, with_bias=True, mp_policy=FHF)
    """
    full = jnp.float32
    if policy_of(module) is not None:
        return module
    if isinstance(module, _IN_HALF):
        return apply_mp_policy(module, jmp.Policy(full, jmp.half_dtype(), full))
    if isinstance(module, _IN_FULL):
        return apply_mp_policy(module, jmp.Policy(full, full, full))
    return module
