"""Optimizers of optax as modules that hold their state."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_map, tree_map_with_path

from pax_export._foundations.errors import InvalidArgumentTypeError, NotPicklableError
from pax_export._foundations.jax import is_tracer
from pax_export._foundations.optional import require
from pax_export._foundations.types import Array, ArrayLike, PyTree
from pax_export.core import (
    Module,
    StateModule,
    count_array_elements,
    is_array,
    is_node,
    named_leaves,
    path_name,
    static_key,
    warn_of_untrained,
)

if TYPE_CHECKING:
    import optax

    Transformation: TypeAlias = optax.GradientTransformation
    Source: TypeAlias = Transformation | Callable[[], Transformation]

T = TypeVar("T")


def parameters_of(tree: T) -> T:
    """Returns the trainable part of a model."""
    if not isinstance(tree, Module):
        return tree
    warn_of_untrained(tree)
    return tree.parameters()


def optimizer_contents(optimizer: Module, rules: list[str]) -> dict[str, Any]:
    """The names of the rules and the counts of an optimizer; all arrays are state."""
    named = f"[{', '.join(rules)}]" if rules else None
    return {"rules": named, "state": sum(map(count_array_elements, tree_leaves(optimizer)))}


def opax_contents(self: Module) -> dict[str, Any]:
    """Describes an optimizer of opax: a chain contains others, of classes created by functions."""
    chained = vars(self).get("transforms", ())
    return optimizer_contents(self, [type(each).__name__ for each in chained])


def optax_contents(self: Module) -> dict[str, Any]:
    """Describes an optax optimizer: a chain has a tuple of states, named after their rules."""
    names = [type(each).__name__ for each in _flatten_chain(vars(self).get("state"))]
    keep = [name for name in names if name.endswith("State") and name != "EmptyState"]
    return optimizer_contents(self, [name.removesuffix("State") for name in keep])


def _flatten_chain(state: optax.OptState | None) -> list[Any]:
    """Returns the states of all rules; chains may be nested."""
    if type(state) is not tuple:
        return [state]
    return [rule for each in state for rule in _flatten_chain(each)]


class OptaxOptimizer(StateModule):
    """An optimizer of optax with its state; created by `from_optax`.

    Attributes:
        recipe: the transformation, static data.
        state: the state of the transformation.  Moments are modules of the model's class with the
            parameters' shapes.
        slow_params: for `optax.lookahead`, the parameters to evaluate and serve
            (``model.update_parameters(optimizer.slow_params)``), else None.  The model has the fast
            ones.

    Example:
        >>> import optax, pax_export as pax
        >>> params = pax.Linear(2, 3).parameters()
        >>> optimizer = pax.optim.from_optax(optax.sgd(1.0, momentum=0.9))(params)
        >>> isinstance(optimizer, pax.optim.OptaxOptimizer)
        True
        >>> optimizer, updates = optimizer % (params, params)
        >>> updates.weight.shape
        (2, 3)
    """

    def __init__(self, recipe: KeyedTransformation, params: PyTree):
        super().__init__()
        self.recipe = recipe
        params = parameters_of(params)
        # Copies: the model and its optimizer may be donated to one jitted step.
        self.slow_params = tree_map(jnp.copy, params) if recipe.takes_slow else None
        self.state = _as_state(recipe.init(self._as_optax(params)), params)

    def __call__(self, grads: T, params: T | None = None, **extra: PyTree) -> T:
        """Returns the updates to subtract; it changes the state, so call it with `%`.

        Args:
            grads: gradients.
            params: the parameters, for transformations that need them.
            **extra: other arguments of the transformation, e.g. ``value=loss``; unknown ones are
                ignored, as in optax.

        Raises:
            TypeError: an argument that the transformation needs is missing.
        """
        update = functools.partial(self.recipe.update, **self.recipe.accepted(extra))
        updates, state = update(grads, self.state, self._as_optax(params))
        self.state = _as_state(state, params)
        return tree_map(jnp.negative, self._for_model(updates))

    def remade(self, params: PyTree) -> OptaxOptimizer:
        """Returns the same optimizer for other parameters, with the state of those that remain.

        For a model that changed during training: another head, other frozen parts.

        Args:
            params: the parameters of the changed model.

        Returns:
            An optimizer of this class.  Arrays of its state keep this one's values where path,
            shape and dtype match; others are initialized.

        Example:
            >>> import optax, pax_export as pax
            >>> net = pax.Sequential(pax.Linear(2, 3), pax.Linear(3, 4))
            >>> adam = pax.optim.from_optax(optax.adam(1e-3))(net.parameters())
            >>> net = net.at("modules.1").set(pax.Linear(3, 5))
            >>> adam = adam.remade(net.parameters())
            >>> adam.state[0].mu.modules[1].weight.shape
            (3, 5)
        """
        known: dict[str, Any] = dict(named_leaves(self))

        def of_leaf(path: tuple, leaf: Array) -> Array:
            old: Any = known.get(path_name(path))
            same = is_array(old) and old.shape == leaf.shape and old.dtype == leaf.dtype
            return old if same else leaf

        return tree_map_with_path(of_leaf, type(self)(self.recipe, params))

    _pax_contents = optax_contents

    def _as_optax(self, params: T) -> T | optax.LookaheadParams:
        """Returns the parameters in the transformation's form: for lookahead, a pair."""
        if self.slow_params is None:
            return params
        optax = require("optax", "optax", "optax.lookahead")
        return optax.LookaheadParams(fast=params, slow=self.slow_params)

    def _for_model(self, updates: PyTree) -> Any:
        """The updates of the model's parameters; those of the slow ones are made here."""
        if self.slow_params is None:
            return updates
        if not hasattr(updates, "slow"):
            raise InvalidArgumentTypeError(
                "optax.lookahead must be the last to change the updates.",
                got=f"updates of type {type(updates).__name__}",
                write="optax.chain(optax.clip(1.0), optax.lookahead(optax.adam(1e-3), 5, 0.5))",
            )
        self.slow_params = tree_map(_add_update, self.slow_params, updates.slow)
        return updates.fast


