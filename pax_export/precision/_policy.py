"""Mixed-precision policies: dtypes of parameters, computation and outputs.

A module under a policy is an instance of a derived class, cached by class and policy, whose
methods run on a view (see `_cast_view.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import jax.numpy as jnp
import jmp

from pax_export._errors import InvalidArgumentTypeError, PolicyError
from pax_export._types import PyTree
from pax_export.core import (
    Module,
    Node,
    aspect_of,
    derive_class,
    is_constructing,
    map_attributes,
    register_aspect,
    require_module,
    with_class,
)
from pax_export.precision._cast_view import CastView, ViewPolicy, cast_floating, cast_own

M = TypeVar("M", bound=Module)


def apply_mp_policy(module: M, mp_policy: jmp.Policy) -> M:
    """Puts a module under a mixed-precision policy.

    The module's own floating-point arrays, also in containers, are stored in the param dtype. A
    call of a method sees them, and its array arguments, in the compute dtype; its results have the
    output dtype; changed arrays are stored in the param dtype again. So gradients have the param
    dtype. What the method calls on ``self`` is part of the call, and is not cast.

    A `StateModule`, such as an `EMA`, keeps and computes what it is given; only its results are
    cast.

    The policy applies to this module only: submodules, and modules passed to or returned by a
    method, have their own policies. Methods of `Module` itself, properties, static and class
    methods, special methods other than ``__call__``, and constructors are not affected.

    Args:
        module: the module; it does not change.
        mp_policy: a `jmp.Policy`, e.g. ``jmp.get_policy("p=f32,c=f16,o=f32")``.

    Returns:
        The same data as an instance of a subclass of the same name.

    Raises:
        PolicyError: (a ValueError) the module already has a policy.
        InvalidArgumentTypeError: not a module, or not a policy of floating dtypes.

    Example:
        >>> import jax.numpy as jnp, jmp, pax_export as pax
        >>> half = jmp.Policy(jnp.float32, jnp.float16, jnp.float32)
        >>> layer = pax.apply_mp_policy(pax.Linear(2, 3), half)
        >>> layer
        Linear(in_dim=2, out_dim=3, with_bias=True, mp_policy=FHF)
        >>> layer.weight.dtype.name, layer(jnp.ones((1, 2))).dtype.name
        ('float32', 'float32')
    """
    require_module(module, "apply_mp_policy")
    if policy_of(module) is not None:
        raise PolicyError(
            "This module is under a mixed-precision policy already.",
            got=repr(module),
            write="apply_mp_policy(unwrap_mp_policy(module), policy)",
        )
    policy = canonical_policy(mp_policy)
    cast = map_attributes(module, lambda name, v: cast_own(module, v, policy.param_dtype))
    return with_class(cast, derive_class(type(module), "mp_policy", policy))


def unwrap_mp_policy(module: M) -> M:
    """Takes a module's mixed-precision policy off again.

    Args:
        module: a module that `apply_mp_policy` returned, frozen or not.

    Returns:
        The same data, arrays in the param dtype, as an instance of the class
        without the policy.

    Raises:
        PolicyError: (a ValueError) the module is under no policy.
        InvalidArgumentTypeError: ``module`` is not a module.

    Example:
        >>> import jmp, pax_export as pax
        >>> layer = pax.apply_mp_policy(pax.Linear(2, 3), jmp.get_policy("full"))
        >>> pax.unwrap_mp_policy(layer)
        Linear(in_dim=2, out_dim=3, with_bias=True)
    """
    require_module(module, "unwrap_mp_policy")
    if policy_of(module) is None:
        raise PolicyError(
            "This module is under no mixed-precision policy.",
            got=repr(module),
            write="unwrap_mp_policy only for results of apply_mp_policy",
        )
    return with_class(module, derive_class(type(module), "mp_policy", None))


def policy_of(module: Module) -> jmp.Policy | None:
    """Returns the policy that a module is under, or None.

    Example:
        >>> import jmp, pax_export as pax
        >>> layer = pax.apply_mp_policy(pax.Linear(2, 3), jmp.get_policy("full"))
        >>> print(pax.precision.policy_of(layer))
        p=full,c=full,o=full
    """
    return aspect_of(type(module), "mp_policy")


def canonical_policy(policy: object) -> jmp.Policy:
    """Interns equal policies, to find the derived class."""
    dtypes = [getattr(policy, f"{role}_dtype", None) for role in ("param", "compute", "output")]
    try:
        # Not `None in dtypes`: numpy calls np.dtype("float64") and None equal.
        unset = any(dtype is None for dtype in dtypes)
        names = [] if unset else [jnp.dtype(dtype).name for dtype in dtypes]
    except TypeError:
        names = []
    if not names or not all(jnp.issubdtype(name, jnp.floating) for name in names):
        raise InvalidArgumentTypeError(
            "A mixed-precision policy has three floating-point dtypes.",
            got=repr(policy),
            write='jmp.get_policy("params=float32,compute=float16,output=float32")',
        )
    return jmp.Policy(*[getattr(jnp, name) for name in names])


# --- the derived class ---------------------------------------------------------


# A user's method may have the name of an exempt one.
_MODULE_NAMES = frozenset([name for cls in Module.__mro__ for name in vars(cls)])


def _under_policy(base: type, namespace: dict[str, Any], policy: PyTree) -> dict[str, Any]:
    """Returns wrappers of the methods to which a policy applies."""
    if isinstance(policy, ViewPolicy):
        return {}
    found: dict[str, Any] = {}
    for cls in reversed(base.__mro__):
        if cls not in Module.__mro__:
            found.update(vars(cls))
    found.update(namespace)
    return {name: _wrap_method(x, policy) for name, x in found.items() if _is_concerned(name, x)}


def _is_concerned(name: str, value: object) -> bool:
    """True for functions of an instance, jitted and partial ones too."""
    special = name.startswith("__") and name.endswith("__") and name != "__call__"
    if special or name in _MODULE_NAMES:
        return False
    if isinstance(value, (type, staticmethod, classmethod, Node)):
        return False
    if isinstance(value, functools.partialmethod):
        return True
    return callable(value) and hasattr(type(value), "__get__")


def _wrap_method(method: Callable[..., Any], policy: jmp.Policy) -> Callable:
    """A method that runs on the cast view of its module."""
    is_generator = inspect.isgeneratorfunction(method)

    def wrapper(self: Any, /, *args: object, **kwargs: object) -> Any:
        if is_constructing(self):
            return method.__get__(self, type(self))(*args, **kwargs)
        args, kwargs = cast_own(self, (args, kwargs), policy.compute_dtype)
        view = CastView(self, policy)
        call = method.__get__(view.module, type(view.module))
        if is_generator:
            return _cast_steps(view, call(*args, **kwargs))
        try:
            result = call(*args, **kwargs)
        finally:
            view.close()
        view.write_back()
        return view.result(result)

    return functools.update_wrapper(wrapper, method)


def _cast_steps(view: CastView, steps: Generator) -> Generator:
    """A generator on a view: each of its steps is a call."""
    sent = None
    while True:
        try:
            item = steps.send(cast_floating(sent, view.policy.compute_dtype))
        except StopIteration as stop:
            view.write_back()
            return view.result(stop.value)
        view.write_back()
        sent = yield view.result(item)


register_aspect("mp_policy", _under_policy)
