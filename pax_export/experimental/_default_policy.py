"""The default mixed-precision policy of a layer, by the roles of its arrays."""

from __future__ import annotations

from typing import TypeVar

import jax.numpy as jnp
import jmp

from pax_export.core import Module, computes_in
from pax_export.precision import apply_mp_policy, policy_of

M = TypeVar("M", bound=Module)


def default_mp_policy(module: M) -> M:
    """Puts one layer under the usual policy of its kind.

    Layers with a kernel (see `pax_export.Declared`) compute in half precision (bfloat16 on TPUs,
    float16 elsewhere), those with the scale of a norm in float32; both keep and return
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
    if computes_in(module) == "half":
        return apply_mp_policy(module, jmp.Policy(full, jmp.half_dtype(), full))
    if computes_in(module) == "float32":
        return apply_mp_policy(module, jmp.Policy(full, full, full))
    return module
