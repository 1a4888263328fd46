"""Equal layers as one: Vmap, Scan and Remat, and lists of layers that are stacked.

``Vmap(pax.Linear, axis_size=5)`` is a constructor of `Vmap` with stacked modules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_structure

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    StructureMismatchError,
)
from pax_export._foundations.types import Array, PyTree
from pax_export.core import (
    Module,
    Selector,
    is_node,
    leaves_of,
    lent_to_constructors,
    made_of,
)
from pax_export.transforms._axes import AxisPrefix, MapOptions, StateAxes, check_axis_fits
from pax_export.transforms._lift import (
    LiftedCall,
    Strict,
    put_back,
    take_out,
    tree_differences,
)
from pax_export.transforms._remat import remat
from pax_export.transforms._scan import scan
from pax_export.transforms._sharding import with_stacked_axis, without_stacked_axis
from pax_export.transforms._vmap import vmap

ALL_AT_0 = MappingProxyType({...: 0})

# --- the common part of Vmap, Scan and Remat -----------------------------------------


@dataclass(frozen=True)
class Constructor:
    """Constructs lifted modules from an inner constructor and options."""

    cls: type[Lifted]
    inner: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        # Modules go in as arguments, so that the constructor may draw from an RngSeq.
        rest, modules = take_out((args, kwargs), is_node)

        def make(*modules: Module) -> Any:
            args, kwargs = put_back(rest, modules)
            with lent_to_constructors() if modules else nullcontext():
                return self.inner(*args, **kwargs)

        inner = self.cls._build(make, modules, dict(self.options))
        if not isinstance(inner, Module):
            name = type(inner).__name__
            raise self.cls._no_constructor(f"{self.inner!r}, which made a {name}")
        return made_of(self.cls, {self.cls._attribute: inner, "options": self.options})


class Lifted(Module):
    """The common base of Vmap, Scan and Remat."""

    _attribute: ClassVar[str]  # the name of the inner module
    _transform: ClassVar[Callable[..., Any]]
    _size: ClassVar[str]  # the option with the number of modules; empty for one
    options: tuple[tuple[str, Any], ...]

    if not TYPE_CHECKING:  # a type checker reads `__init__` instead

        def __new__(cls, *args: object, **kwargs: object) -> Any:
            """Wraps a constructor; the options are those of ``__init__``, which never runs."""
            bound = cls.__signature__.bind(*args, **kwargs)
            bound.apply_defaults()
            options = dict(bound.arguments)
            inner = options.pop("ctor")
            if not callable(inner) or is_node(inner):
                raise cls._no_constructor(f"{type(inner).__name__}: {inner!r}")
            cls._check(inner, options)
            frozen = [(k, tuple(v) if isinstance(v, list) else v) for k, v in options.items()]
            return Constructor(cls, inner, tuple(frozen))

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Calls the inner module under the transform.

        Args:
            *args: the arguments of the inner call.
            **kwargs: its keyword arguments.

        Returns:
            The transformed results.

        Raises:
            ImmutableModuleError: the inner call changes state, and the module is immutable: use
                ``module % x``.
        """
        return self._run("__call__", args, kwargs)

    @property
    def call(self) -> Methods:
        """The methods of the inner module: ``module.call.encode(x)`` runs one transformed."""
        return Methods(self)

    @property
    def _inner(self) -> Any:
        return getattr(self, self._attribute)

    def _run(self, method: str, args: tuple, kwargs: dict) -> Any:
        def function(module: Module, *args: object, **kwargs: object) -> Any:
            if isinstance(module, Lifted):  # through nested wrappers
                return module._run(method, args, kwargs)
            return getattr(module, method)(*args, **kwargs)

        transformed = self._transform(Strict(function), **dict(self.options))
        return transformed(self._inner, *args, **kwargs)

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        size = {self._size: dict(self.options).get(self._size)}  # without None
        return super()._repr({**size, **self._pax_contents(), **(info or {})})

    @classmethod
    def _check(cls, inner: Callable[..., Any], options: dict[str, Any]) -> None:
        """Checks the options, and converts them to static data."""
        checked = MapOptions(cls.__name__, **options)
        options["state_axes"] = checked.state_axes
        options["transform_metadata"] = tuple(options["transform_metadata"].items())
        cls._transform(Strict(inner), **options)

    @classmethod
    def _build(cls, make: Callable[..., Any], modules: tuple, options: dict[str, Any]) -> Any:
        """The inner module, stacked as often as required."""
        names = ("axis_name", "state_axes", "split_rngs", "transform_metadata")
        options_of = {name: options[name] for name in names if name in options}
        shared = (StateAxes({}),) * len(modules)  # axes are those of the created module
        return vmap(make, axis_size=options[cls._size], in_axes=shared, **options_of)(*modules)

    @classmethod
    def _no_constructor(cls, got: str) -> InvalidArgumentTypeError:
        return InvalidArgumentTypeError(
            f"{cls.__name__} needs a constructor of modules.",
            got=got[:200],
            write=f"{cls.__name__}(pax.Linear, ...)(in_dim, out_dim)",
        )


