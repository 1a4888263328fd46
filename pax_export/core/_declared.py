"""What a class says of the arrays of its instances, once, for every part of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pax_export._foundations.check import checked_choice, is_mapping
from pax_export._foundations.errors import InvalidArgumentError
from pax_export.core._tree import Node, attributes_of, is_node

Role = Literal[
    "kernel", "table", "bias", "scale", "mean", "variance", "average", "counter", "key"
]  # fmt: skip
Initializer = Callable[[Any, tuple[int, ...]], Any]
"""A function of a key and a shape that makes an array of that shape."""


@dataclass(frozen=True)
class Declared:
    """What one array of a layer is.

    A class of layers has a mapping ``arrays`` from the names of attributes to declarations (a
    dotted name is that of an array of an inner module). All that treats arrays by their meaning
    reads it: ``net.at(...).init(key)``, adapters, quantization, sharding presets, weights of other
    frameworks, the default precision policy, `inspect`.
    Attributes that are not in the mapping are treated by shape alone.

    Args:
        role: ``"kernel"``, an array that inputs are multiplied by; ``"table"``, whose rows are
            looked up; ``"bias"``, which is added; ``"scale"`` of a norm; ``"mean"`` and
            ``"variance"``, its running statistics; ``"average"`` of anything else; ``"counter"``;
            ``"key"``, a random key.
        axes: a name for each axis of one layer (not of a stack). ``"in"`` and ``"out"`` are the
            channels of input and output; a block of layers gives them other names, see
            ``axes_of_layers``. A function of the layer if the order depends on its options.
        outputs: the axes that are axes of the output, too; a kernel is summed over all others.
        init: initial values, as a function of the layer that returns an initializer: a function of
            a key and a shape.
        apply: ``apply(layer, array, *inputs)``, the output of the layer for another such array,
            without the bias. With it, an adapter computes ``x · a · b`` beside the layer; without
            it, the whole layer is called with the changed array.
        any_outputs: whether ``apply`` takes an array with more or fewer outputs, as a function of
            the layer; yes by default.
        output_axis: the axis of the output with the channels, as a function of the layer; the last
            one by default.
        transposed: whether the kernel is that of a transposed convolution, which other frameworks
            keep flipped, and in another order of axes than that of a convolution. Its last axes are
            ``"out"`` and ``"in"``.
        optional: whether a layer may lack the attribute; one that is None needs no such mark.

    Raises:
        InvalidArgumentError: (a ValueError) there is no such role, or the axes are not those of a
            transposed convolution; when a layer is made, it lacks a declared attribute.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> class Scaled(pax.ParameterModule):
        ...     arrays = {"weight": pax.Declared("kernel", ("in", "out"),
        ...                                      init=lambda layer: jax.nn.initializers.normal())}
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = jnp.ones((3, 4))
        ...     def __call__(self, x):
        ...         return 2 * x @ self.weight
        >>> Scaled().at("weight").init(jax.random.key(0)).weight.shape
        (3, 4)
    """

    role: Role
    axes: tuple[str, ...] | Callable[[Any], tuple[str, ...]]
    outputs: tuple[str, ...] = ("out",)
    init: Callable[[Any], Initializer] | None = None
    apply: Callable[..., Any] | None = None
    any_outputs: Callable[[Any], bool] | None = None
    output_axis: Callable[[Any], int] | None = None
    transposed: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        checked_choice(self.role, get_args(Role), "Declared.role")
        if self.transposed and self.axes[-2:] != ("out", "in"):  # type: ignore[index]
            raise InvalidArgumentError(
                "The kernel of a transposed convolution ends with the axes of output and input.",
                where="Declared.axes",
                got=repr(self.axes),
                write='("height", "width", "out", "in")',
            )


@dataclass(frozen=True)
class DeclaredArray:
    """A declared array of one layer."""

    name: str  # of the attribute
    layer: Any
    declared: Declared

    @property
    def array(self) -> Any:
        return getattr(self.layer, self.name)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes of one layer; a stack of layers has more before them."""
        axes = self.declared.axes
        return axes(self.layer) if callable(axes) else axes

    def axis(self, name: str) -> int:
        """The number of an axis, counted from the last: negative."""
        return self.axes.index(name) - len(self.axes)

    @property
    def channel_axis(self) -> int:
        """The axis of the layer's output with the channels, counted from the last."""
        found = self.declared.output_axis
        return -1 if found is None else found(self.layer)

    @property
    def takes_any_outputs(self) -> bool:
        """Whether its ``apply`` takes an array with more or fewer outputs."""
        found = self.declared.any_outputs
        return found is None or found(self.layer)

    @property
    def output_axes(self) -> tuple[int, ...]:
        """The axes that the output has, too, counted from the last."""
        return tuple([self.axis(n) for n in self.axes if n in self.declared.outputs])

    @property
    def input_axes(self) -> tuple[int, ...]:
        """The other axes: a product is summed over them, a lookup has rows along them."""
        return tuple([self.axis(n) for n in self.axes if n not in self.declared.outputs])


def declared_at(layer: Node | None) -> dict[str, DeclaredArray]:
    """All that the class of a module declares, by name, also of inner modules."""
    declared = getattr(type(layer), "arrays", None)
    if not is_node(layer) or not is_mapping(declared):
        return {}
    return {name: DeclaredArray(name, layer, each) for name, each in declared.items()}


def require_declared(layer: Node) -> None:
    """Raises for the declaration of an attribute that a new layer lacks; None stands for one."""
    for name, each in declared_at(layer).items():
        value: Any = layer
        for part in [] if each.declared.optional else name.split("."):
            if value is not None and part not in attributes_of(value):
                raise InvalidArgumentError(
                    "A class declares an array that its layer does not have.",
                    where=f"{type(layer).__qualname__}.arrays[{name!r}]",
                    got=f"no attribute {part!r} after the constructor",
                    write=f"the name of an attribute, or self.{name} = None where it is left out",
                )
            value = getattr(value, part, None)


def declared_in(layer: Node | None) -> dict[str, DeclaredArray]:
    """The declared arrays that a module itself has, by attribute."""
    declared = declared_at(layer).items()
    return {name: x for name, x in declared if vars(layer).get(name) is not None}


def kernel_of(layer: Node) -> DeclaredArray | None:
    """The array of a layer that inputs are multiplied by, or whose rows are looked up.

    Of several, as in a product of two matrices, the one with the outputs of the layer.
    """
    found = [x for x in declared_in(layer).values() if x.declared.role in ("kernel", "table")]
    if len(found) > 1:
        found = [x for x in found if "out" in x.declared.outputs and "out" in x.axes]
    return found[0] if len(found) == 1 else None


def adaptable_arrays(layer: Node) -> dict[str, DeclaredArray]:
    """The kernels and tables with one axis of outputs, by name; an only one has the name ``""``."""
    found = {
        name: x
        for name, x in declared_in(layer).items()
        if x.declared.role in ("kernel", "table") and len(x.output_axes) == 1 and x.input_axes
    }
    return dict(zip([""], found.values())) if len(found) == 1 else found
