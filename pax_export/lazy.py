"""LazyModule: modules that create their submodules in the first call."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from jax.tree_util import (
    GetAttrKey,
    tree_flatten_with_path,
    tree_leaves_with_path,
    tree_map,
    tree_unflatten,
)

from pax_export._foundations.errors import InvalidArgumentTypeError, NotMaterializedError
from pax_export._foundations.types import PyTree
from pax_export.core import (
    STATIC,
    Module,
    attributes_of,
    differentiating,
    freeze_parameters,
    frozen_of,
    is_node,
    is_open,
    kind_of,
    module_and_value,
    modules_and_leaves,
    modules_with_paths,
    open_children,
    rebuild_tree,
    require_module,
    set_training,
)

T = TypeVar("T")
M = TypeVar("M")


class LazyModule(Module):
    """A module that creates a submodule when a call first needs it.

    Its first call must be able to change it: ``module, y = module % x``. Before ``jit``, a training
    step or an export, `materialize` creates all submodules at once.

    Args:
        training: whether it starts in train mode.
        name: shown by ``repr`` and ``summary``.

    Example:
        >>> from dataclasses import dataclass
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> @dataclass
        ... class MLP(pax.experimental.LazyModule):
        ...     features: list
        ...
        ...     def __call__(self, x):
        ...         for i, size in enumerate(self.features):
        ...             new = lambda: pax.Linear(x.shape[-1], size)
        ...             x = jax.nn.relu(self.get_or_create(f"fc_{i}", new)(x))
        ...         return x
        >>> mlp, y = MLP([2, 3]) % jnp.ones((1, 1))
        >>> print(mlp.summary())
        MLP(features=[2, 3])
        ├── fc_0: Linear(in_dim=1, out_dim=2, with_bias=True)
        └── fc_1: Linear(in_dim=2, out_dim=3, with_bias=True)
    """

    def get_or_create(self, name: str, create_fn: Callable[[], T]) -> T:
        """Returns an attribute; creates it first if the module lacks it.

        A created module can be used immediately, also by a call that changes it. Modules are
        created in eval mode if this module is in eval mode, and frozen if it is.

        Args:
            name: the attribute.
            create_fn: called without arguments; returns a module, an array, or
                any other value.  The module keeps a copy.

        Raises:
            NotMaterializedError: (a ValueError) the attribute must be created, and this module is
                immutable, or its parameters are differentiated.
            InvalidArgumentTypeError: (an AssertionError too) ``create_fn`` is not callable.
        """
        if name in attributes_of(self) or hasattr(self, name):
            return getattr(self, name)
        self._check_can_create(name, create_fn)
        value = create_fn()
        if kind_of(value) is STATIC:
            setattr(self, name, value)
            return value
        if differentiating.get() and _recorder.get() is None:
            raise self._unmaterialized(name, "where its parameters would get no gradients")
        # A copy, because others may reference the created module and must not see it change.
        value = rebuild_tree(value) if self.training else set_training(value, False)
        frozen = frozen_of(self)
        if frozen.whole:
            freeze = partial(_frozen, statistics=frozen.statistics)
            value = tree_map(freeze, value, is_leaf=is_node)
        setattr(self, name, value)
        recorder = _recorder.get()
        if recorder is not None:
            recorder.record_creation(self, name, value)
        open_children(self, modules_and_leaves(value)[0])
        return value

    def _check_can_create(self, name: str, create_fn: Callable[[], Any]) -> None:
        if not callable(create_fn) or isinstance(create_fn, Module):
            raise InvalidArgumentTypeError(
                "get_or_create needs a function that creates the value.",
                where=f"{type(self).__qualname__}.{name}",
                got=f"{type(create_fn).__name__}: {create_fn!r}"[:120],
                write=f"self.get_or_create({name!r}, lambda: pax.Linear(2, 3))",
            )
        if not is_open(self):
            raise self._unmaterialized(name, "where it is not open for change")

    def _unmaterialized(self, name: str, where: str) -> NotMaterializedError:
        return NotMaterializedError(
            f"A lazy module lacks a submodule, and cannot create it {where}.",
            where=f"{type(self).__qualname__}.{name}",
            write="module = pax.experimental.materialize(module, x) with an example "
            "input x, before jit, grad or export; or module, y = module % x",
        )


def materialize(module: M, *example_inputs: PyTree, **kwargs: PyTree) -> M:
    """Creates all submodules of lazy modules by calling them once.

    Use it before ``jit``, a training step or an export.

    Args:
        module: a `LazyModule`, or a module that contains some.
        *example_inputs: the inputs of the call.
        **kwargs: keyword arguments of the call.

    Returns:
        The module with the structure after the call.  Its arrays have their initial values: so a
        batch norm has not seen the example, and a dropout has not used its key.

    Raises:
        InvalidArgumentTypeError: ``module`` is not a callable module.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> class Norm(pax.experimental.LazyModule):
        ...     def __call__(self, x):
        ...         new = lambda: pax.BatchNorm1D(x.shape[-1])
        ...         return self.get_or_create("norm", new)(x)
        >>> norm = pax.experimental.materialize(Norm(), jnp.ones((2, 5, 3)))
        >>> norm.norm.ema_mean.averages.shape, float(norm.norm.ema_mean.averages.sum())
        ((1, 1, 3), 0.0)
    """
    owner = getattr(module, "__self__", module)
    require_module(owner, "materialize")
    recorder = _CreationRecorder()
    token = _recorder.set(recorder)
    try:
        after, _ = module_and_value(module)(*example_inputs, **kwargs)  # type: ignore[arg-type]
    finally:
        _recorder.reset(token)
    return recorder.with_first_arrays(owner, after)


def _frozen(part: T, statistics: bool) -> T:
    return freeze_parameters(part, states=statistics) if isinstance(part, Module) else part


class _CreationRecorder:
    """Records the submodules created during a call, with their initial values."""

    def __init__(self) -> None:
        # By the id of each created module, that module and its first state.
        self.modules: dict[int, tuple[Any, Any]] = {}
        # By the parent's id and the attribute, the parent and the first value: finds arrays,
        # and modules that were exchanged for updated copies later in the call.
        self.values: dict[tuple[int, str], tuple[Any, Any]] = {}

    def record_creation(self, parent: Module, name: str, value: PyTree) -> None:
        first = rebuild_tree(value)
        # The object is kept with its id, because a freed id could be reused.
        self.values[id(parent), name] = (parent, first)
        pairs = zip(modules_and_leaves(value)[0], modules_and_leaves(first)[0])
        self.modules |= {id(now): (now, then) for now, then in pairs}

    def with_first_arrays(self, before: PyTree, after: Module) -> Any:
        """The structure of a module after a call, with the arrays from before."""
        arrays = dict(tree_leaves_with_path(before))
        for path, module in modules_with_paths(after):
            if id(module) in self.modules:
                arrays |= _leaves_below(path, self.modules[id(module)][1])
            for name in module.pytree_attributes:
                if (id(module), name) in self.values:
                    first = self.values[id(module), name][1]
                    arrays |= _leaves_below((*path, GetAttrKey(name)), first)
        leaves, treedef = tree_flatten_with_path(after)
        return tree_unflatten(treedef, [arrays.get(path, leaf) for path, leaf in leaves])


_recorder: ContextVar[_CreationRecorder | None] = ContextVar("pax_export_recorder", default=None)


def _leaves_below(path: tuple, value: PyTree) -> dict[tuple, Any]:
    return {path + below: leaf for below, leaf in tree_leaves_with_path(value)}