class Methods:
    """Adds the methods of the inner module to a lifted one, under its transform."""

    def __init__(self, lifted: Lifted):
        self._lifted = lifted

    def __getattr__(self, name: str) -> Any:
        inner: Any = self._lifted
        while isinstance(inner, Lifted):
            inner = inner._inner
        if not callable(getattr(type(inner), name, None)):
            raise AttributeError(f"{type(inner).__name__!r} has no method {name!r}")

        def method(lifted: Lifted, *args: object, **kwargs: object) -> Any:
            return lifted._run(name, args, kwargs)

        method.__name__ = name
        return MethodType(method, self._lifted)


# --- the three ------------------------------------------------------------------------


class Vmap(Lifted):
    """Stacked modules of one class, called in parallel.

    ``Vmap(constructor, **options)`` is a constructor: called with the arguments of the inner one,
    it builds all modules in one trace. A module among these arguments is mutable there, and its
    keys are split: each inner module draws its own keys from an `RngSeq`. The options are those of
    `vmap`, in which the stacked module is the first argument.

    Args:
        ctor: a class of modules, or another constructor.
        in_axes: the axis along which each positional argument of a call is mapped.
        out_axes: the axis along which results are stacked.
        axis_name: a name for collectives such as `jax.lax.pmean`.
        axis_size: the number of modules.
        spmd_axis_name: as in `jax.vmap`.
        in_axes_kwargs: the same as ``in_axes`` for keyword arguments.
        state_axes: which leaves are separate for each module, and at which axis.
        split_rngs: as in `vmap`; without ``"params"`` all modules are built equal.
        transform_metadata: ``{PARTITION_NAME: name}`` names the stacked axis in partition specs.

    Attributes:
        vmap_module: the inner module, with stacked arrays.

    Raises:
        UncoveredStateError: (a ValueError) an initial value differs from module
            to module, and ``state_axes`` does not cover it.
        InvalidArgumentError: (a ValueError) no ``axis_size``.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> layers = T.Vmap(pax.Linear, axis_size=5, in_axes=(0, None))(3, 4)
        >>> layers.vmap_module.weight.shape, layers(jnp.ones((2, 3))).shape
        ((5, 3, 4), (5, 2, 4))
    """

    _attribute, _size, _transform = "vmap_module", "axis_size", staticmethod(vmap)

    def __init__(
        self,
        ctor: Callable[..., Any],
        *,
        in_axes: AxisPrefix = 0,
        out_axes: AxisPrefix = 0,
        axis_name: Hashable = None,
        axis_size: int | None = None,
        spmd_axis_name: Hashable = None,
        in_axes_kwargs: AxisPrefix = 0,
        state_axes: Mapping[Any, int | None] = ALL_AT_0,
        split_rngs: Selector = ...,
        transform_metadata: Mapping[str, Any] = MappingProxyType({}),
    ): ...


