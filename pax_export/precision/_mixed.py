"""Policies of nets and layers: `mixed_precision`, and the usual policy of one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import jmp

from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    PolicyError,
    a_few,
)
from pax_export.core import (
    Chosen,
    Module,
    Selector,
    apply_bottom_up,
    declared_in,
    map_submodules,
    matcher,
    named_modules,
    require_module,
)
from pax_export.precision._policy import (
    apply_mp_policy,
    canonical_policy,
    policy_of,
    unwrap_mp_policy,
)
from pax_export.precision.quantized import ArrayLike

M = TypeVar("M", bound=Module)
Filter = type | str | Chosen | Callable[..., Any]


def mixed_precision(
    module: M, mp_policy: jmp.Policy, *, exempt: Filter | Sequence[Filter] = ()
) -> M:
    """Puts a module and all its submodules under a mixed-precision policy.

    Exempt modules, with all submodules, keep their parameters and compute in float32, and still
    return the output dtype of the policy.  A module that already has a policy keeps it, so set
    other exceptions first.  (Attention needs no exemption: its softmax is in float32 under every
    policy.)

    Args:
        module: the net; it does not change.
        mp_policy: a `jmp.Policy`, e.g. ``jmp.get_policy("p=f32,c=f16,o=f32")``.
        exempt: the exempt modules, as one filter or several.  A filter is

            * a class: its instances;
            * a path, such as ``"layers.0.attention"`` or ``"attention.*_norm"``:
              the modules whose dotted names, as in `named_modules` and in weights files, end with
              it; ``*``, ``?`` and ``[..]`` match parts of one name, ``**`` any number of names, and
              a path that begins with a dot begins at the net;
            * a function of a module, or of path and module, that returns whether it is exempt;
            * a selection of ``net.at(...)``.

    Returns:
        The same data; every module is an instance of a subclass of the same
        name.  Equal calls give equal treedefs.

    Raises:
        InvalidArgumentError: (a ValueError) a filter matches no module, or the
            whole net.
        InvalidArgumentTypeError: no module, no policy, or no filter.
        PolicyError: (a ValueError) every module has a policy already.

    Example:
        >>> import jax, jmp, pax_export as pax
        >>> net = pax.Sequential(pax.Linear(3, 3), pax.Linear(3, 3), jax.nn.softmax)
        >>> half = jmp.get_policy("p=f32,c=f16,o=f32")
        >>> exempt = (pax.Lambda, "modules.1")
        >>> print(pax.precision.mixed_precision(net, half, exempt=exempt).summary())
        Sequential(mp_policy=FHF)
        ├── modules.0: Linear(in_dim=3, out_dim=3, with_bias=True, mp_policy=FHF)
        ├── modules.1: Linear(in_dim=3, out_dim=3, with_bias=True, mp_policy=FFF)
        └── modules.2: x => softmax(x)  (mp_policy=FFF)
    """
    require_module(module, "mixed_precision")
    policy = canonical_policy(mp_policy)
    full = _in_float32(policy)
    named = [each for each in named_modules(module) if not isinstance(each[1], ArrayLike)]
    if all(policy_of(each) is not None for _, each in named):
        raise PolicyError(
            "Every module of this net is under a mixed-precision policy already.",
            got=repr(module),
            write="mixed_precision(remove_policies(net), policy)",
        )
    exempted = _exempt_modules(named, exempt)

    def put(module: Module, is_full: bool) -> Any:
        if isinstance(module, ArrayLike):
            return module  # a quantized weight: its scales are no arrays to compute with
        is_full = is_full or id(module) in exempted
        new = map_submodules(module, lambda sub: put(sub, is_full))
        if policy_of(new) is not None:
            return new
        return apply_mp_policy(new, full if is_full else policy)

    return put(module, False)


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
    roles = {each.declared.role for each in declared_in(module).values()}
    if policy_of(module) is not None or not roles & {"kernel", "scale"}:
        return module
    full: Any = jnp.float32
    half = jmp.half_dtype() if "kernel" in roles else full
    return apply_mp_policy(module, jmp.Policy(full, half, full))


def under_policy(module: M, mp_policy: jmp.Policy) -> M:
    """``net.at(...).policy(p)``; p may also be the text of a policy, or None to remove it."""
    if mp_policy is None:
        return remove_policies(module)
    try:
        policy = jmp.get_policy(mp_policy) if isinstance(mp_policy, str) else mp_policy
    except ValueError:  # of jmp, about a text that is no policy
        policy = canonical_policy(mp_policy)
    return mixed_precision(module, policy)


def remove_policies(module: M) -> M:
    """Removes the policies of a module and all its submodules.

    Args:
        module: the net; any of its modules may have policies.

    Returns:
        The same data without policies; arrays keep their dtypes.

    Raises:
        InvalidArgumentTypeError: ``module`` is not a module.

    Example:
        >>> import jmp, pax_export as pax
        >>> half = jmp.get_policy("p=f32,c=f16,o=f32")
        >>> net = pax.Sequential(pax.Linear(3, 3))
        >>> pax.precision.remove_policies(pax.precision.mixed_precision(net, half)) == net
        True
    """
    require_module(module, "remove_policies")
    return apply_bottom_up(module, lambda m: m if policy_of(m) is None else unwrap_mp_policy(m))


def _in_float32(policy: jmp.Policy) -> jmp.Policy:
    param, compute = (
        jnp.promote_types(dtype, jnp.float32)
        for dtype in (policy.param_dtype, policy.compute_dtype)
    )
    return jmp.Policy(param, compute, policy.output_dtype)


def _exempt_modules(named: list[tuple[str, Any]], exempt: Selector) -> set[int]:
    """The ids of the modules that a filter matches; each filter must match some."""
    found: set[int] = set()
    for each in _as_filters(exempt):
        matches = _require_matcher(each)
        matched = [(path, module) for path, module in named if matches(path, module)]
        if not matched or matched[0][0] == "":
            raise InvalidArgumentError(
                "An exemption from a mixed-precision policy matches no module, or the whole net.",
                got=each.__qualname__ if isinstance(each, type) else repr(each),
                write="a filter of submodules, such as "
                + a_few([path for path, _ in named[1:]], 5),
            )
        found.update([id(module) for _, module in matched])
    return found


def _as_filters(exempt: Selector) -> Iterable[Any]:
    if isinstance(exempt, Iterable) and not isinstance(exempt, (str, type, Module, Chosen)):
        return exempt
    return [exempt]


def _require_matcher(each: Selector) -> Callable[[str, Any], Any]:
    found = matcher(each, anywhere=True)
    if found is not None:
        return found
    raise InvalidArgumentTypeError(
        "An exemption is a class, the dotted path of a module, or a function of one.",
        got=f"{type(each).__name__}: {each!r}"[:200],
        write='exempt=(pax.LayerNorm, "attention.output_projection", lambda module: ...)',
    )
