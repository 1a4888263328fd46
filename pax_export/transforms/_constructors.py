"""Vmap, Scan and Remat: modules that call another one under a transform.

``Vmap(pax.Linear, axis_size=5)`` is a constructor; called, it builds the inner
modules at once and gives an instance of `Vmap` that holds them stacked.  An
instance keeps the options of the transform as plain static data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, MethodType
from typing import Any, ClassVar

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.core import Module, made_of
from pax_export.transforms._mapping import MapOptions, options_of
from pax_export.transforms._remat import call_recomputed
from pax_export.transforms._scan import call_scanned, check_out_axes
from pax_export.transforms._state_axes import as_state_axes
from pax_export.transforms._vmap import call_mapped, vmap

ALL_AT_0 = MappingProxyType({...: 0})


@dataclass(frozen=True)
class Constructor:
    """Builds instances of a lifted module class.

    Attributes:
        cls: `Vmap`, `Scan` or `Remat`.
        inner: the constructor of the inner module.
        options: the options of the transform, as pairs.
    """

    cls: type[Lifted]
    inner: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        options = dict(self.options)
        inner = self.cls._build(lambda: self.inner(*args, **kwargs), options)
        if not isinstance(inner, Module):
            raise InvalidArgumentTypeError(
                f"{self.cls.__name__} needs a constructor of modules.",
                got=f"{self.inner!r}, which made a {type(inner).__name__}"[:200],
                write=f"{self.cls.__name__}(pax.Linear, ...)(in_dim, out_dim)",
            )
        return made_of(self.cls, {self.cls._attribute: inner, "options": self.options})


class Lifted(Module):
    """What Vmap, Scan and Remat have in common."""

    _attribute: ClassVar[str]
    options: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the inner module under the transform.

        Args:
            *args: the arguments of the inner call.
            **kwargs: its keyword arguments.

        Returns:
            What the transform makes of its results.

        Raises:
            ImmutableModuleError: the inner call changes state, and the module is
                not open for change: use ``module % x``.
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
        def function(module: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(module, Lifted):  # through nested wrappers
                return module._run(method, args, kwargs)
            return getattr(module, method)(*args, **kwargs)

        return self._transformed(function, (self._inner, *args), kwargs, dict(self.options))

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        options = dict(self.options)
        sizes = {k: options[k] for k in ("axis_size", "length") if options.get(k) is not None}
        return super()._repr({**sizes, **(info or {})})

    def _transformed(self, function: Callable, args: tuple, kwargs: dict, options: dict) -> Any:
        raise NotImplementedError

    @classmethod
    def _build(cls, make: Callable[[], Any], options: dict[str, Any]) -> Any:
        raise NotImplementedError


class Methods:
    """Gives the methods of the inner module of a lifted one, under its transform."""

    def __init__(self, lifted: Lifted):
        self._lifted = lifted

    def __getattr__(self, name: str) -> Any:
        inner: Any = self._lifted
        while isinstance(inner, Lifted):
            inner = inner._inner
        if not callable(getattr(type(inner), name, None)):
            raise AttributeError(f"{type(inner).__name__!r} has no method {name!r}")

        def method(lifted: Lifted, *args: Any, **kwargs: Any) -> Any:
            return lifted._run(name, args, kwargs)

        method.__name__ = name
        return MethodType(method, self._lifted)


def _map_options(transform: str, options: dict[str, Any]) -> MapOptions:
    return options_of(
        transform,
        options["in_axes"],
        options["in_axes_kwargs"],
        options["out_axes"],
        options["state_axes"],
        options["split_rngs"],
        dict(options["transform_metadata"]),
    )


class Vmap(Lifted):
    """Modules of one kind, stacked, and called all at once.

    ``Vmap(constructor, **options)`` is a constructor: called with the arguments
    of the inner one it builds all modules in one trace.

    Args:
        ctor: a class of modules, or another constructor.
        in_axes: as in `vmap`, like all that follows; the stacked module is the
            first argument.
        out_axes: see there.
        axis_name: see there.
        axis_size: how many modules.
        spmd_axis_name: see there.
        in_axes_kwargs: see there.
        state_axes: which leaves each module has for itself, and at which axis.
        split_rngs: see there; without ``"params"`` all modules are built equal.
        transform_metadata: see there.

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

    _attribute = "vmap_module"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _constructor(cls, args, kwargs)

    def __init__(
        self,
        ctor: Callable[..., Any],
        *,
        in_axes: Any = 0,
        out_axes: Any = 0,
        axis_name: Any = None,
        axis_size: int | None = None,
        spmd_axis_name: Any = None,
        in_axes_kwargs: Any = 0,
        state_axes: Mapping[Any, int | None] = ALL_AT_0,
        split_rngs: Any = ...,
        transform_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        raise NotImplementedError  # never runs: it is the signature of the class

    @classmethod
    def _build(cls, make: Callable[[], Any], options: dict[str, Any]) -> Any:
        return vmap(
            make,
            axis_name=options["axis_name"],
            axis_size=options["axis_size"],
            state_axes=options["state_axes"],
            split_rngs=options["split_rngs"],
            transform_metadata=dict(options["transform_metadata"]),
        )()

    def _transformed(self, function: Callable, args: tuple, kwargs: dict, options: dict) -> Any:
        jax_options = {name: options[name] for name in ("axis_name", "spmd_axis_name")}
        mapping, size = _map_options("vmap", options), options["axis_size"]
        return call_mapped(function, args, kwargs, mapping, size, jax_options, strict=True)


class Scan(Lifted):
    """Layers of one kind, stacked, and called one after the other by a compiled loop.

    ``Scan(constructor, length=n)`` is a constructor, as `Vmap` is.  The inner
    call takes the carry and returns ``(carry, y)``.

    Args:
        ctor: a class of modules, or another constructor.
        length: how many layers.
        reverse: as in `scan`, like all that follows.
        unroll: see there.
        _split_transpose: see there.
        in_axes: see there; the stacked module is the first argument.
        in_axes_kwargs: see there.
        out_axes: see there.
        carry_argnum: which argument is the carry; the module is number 0.
        state_axes: which leaves each layer has for itself, and at which axis;
            the layers share all others, and those go from layer to layer.
        split_rngs: see there; without ``"params"`` all layers are built equal.
        transform_metadata: see there.
        scan_output: see there.

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

    _attribute = "scan_module"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        constructor = _constructor(cls, args, kwargs)
        check_out_axes(dict(constructor.options)["out_axes"])
        if dict(constructor.options)["length"] is None:
            raise InvalidArgumentError(
                "Scan needs a length: the number of layers to build.",
                write=f"Scan({getattr(constructor.inner, '__name__', 'Layer')}, length=...)",
            )
        return constructor

    def __init__(
        self,
        ctor: Callable[..., Any],
        *,
        length: int | None = None,
        reverse: bool = False,
        unroll: int | bool = 1,
        _split_transpose: bool = False,
        in_axes: Any = 0,
        in_axes_kwargs: Any = 0,
        out_axes: Any = 0,
        carry_argnum: int = 1,
        state_axes: Mapping[Any, int | None] = ALL_AT_0,
        split_rngs: Any = ...,
        transform_metadata: Mapping[str, Any] = MappingProxyType({}),
        scan_output: bool = True,
    ):
        raise NotImplementedError  # never runs: it is the signature of the class

    @classmethod
    def _build(cls, make: Callable[[], Any], options: dict[str, Any]) -> Any:
        return vmap(
            make,
            axis_size=options["length"],
            state_axes=options["state_axes"],
            split_rngs=options["split_rngs"],
            transform_metadata=dict(options["transform_metadata"]),
        )()

    def _transformed(self, function: Callable, args: tuple, kwargs: dict, options: dict) -> Any:
        loop = {name: options[name] for name in ("reverse", "unroll", "_split_transpose")}
        return call_scanned(
            function, args, kwargs, _map_options("scan", options),
            options["length"], options["carry_argnum"], options["scan_output"], loop, strict=True,
        )  # fmt: skip


class Remat(Lifted):
    """A module whose inner values are computed again for its gradient.

    ``Remat(constructor)`` is a constructor, as `Vmap` is.

    Args:
        ctor: a class of modules, or another constructor.
        prevent_cse: as in `remat`, like all that follows.
        static_argnums: see there; the module is argument 0.
        policy: see there.

    Attributes:
        remat_module: the inner module.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> layer = T.Remat(pax.Linear)(3, 4)
        >>> layer.remat_module.weight.shape, layer(jnp.ones((2, 3))).shape
        ((3, 4), (2, 4))
    """

    _attribute = "remat_module"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _constructor(cls, args, kwargs)

    def __init__(
        self,
        ctor: Callable[..., Any],
        prevent_cse: bool = True,
        static_argnums: int | Sequence[int] = (),
        policy: Callable[..., bool] | None = None,
    ):
        raise NotImplementedError  # never runs: it is the signature of the class

    @classmethod
    def _build(cls, make: Callable[[], Any], options: dict[str, Any]) -> Any:
        return make()

    def _transformed(self, function: Callable, args: tuple, kwargs: dict, options: dict) -> Any:
        jax_options = {name: options[name] for name in ("prevent_cse", "policy")}
        return call_recomputed(
            function, args, kwargs, options["static_argnums"], jax_options, strict=True
        )


def _constructor(cls: Any, args: tuple, kwargs: dict) -> Constructor:
    """What a lifted class gives when it is called: a constructor with checked options."""
    bound = cls.__signature__.bind(*args, **kwargs)
    bound.apply_defaults()
    options = dict(bound.arguments)
    inner = options.pop("ctor")
    if not callable(inner):
        raise InvalidArgumentTypeError(
            f"{cls.__name__} needs a constructor of modules.",
            got=f"{type(inner).__name__}: {inner!r}"[:200],
            write=f"{cls.__name__}(pax.Linear, ...)(in_dim, out_dim)",
        )
    if "state_axes" in options:
        options["state_axes"] = as_state_axes(options["state_axes"])
        options["transform_metadata"] = tuple(options["transform_metadata"].items())
        _map_options(cls.__name__, options)
    if "static_argnums" in options and isinstance(options["static_argnums"], int):
        options["static_argnums"] = (options["static_argnums"],)
    frozen = tuple([(k, tuple(v) if isinstance(v, list) else v) for k, v in options.items()])
    return Constructor(cls, inner, frozen)