class Scan(Lifted):
    """Stacked layers of one class, called in sequence by a compiled loop.

    ``Scan(constructor, length=n)`` is a constructor, as `Vmap` is. The inner call takes the carry
    and returns ``(carry, y)``. The options are those of `scan`, in which the stacked module is the
    first argument.

    Args:
        ctor: a class of modules, or another constructor.
        length: the number of layers.
        reverse: whether to go from the last layer to the first.
        unroll: the number of loop iterations to unroll; True for all.
        _split_transpose: as in `jax.lax.scan`.
        in_axes: the axis along which each positional argument of a call is sliced.
        in_axes_kwargs: the same for keyword arguments.
        out_axes: the axis along which ``y`` is stacked.
        carry_argnum: which argument is the carry; the module is number 0.
        state_axes: which leaves are separate for each layer, and at which axis; all others are
            shared, and passed from layer to layer.
        split_rngs: as in `scan`; without ``"params"`` all layers are built equal.
        transform_metadata: ``{PARTITION_NAME: name}`` names the stacked axis in partition specs.
        scan_output: whether there is a ``y``; if not, the inner call returns the carry.

    Attributes:
        scan_module: the inner module, with stacked arrays.

    Raises:
        UncoveredStateError: (a ValueError) an initial value differs from layer
            to layer, and ``state_axes`` does not cover it.
        InvalidArgumentError: (a ValueError) no ``length``.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> class Layer(pax.Linear):
        ...     def __call__(self, x):
        ...         return jnp.tanh(super().__call__(x)), None
        >>> net = T.Scan(Layer, length=5)(4, 4)
        >>> y, _ = net(jnp.ones((2, 4)))
        >>> net.scan_module.weight.shape, y.shape
        ((5, 4, 4), (2, 4))
    """

    _attribute, _size, _transform = "scan_module", "length", staticmethod(scan)

    def __init__(
        self,
        ctor: Callable[..., Any],
        *,
        length: int | None = None,
        reverse: bool = False,
        unroll: int | bool = 1,
        _split_transpose: bool = False,
        in_axes: AxisPrefix = 0,
        in_axes_kwargs: AxisPrefix = 0,
        out_axes: AxisPrefix = 0,
        carry_argnum: int = 1,
        state_axes: Mapping[Any, int | None] = ALL_AT_0,
        split_rngs: Selector = ...,
        transform_metadata: Mapping[str, Any] = MappingProxyType({}),
        scan_output: bool = True,
    ): ...

    @classmethod
    def _check(cls, inner: Callable[..., Any], options: dict[str, Any]) -> None:
        super()._check(inner, options)
        if options["length"] is None:
            raise InvalidArgumentError(
                "Scan needs a length: the number of layers to build.",
                write=f"Scan({getattr(inner, '__name__', 'Layer')}, length=...)",
            )


class Remat(Lifted):
    """A module whose intermediate values are recomputed for its gradient.

    ``Remat(constructor)`` is a constructor, as `Vmap` is. The options are those of `remat`.

    Args:
        ctor: a class of modules, or another constructor.
        prevent_cse: as in `jax.checkpoint`; False inside of `scan` saves time.
        static_argnums: the positional arguments that are not arrays; the module is
            argument 0.
        policy: which values to store nevertheless.

    Attributes:
        remat_module: the inner module.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> layer = T.Remat(pax.Linear)(3, 4)
        >>> layer.remat_module.weight.shape, layer(jnp.ones((2, 3))).shape
        ((3, 4), (2, 4))
    """

    _attribute, _size, _transform = "remat_module", "", staticmethod(remat)

    def __init__(
        self,
        ctor: Callable[..., Any],
        prevent_cse: bool = True,  # by position, too, as in nnx
        static_argnums: int | Sequence[int] = (),
        policy: Callable[..., bool] | None = None,
    ): ...

    @classmethod
    def _check(cls, inner: Callable[..., Any], options: dict[str, Any]) -> None:
        if isinstance(options["static_argnums"], int):
            options["static_argnums"] = (options["static_argnums"],)

    @classmethod
    def _build(cls, make: Callable[..., Any], modules: tuple, options: dict[str, Any]) -> Any:
        if not modules:
            return make()
        call = LiftedCall(make, modules, {})
        result = call.inside()
        return call.finish(result, result.leaves)


# --- lists of layers ------------------------------------------------------------------


