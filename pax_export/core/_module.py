"""Module: a Python object that is an immutable pytree.

The methods are one line each; the functions that they call are in other files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import jax

from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    hide_frames,
)
from pax_export._foundations.types import PyTree
from pax_export.core import _check, _edit, _parameters, _scopes, _summary, _tree
from pax_export.core._containers import READ_ONLY, copy_containers
from pax_export.core._edit import Spec, with_specs
from pax_export.core._metaclass import ModuleMeta, new_uninitialized, restore, to_picklable
from pax_export.core._pure import purecall, require_module
from pax_export.core._state_dict import load_state_dict, state_dict
from pax_export.core._traversal import apply_bottom_up, map_submodules, rebuild_tree, submodules
from pax_export.core.selections.selection import Selection
from pax_export.core.selections.verbs import freeze_at

if TYPE_CHECKING:
    from pax_export.core.selections.filters import Selector


def _refuse_forward(self: Module, *args: Any, **kwargs: Any) -> NoReturn:
    raise InvalidArgumentTypeError(
        "A module is called by its method __call__, not by forward.",
        where=type(self).__name__,
        got="a class with forward and without __call__",
        write="def __call__(self, x): ... in place of def forward(self, x): ...",
    )


M = TypeVar("M", bound="Module")


def _refuse_reserved(cls: type) -> None:
    """Raises if a class uses a name of `Module` for a field, or redefines one that must stay."""
    # A dataclass would take the attribute of Module for the default of such a field.
    fields = [name for name in inspect.get_annotations(cls) if name in _NAMES - vars(cls).keys()]
    if reserved := [*fields, *(name for name in _RESERVED if name in vars(cls))]:
        raise InvalidArgumentError(
            "A class of modules uses a name that pax_export.Module has.",
            where=f"{cls.__qualname__}.{reserved[0]}",
            write=f"another name, such as {reserved[0]}_",
        )


_RESERVED = ("at", "training")


class Module(_tree.Node, metaclass=ModuleMeta):
    """The root of all modules: a Python object that jax sees as a tree of arrays.

    Attributes that are arrays or modules, alone or in containers, are subtrees
    of the pytree; everything else is static data, which jax compares to decide
    whether a function must be traced again.  A module can be changed only in its
    own ``__init__``, inside `pure`, and inside `experimental.mutable`.

    The layers in a module are trained.  Its own arrays are not, unless its class says so: see
    `ParameterModule`, `parameters_method` and `StateModule`.

    A subclass need not call ``super().__init__()``.  It is registered with jax
    by being written.

    Args:
        training: whether the module starts in train mode.
        name: shown by ``repr`` and ``summary``.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> class Affine(pax.ParameterModule):
        ...     def __init__(self, dim):
        ...         super().__init__()
        ...         self.scale, self.offset = jnp.ones(dim), jnp.zeros(dim)
        ...     def __call__(self, x):
        ...         return self.scale * x + self.offset
        >>> jax.jit(lambda module, x: module(x))(Affine(3), jnp.ones(3)).shape
        (3,)
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _refuse_reserved(cls)
        if "forward" in vars(cls) and not any("__call__" in vars(each) for each in cls.__mro__):
            cls.__call__ = _refuse_forward

    __dict__ = property(_tree.attributes_of)  # type: ignore  # filled when looked at

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return new_uninitialized(cls)

    def __init__(self, *, training: bool = True, name: str | None = None):
        self._training = training
        self._name = name

    @property
    def name(self) -> str | None:
        """The name that repr and summary show, or None."""
        return self._name

    @property
    def training(self) -> bool:
        """True in train mode, False in eval mode."""
        return self._training

    if TYPE_CHECKING:  # most modules can be called, and some are in lists of modules

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    # --- change -----------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> None:
        _scopes.require_open(self, "set", name)
        if type(value) in READ_ONLY:  # of another module
            value = copy_containers(value)
        if _scopes.is_constructing(self):
            object.__setattr__(self, name, value)
        else:
            _scopes.store_attribute(self, name, value)

    def __delattr__(self, name: str) -> None:
        _scopes.require_open(self, "delete", name)
        _scopes.remove_attribute(self, name)
        if not _scopes.is_constructing(self):
            _scopes.refresh_kinds(self)

    def copy(self) -> Self:
        """Returns a new module with the same arrays and new containers."""
        return rebuild_tree(self)

    def replace(self, **attributes: object) -> Self:
        """Returns a new module with other values of these attributes.

        Args:
            **attributes: attributes that the module has; shapes are not checked.

        Raises:
            InvalidArgumentError: (an AssertionError too) no such attribute.
            SharedNodeError: a module or array would occur twice.
        """
        return _edit.replace(self, attributes)

    def set_attribute(self, name: str, value: object) -> Self:
        """Returns a new module with an attribute added or replaced.

        Raises:
            SharedNodeError: a module or array is now at two places.
        """
        return _edit.with_attributes(self, {name: value})

    def replace_node(self, node: PyTree, value: PyTree) -> Any:
        """Returns a new module in which the one node that *is* ``node`` is ``value``.

        Args:
            node: an array, module or container of this module.
            value: the new value; any pytree.

        Raises:
            SharedNodeError: the node does not occur exactly once.
        """
        return _edit.replace_node(self, node, value)

    def replace_method(self, **methods: Callable[..., Any]) -> Self:
        """Returns the same data as a subclass (of the same name) with these methods.

        Functions that read variables are static data of each module; calls with such functions
        share one class.
        """
        return _edit.replace_method(self, methods)

    def train(self) -> Self:
        """Returns the module with itself and all submodules in train mode."""
        return _edit.set_training(self, True)

    def eval(self) -> Self:
        """Returns the module with itself and all submodules in eval mode."""
        return _edit.set_training(self, False)

    def _with_training(self, training: bool) -> Self:
        """This module alone in another mode; its submodules are switched already."""
        return _edit.with_static(self, _training=training)

    # --- parts ------------------------------------------------------------------

    def at(self, what: Selector) -> Selection:
        """Selects parts of the module, to look at them or to change them; see `Selection`.

        Args:
            what: a path such as ``"encoder.layers.*.attention"``, a class of modules, a function
                of a module, or of path and value, a filter of `pax_export.transforms`, another
                selection, or several of these.

        Raises:
            InvalidArgumentError: nothing in the module matches; the message suggests similar names.
            InvalidArgumentTypeError: not a valid selector.

        Example:
            >>> import pax_export as pax
            >>> net = pax.Sequential(pax.Linear(3, 4), pax.Linear(4, 2))
            >>> net = net.at("modules.1").replace(pax.Linear(4, 10))
            >>> net.at("modules.*.bias").names()
            ['modules.0.bias', 'modules.1.bias']
        """
        return Selection.of(self, what)

    # --- leaves -----------------------------------------------------------------

    @property
    def pytree_attributes(self) -> tuple[str, ...]:
        """The names of the attributes that are subtrees, in child order."""
        return _tree.flatten(self)[1].names

    parameters = _parameters.method_for(_parameters.UNDECLARED)

    def update_parameters(self, params: Module) -> Self:
        """Returns the module with the arrays that ``params.parameters()`` has.

        Args:
            params: a module of the same structure, whole or as ``parameters()``
                returned it.

        Raises:
            StructureMismatchError: (a ValueError) another structure.
        """
        return _parameters.merge(self, params.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Returns all arrays as nested dicts; see `save_weights_to_dict`."""
        return state_dict(self)

    def load_state_dict(self, weights: dict[str, Any]) -> Self:
        """Returns a module with the arrays of a dict; see `load_weights_from_dict`."""
        return load_state_dict(self, weights)

    def map(self, function: Callable[..., Any], *others: Module | dict[str, Any]) -> Self:
        """Returns the module with each array ``function(own, *the others')``.

        Args:
            function: takes one array of each module and returns one.
            *others: modules with state dicts of the same structure.
        """
        return _edit.map_leaves(self, function, *others)

    def with_sharding(self, **specs: Spec) -> Self:
        """Returns a new module with declared partition specs of its arrays.

        Args:
            **specs: for an attribute, a tuple with the name of a mesh axis (or
                several, or None) for each axis of its array.
        """
        return with_specs(self, specs)

    # --- submodules -----------------------------------------------------------------

    def submodules(self) -> list[Any]:
        """Returns the direct submodules, in tree order."""
        return submodules(self)

    def apply(self, function: Callable[[Any], Any]) -> Any:
        """Replaces every module by ``function(module)``, children first."""
        return apply_bottom_up(self, function)

    def apply_submodules(self, function: Callable[[Any], Any]) -> Self:
        """Like `apply`, but the module itself is not passed."""
        return map_submodules(self, lambda sub: sub.apply(function))

    def scan_bugs(self) -> Self:
        """Checks all modules for sharing and hidden arrays; returns the module.

        Raises:
            HiddenArrayError: ``__slots__``, or a class attribute with arrays.
            SharedNodeError: a module or array is at two places.
        """
        _check.check_modules(self)
        return self

    # --- printing -----------------------------------------------------------------

    def __repr__(self) -> str:
        return self._repr()

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        return _summary.module_line(self, info)

    def _pax_contents(self) -> dict[str, Any]:
        """The default `repr` of modules without `_repr`."""
        return _summary.count_elements(self)

    def _repr_html_(self) -> str | None:
        """Returns HTML for notebooks: the rows of `pax_export.inspect` as a collapsible tree."""
        return _summary.module_html(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Callable[..., Any]) -> Any:
        """Returns treescope's rendering: the attributes, collapsible."""
        return _summary.render_treescope(self, path, subtree_renderer)

    def summary(self, return_list: bool = False) -> str | list[str]:
        """Returns the tree of the module and its submodules as text.

        Each submodule has its name in its parent, as paths of `at` and `replace` have it.

        Args:
            return_list: whether to return the list of lines.

        Example:
            >>> import pax_export as pax
            >>> net = pax.Sequential(pax.Linear(2, 3), pax.Linear(3, 1))
            >>> print(net.summary())
            Sequential
            ├── modules.0: Linear(in_dim=2, out_dim=3, with_bias=True)
            └── modules.1: Linear(in_dim=3, out_dim=1, with_bias=True)
        """
        lines = _summary.summary_lines(self)
        return lines if return_list else "\n".join(lines)

    # --- operators ------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """True if structures are equal and all leaves are the same objects."""
        if self is other:
            return True
        if type(self) is not type(other):
            return False
        leaves, treedef = jax.tree_util.tree_flatten(self)
        others, other_def = jax.tree_util.tree_flatten(other)
        return treedef == other_def and all(map(lambda a, b: a is b, leaves, others))

    def __hash__(self) -> int:
        leaves, treedef = jax.tree_util.tree_flatten(self)
        kinds = [(getattr(x, "shape", ()), str(getattr(x, "dtype", ""))) for x in leaves]
        return hash((treedef, tuple(kinds)))

    def __mod__(self, args: PyTree) -> tuple[Self, Any]:
        """``module % x``: the updated module and the output; a tuple is unpacked."""
        try:
            return purecall(self, *(args if isinstance(args, tuple) else (args,)))
        except Exception as error:  # raised again with fewer frames
            hide_frames(error)
            raise

    def __or__(self, other: Module) -> Self:
        """``a | b``: the tree of ``a`` with the arrays that ``b`` has."""
        if not isinstance(other, Module):  # type: ignore  # for Python to ask the other
            return NotImplemented
        return _parameters.merge(self, other)

    def __invert__(self) -> Self:
        """``~module``: its parameters."""
        return self.parameters()

    # --- pickling and copying ------------------------------------------------------

    def __copy__(self) -> Self:
        return self.copy()

    def __reduce__(self) -> Any:
        return restore, (
            type(self),
            self.pytree_attributes,
            {name: to_picklable(value) for name, value in vars(self).items()},
        )


_NAMES = frozenset([name for name in vars(Module) if not name.startswith("_")])


class ParameterModule(Module):
    """A module whose own arrays are all trainable.

    Example:
        >>> import pax_export as pax
        >>> isinstance(pax.Linear(1, 1), pax.ParameterModule)
        True
    """

    parameters = _parameters.method_for(_parameters.EVERYTHING)


class StateModule(Module):
    """A module whose own arrays are not trainable; those of its submodules may be.

    It keeps the same parameters as a plain `Module`, without the warning.

    Example:
        >>> import pax_export as pax
        >>> pax.EMA(1.0, 0.9).parameters().averages
        EmptyNode
    """

    parameters = _parameters.method_for(_parameters.NOTHING)


def select_parameters(module: M) -> M:
    """Returns ``module.parameters()``.

    Example:
        >>> import pax_export as pax
        >>> pax.select_parameters(pax.BatchNorm1D(3)).ema_mean.averages
        EmptyNode
    """
    require_module(module, "select_parameters")
    return module.parameters()


def update_parameters(module: M, *, params: Module) -> M:
    """Returns ``module.update_parameters(params)``.

    Example:
        >>> import pax_export as pax
        >>> a, b = pax.Linear(1, 1), pax.Linear(1, 1)
        >>> pax.update_parameters(a, params=b).weight is b.weight
        True
    """
    require_module(module, "update_parameters")
    return module.update_parameters(params)


def freeze_parameters(module: M, *, states: bool = False) -> M:
    """Returns a copy in which no array, at any depth, is trainable.

    Only parameters are frozen: gradients and optimizers skip them.  States
    stay states: in train mode a frozen batch norm still normalizes with its
    batch and updates its running mean and variance, and dropout is still applied.  With
    ``states=True`` the copy stays in eval mode, whatever mode the net around it
    is put in: running statistics are used and not updated.

    What is frozen is static data of each module; the classes stay.

    Args:
        module: the module.
        states: whether its states are frozen as well.

    Example:
        >>> import pax_export as pax
        >>> pax.freeze_parameters(pax.Linear(1, 1)).parameters().weight
        EmptyNode
        >>> pax.freeze_parameters(pax.BatchNorm1D(1), states=True).train().training
        False
    """
    require_module(module, "freeze_parameters")
    return freeze_at(module, ((),), states)


def unfreeze_parameters(module: Module, *, origin: M) -> M:
    """Returns the leaves of a module in the tree of the module it was frozen from.

    Args:
        module: the frozen module.
        origin: the module before it was frozen; static data, the mode included,
            is taken from it.

    Raises:
        InvalidArgumentError: the two differ in their leaves: their number, a name
            or a shape.

    Example:
        >>> import pax_export as pax
        >>> layer = pax.Linear(1, 1)
        >>> frozen = pax.freeze_parameters(layer)
        >>> pax.unfreeze_parameters(frozen, origin=layer) == layer
        True
    """
    require_module(module, "unfreeze_parameters")
    return _parameters.unfreeze_like(module, origin)


def enable_train_mode(module: M) -> M:
    """Returns ``module.train()``.

    Example:
        >>> import pax_export as pax
        >>> pax.enable_train_mode(pax.Linear(1, 1)).training
        True
    """
    require_module(module, "enable_train_mode")
    return module.train()


def enable_eval_mode(module: M) -> M:
    """Returns ``module.eval()``.

    Example:
        >>> import pax_export as pax
        >>> pax.enable_eval_mode(pax.Linear(1, 1)).training
        False
    """
    require_module(module, "enable_eval_mode")
    return module.eval()
