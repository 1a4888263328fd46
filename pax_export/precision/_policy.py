"""Mixed-precision policies: dtypes of parameters, computation and outputs.

A module under a policy is an instance of a derived class, cached by class and policy, whose
methods run on a view (see `CastView`).
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import jax.numpy as jnp
import jmp
from jax.tree_util import tree_flatten, tree_leaves

from pax_export._foundations.errors import InvalidArgumentTypeError, PolicyError
from pax_export._foundations.types import DTypeLike, PyTree
from pax_export.core import (
    EmptyNode,
    Module,
    Node,
    StateModule,
    apply_bottom_up,
    aspect_of,
    attributes_now,
    attributes_of,
    current_kinds,
    derive_class,
    is_array,
    is_constructing,
    is_floating,
    is_node,
    map_attributes,
    named_modules,
    owner_of,
    register_aspect,
    require_module,
    require_open,
    set_owner,
    store_attribute,
    update_moduledef,
    with_class,
)

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


def canonical_policy(policy: jmp.Policy) -> jmp.Policy:
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


def _under_policy(base: type, namespace: dict[str, Any], policy: jmp.Policy) -> dict[str, Any]:
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


# --- the view of a module that its methods see under a policy -------------------------
# A method runs on a second object with cast arrays, so that neither exceptions nor other threads
# see half-precision weights. Changes are then copied to the module.
#
# The class of a view has the methods as they were written: what a method calls on ``self`` is
# inside of the call, and is not cast again. The class, and not a mark on the object, says so,
# because transforms flatten ``self`` and call methods of a copy.


_MISSING = object()


class ViewPolicy(jmp.Policy):
    """The policy of a view: its arrays are cast already, and its methods cast nothing."""


class CastView:
    """The cast view of a module on whose ``module`` one call of a method runs."""

    def __init__(self, original: Module, policy: jmp.Policy):
        self.original = original
        self.policy = policy
        own = _own_attributes(original)
        self._at_begin = {n: cast_own(original, v, policy.compute_dtype) for n, v in own.items()}
        self._contents = {n: _container_content(v) for n, v in self._at_begin.items()}
        self._originals = _pair_casts(own, self._at_begin)
        inside = ViewPolicy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
        self.module = object.__new__(derive_class(type(original), "mp_policy", inside))
        attributes_now(self.module).update(self._at_begin)
        set_owner(self.module, owner_of(original))
        update_moduledef(self.module, current_kinds(original))
        # The containers of a closed one are read-only.
        self._at_begin = _own_attributes(self.module)

    def close(self) -> None:
        """Ends the time in which the view may be changed."""
        set_owner(self.module, None)

    def write_back(self) -> None:
        """Copies changes of the view to the module; raises if a closed one's container changed."""
        now = _own_attributes(self.module)
        for name in self._at_begin:
            if name not in now:
                delattr(self.original, name)
        for name, value in now.items():
            if not self._is_untouched(name, value):
                self._write_back_one(name, value)

    def _is_untouched(self, name: str, value: object) -> bool:
        if value is not self._at_begin.get(name, _MISSING):
            return False
        (leaves, treedef), (original, first) = _container_content(value), self._contents[name]
        return treedef == first and all(a is b for a, b in zip(leaves, original))

    def _write_back_one(self, name: str, value: PyTree) -> None:
        value = cast_own(self.original, self._as_outside(value), self.policy.param_dtype)
        # A container that needed no cast is one object in both modules.
        if value is not attributes_of(self.original).get(name, _MISSING):
            require_open(self.original, "set", name)
            store_attribute(self.original, name, value)

    def result(self, tree: PyTree) -> Any:
        """Casts results to the output dtype, and replaces views by the modules themselves."""
        return cast_floating(self._as_outside(tree), self.policy.output_dtype)

    def _as_outside(self, tree: PyTree) -> Any:
        """Replaces the view by the module, and in modules made from it arrays and classes."""
        leaves, treedef = tree_flatten(tree, is_leaf=is_cast_leaf)
        found = [self._leaf_outside(leaf) for leaf in leaves]
        return tree if all(map(operator.is_, leaves, found)) else treedef.unflatten(found)

    def _leaf_outside(self, leaf: Any) -> Any:
        if leaf is self.module:
            return self.original
        if getattr(leaf, "__self__", None) is self.module:  # a method
            return getattr(self.original, leaf.__name__)
        if is_node(leaf):
            return self._module_outside(self._with_originals(leaf))
        return self._originals.get(id(leaf), (leaf, leaf))[1]

    def _module_outside(self, module: Node) -> Any:
        inside, outside = type(self.module), type(self.original)
        if all(type(each) is not inside for _, each in named_modules(module)):
            return module
        switch = lambda each: with_class(each, outside) if type(each) is inside else each  # noqa: E731
        return apply_bottom_up(module, switch)

    def _with_originals(self, tree: PyTree) -> Any:
        leaves, treedef = tree_flatten(tree)
        if not any(id(leaf) in self._originals for leaf in leaves):
            return tree
        found = [self._originals.get(id(leaf), (leaf, leaf))[1] for leaf in leaves]
        return treedef.unflatten(found)


def _own_attributes(module: Module) -> dict[str, Any]:
    cls = type(module)
    return {
        name: value
        for name, value in attributes_of(module).items()
        if not isinstance(getattr(cls, name, None), functools.cached_property)
    }


def _container_content(value: object) -> tuple[list[Any], Any]:
    """The contents of a container, to detect in-place changes."""
    if isinstance(value, (Node, EmptyNode)) or is_array(value):
        return [], None
    return tree_flatten(value, is_leaf=is_cast_leaf)


def _pair_casts(own: dict[str, Any], original: dict[str, Any]) -> dict[int, tuple[Any, Any]]:
    """``(cast array, the array it was cast from)`` by the id of the former."""
    pairs = {}
    for name, value in original.items():
        if value is not own[name]:
            before = tree_leaves(own[name], is_leaf=is_cast_leaf)
            after = tree_leaves(value, is_leaf=is_cast_leaf)
            pairs |= {id(b): (b, a) for a, b in zip(before, after) if a is not b}
    return pairs


# --- casts ------------------------------------------------------------------------------


def cast_floating(tree: PyTree, dtype: DTypeLike) -> Any:
    """Casts floating-point arrays outside of modules; an unchanged tree is returned itself."""
    leaves, treedef = tree_flatten(tree, is_leaf=is_cast_leaf)
    cast = [x.astype(dtype) if is_floating(x) and x.dtype != dtype else x for x in leaves]
    return tree if all(map(operator.is_, leaves, cast)) else treedef.unflatten(cast)


def cast_own(module: Module, tree: PyTree, dtype: DTypeLike) -> Any:
    """Casts what a module computes with, except for state, whose small steps would be lost."""
    return tree if isinstance(module, StateModule) else cast_floating(tree, dtype)


def is_cast_leaf(value: object) -> bool:
    """True for modules; and iterators, which jax does not look into either, and warns of."""
    return isinstance(value, (Node, Iterator))