def stack_layers(layers: Sequence[Any], *, axis: int = 0, axis_label: str | None = None) -> Any:
    """Stacks a list of equal modules into one, as in `Scan` and `Vmap`.

    A checkpoint of a network with a list of layers loads into one with scanned layers: load it into
    the former, then stack.

    Args:
        layers: modules of one structure, whose leaves have the same shapes and
            dtypes.
        axis: the position of the new axis of layers.
        axis_label: the name of that axis in partition specs.

    Returns:
        A module of the class of the layers.

    Raises:
        InvalidArgumentError: (a ValueError) the list is empty, or the axis out of bounds.
        StructureMismatchError: (a ValueError) two layers differ.

    Example:
        >>> import pax_export as pax
        >>> from pax_export import transforms as T
        >>> layers = [pax.Linear(3, 4) for _ in range(5)]
        >>> stacked = T.stack_layers(layers)
        >>> stacked.weight.shape
        (5, 3, 4)
        >>> bool((T.unstack_layers(stacked)[2].weight == layers[2].weight).all())
        True
    """
    layers = list(layers)
    if not layers:
        raise InvalidArgumentError(
            "stack_layers needs at least one layer.", got="an empty list", write="a list of modules"
        )
    first = layers[0]
    for number, layer in enumerate(layers):
        if lines := tree_differences(first, layer, "the layer"):
            raise StructureMismatchError(
                "Only equal layers can be stacked.",
                where=f"layer {number}",
                got="; ".join(lines[:3]),
                write="layers of one recipe, in one mode (train or eval); for adapters of "
                "different ranks, adapters.pad_ranks(net) before",
            )
    axis = checked_integer(axis, "stack_layers.axis", write="axis=0")
    for name, leaf in _leaves_with_names(first):
        check_axis_fits("stack_layers", axis, jnp.ndim(leaf) + 1, jnp.shape(leaf), name)
    columns = zip(*map(tree_leaves, layers))
    leaves = [jnp.stack(column, axis) for column in columns]
    stacked = tree_structure(first).unflatten(leaves)
    return with_stacked_axis(stacked, [axis] * len(leaves), axis_label)


def _leaves_with_names(layer: Module) -> list[tuple[str, Any]]:
    if is_node(layer):
        return [(leaf.name, leaf.value) for leaf in leaves_of(layer)]
    return [(f"leaf {i}", leaf) for i, leaf in enumerate(tree_leaves(layer))]


def unstack_layers(stacked: Module, *, axis: int = 0) -> list[Any]:
    """Splits a stacked module into a list of layers: the inverse of `stack_layers`.

    Args:
        stacked: a module whose leaves all have an axis of layers, such as
            ``Scan(...)(...).scan_module``.
        axis: the position of that axis.

    Returns:
        The layers, each a module of the same class; numpy arrays are views of the stacked ones.

    Raises:
        InvalidArgumentError: (a ValueError) the leaves have no such axis, or
            differ in its length.

    Example:
        >>> import pax_export as pax
        >>> from pax_export import transforms as T
        >>> net = T.Vmap(pax.Linear, axis_size=5)(3, 4)
        >>> [layer.weight.shape for layer in T.unstack_layers(net.vmap_module)][:2]
        [(3, 4), (3, 4)]
    """
    axis = checked_integer(axis, "unstack_layers.axis", write="axis=0")
    leaves = tree_leaves(stacked)
    sizes: dict[Any, str] = {}
    for name, leaf in _leaves_with_names(stacked):
        shape = jnp.shape(leaf)
        fits = -len(shape) <= axis < len(shape)
        sizes.setdefault(shape[axis] if fits else None, name)
    if len(sizes) != 1 or None in sizes:
        raise InvalidArgumentError(
            "A module can be split into layers only if every leaf has an axis of layers.",
            where=" and ".join(list(sizes.values())[:2]) or None,
            got=f"lengths {', '.join(str(size) for size in sizes) or 'of no leaf'} on axis {axis}",
            write="a module whose leaves are all stacked, without shared state",
        )
    treedef = tree_structure(without_stacked_axis(stacked, [axis] * len(leaves)))
    columns = [_unstack_leaf(leaf, axis) for leaf in leaves]
    return [treedef.unflatten(row) for row in zip(*columns)]


def _unstack_leaf(leaf: Array, axis: int) -> Sequence[Any]:
    """Splits a leaf into layers; numpy arrays into views."""
    if isinstance(leaf, np.ndarray):
        moved = np.moveaxis(leaf, axis, 0)
        return [moved[index, ...] for index in range(len(moved))]
    # All layers at once: one by one, each would be a program to compile.
    return jnp.unstack(leaf, axis=axis)