def _add_update(slow: jax.Array, update: jax.Array) -> Any:
    return (slow + update).astype(slow.dtype)


def from_optax(
    transformation: Source,
) -> Callable[[Any], OptaxOptimizer]:
    """Wraps an optax optimizer as a module.

    The module has optax's state. Called with gradients and parameters, it returns optax's negated
    updates: they are *subtracted*, as opax's are. `build_update_fn`, `apply_gradients` and
    `apply_scaled_gradients` do that.

    Other arguments of an optimizer, such as the loss (`optax.polyak_sgd`, line searches,
    `optax.contrib.reduce_on_plateau`), are supplied by `build_update_fn` and passed on by
    `apply_gradients`. `optax.lookahead` keeps its slow parameters in the module.

    Args:
        transformation: an optax transformation such as ``optax.adam(1e-3)`` or
            ``optax.chain(...)``; or a function without arguments that returns one, such as
            ``functools.partial(optax.adam, 1e-3)``, which can be pickled.

    Returns:
        A function from the parameters of a model to a module.  Modules of equal
        transformations have equal treedefs, so a jitted step is traced once.

    Raises:
        InvalidArgumentTypeError: ``transformation`` is neither.

    Example:
        >>> import optax, pax_export as pax
        >>> layer = pax.Linear(2, 3)
        >>> optimizer = pax.optim.from_optax(optax.sgd(1.0))(layer.parameters())
        >>> grads = layer.parameters()
        >>> optimizer, updates = optimizer % (grads, layer.parameters())
        >>> bool((updates.weight == grads.weight).all())
        True
    """
    return _Recipe(OptaxOptimizer, KeyedTransformation(transformation))


class _Recipe(functools.partial):
    """What makes optimizers; jax refuses it in place of one by an error of ours."""


def _refuse_recipe(*_: Any) -> NoReturn:
    raise InvalidArgumentTypeError(
        "What from_optax returns makes an optimizer, and is none yet.",
        got="from_optax(...) among the arguments of a transform of jax",
        write="optimizer = pax.optim.from_optax(optax.adam(1e-3))(net.parameters())",
    )


jax.tree_util.register_pytree_node(_Recipe, _refuse_recipe, _refuse_recipe)


def _as_state(state: T, params: PyTree) -> T:
    """Returns a state as `jax.jit` would: strongly typed arrays, none of them shared."""
    of_params = set(map(id, tree_leaves(params)))

    def own(leaf: ArrayLike) -> Any:
        if isinstance(leaf, (bool, int, float, complex)):
            leaf = jnp.asarray(leaf)
        if getattr(leaf, "weak_type", False):
            leaf = leaf.astype(leaf.dtype)
        if id(leaf) in of_params and is_array(leaf):
            leaf = jnp.copy(leaf)
        of_params.add(id(leaf))
        return leaf

    return tree_map(own, state)


# --- equality of optax optimizers as static data: by code and closures, at every depth
# Python distinguishes the functions of two ``optax.adam(1e-3)``, which would retrace jitted
# steps.


class KeyedTransformation:
    """A transformation of optax, or a function that makes one; compared by content."""

    _pax_is_constant = True  # its arrays, such as a learning rate, are compared by value

    init: Callable  # makes a state from parameters
    update: Callable  # ``(grads, state, params, **extra) -> (updates, state)``
    takes: frozenset[str] | None  # the extra arguments of ``update``; None if it takes any
    takes_slow: bool  # whether it wants its parameters twice, as `optax.lookahead` does

    def __init__(self, source: Source):
        self._source = source
        transformation: Any = source() if _is_factory(source) else source
        if not callable(getattr(transformation, "init", None)) or not callable(
            getattr(transformation, "update", None)
        ):
            raise InvalidArgumentTypeError(
                "from_optax needs a gradient transformation of optax.",
                got=f"{type(transformation).__name__}: {transformation!r}"[:200],
                write="from_optax(optax.adam(1e-3))",
            )
        self.init, self.update = transformation.init, transformation.update
        self.takes = _keyword_names(transformation.update)
        key = _transformation_key((transformation.init, transformation.update), set())
        self.takes_slow = _mentions_name(key, _lookahead_code())
        self._key = key if source is transformation else _transformation_key(source, set())

    def accepted(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Returns the extra arguments that the transformation accepts."""
        if self.takes is None:
            return extra
        return {name: value for name, value in extra.items() if name in self.takes}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyedTransformation) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __copy__(self) -> KeyedTransformation:
        return self  # it is immutable

    def __deepcopy__(self, memo: dict) -> KeyedTransformation:
        return self

    def __reduce__(self) -> Any:
        try:
            pickle.dumps(self._source)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise NotPicklableError(
                "An optax optimizer consists of functions that pickle cannot find by name.",
                got=str(error),
                write="from_optax(functools.partial(optax.adam, 1e-3)): how to make it, "
                "which pickle can write down",
            ) from error
        return KeyedTransformation, (self._source,)


def _keyword_names(update: Callable) -> frozenset[str] | None:
    parameters = inspect.signature(update).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return frozenset([each.name for each in parameters])


def _lookahead_code() -> frozenset[types.CodeType]:
    """The code of the functions that optax.lookahead returns."""
    optax = sys.modules.get("optax")
    if optax is None:
        return frozenset()  # it created none of them
    constants = optax.lookahead.__code__.co_consts
    return frozenset([const for const in constants if isinstance(const, types.CodeType)])


def _mentions_name(key: Hashable, codes: frozenset[types.CodeType]) -> bool:
    """True if one of these codes is part of a key, at any depth."""
    if isinstance(key, tuple):
        return any(_mentions_name(part, codes) for part in key)
    return isinstance(key, types.CodeType) and key in codes


def _is_factory(source: Source) -> TypeGuard[Callable[[], Transformation]]:
    return callable(source) and not hasattr(source, "update")


def _transformation_key(value: Any, open_ids: set[int]) -> Any:
    """A hashable that is equal for values that compute the same."""
    if id(value) in open_ids:
        return "itself"  # a function that closes over itself
    inner = functools.partial(_transformation_key, open_ids=open_ids | {id(value)})
    if is_node(value):
        leaves, treedef = jax.tree_util.tree_flatten(value)
        return treedef, tuple(map(inner, leaves))
    if is_array(value) and not is_tracer(value):
        return _array_key(value)
    if isinstance(value, types.FunctionType) and _is_optax(value):
        cells = [_content_of(cell, inner) for cell in value.__closure__ or ()]
        defaults = inner((value.__defaults__, value.__kwdefaults__))
        return value.__code__, id(value.__globals__), defaults, tuple(cells)
    if isinstance(value, types.MethodType):
        return inner(value.__func__), inner(value.__self__)
    if isinstance(value, functools.partial):
        return type(value), inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(inner, value))
    if isinstance(value, dict):
        return dict, tuple([(static_key(k), inner(v)) for k, v in value.items()])
    if _is_optax(type(value)) and hasattr(value, "__dict__"):
        return type(value), inner(vars(value))
    return static_key(value)


def _content_of(cell: types.CellType, key: Callable[[Any], Any]) -> Any:
    try:
        return key(cell.cell_contents)
    except ValueError:
        return "empty"  # a variable that has no value yet


def _array_key(array: Array) -> Any:
    """Arrays are few and small here: a learning rate, a mask."""
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    host = np.asarray(array)
    return str(host.dtype), host.shape, host.tobytes()


def _is_optax(value: type | types.FunctionType) -> bool:
    return (value.__module__ or "").split(".")[0] == "optax"
