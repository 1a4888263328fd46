"""Flattener: caches the flattened form of pytrees between calls."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, NamedTuple, Self

from jax.tree_util import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.types import PyTree
from pax_export.core import (
    Module,
    count_array_elements,
    is_array,
    restore,
    set_training,
    to_picklable,
    tree_lines,
    with_static,
)


class _Structure(NamedTuple):
    """The structure of a value, to rebuild it from its arrays."""

    name: str
    treedef: Any
    others: tuple[tuple[int, Any], ...]  # the static leaves, each with its number among all

    @property
    def static(self) -> tuple[int, ...]:
        """The numbers of the leaves that are static."""
        return tuple([number for number, _ in self.others])


class Flattener(Module):
    """Stores pytrees as flat lists of arrays, for calls that only pass them on.

    jax flattens every argument of a jitted function at each call. Models and optimizers with many
    submodules are faster to flatten as a Flattener, which always has three levels. Reading
    ``flattener.key`` rebuilds the value, so read it inside of the jitted function.

    Leaves that are not arrays (numbers, functions) are static data of the Flattener, as in every
    module.

    Args:
        **kwargs: the values: any pytrees, usually modules.  A name must not be
            that of an attribute of Flattener itself, nor begin with ``_``.

    Attributes:
        leaves_dict: name -> list of the arrays of the value.

    Raises:
        InvalidArgumentError: (a ValueError) a name that cannot be used.
        SharedNodeError: (a ValueError) one array is in two values.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> @jax.jit
        ... def step(flat, x):
        ...     net, y = flat.net % x
        ...     return flat.update(net=net), y
        >>> flat = pax.experimental.Flattener(net=pax.BatchNorm1D(3))
        >>> flat, y = step(flat, jnp.ones((2, 5, 3)))
        >>> float(flat.net.ema_mean.averages.sum())
        3.0
    """

    def __init__(self, **kwargs: PyTree):
        super().__init__()
        _check_names(type(self), kwargs)
        self.leaves_dict, self._structures = _merge_values({}, (), kwargs)

    def update(self, **kwargs: PyTree) -> Self:
        """Returns a new Flattener with values replaced or added.

        Args:
            **kwargs: the values.

        Raises:
            InvalidArgumentError: (a ValueError) a name that cannot be used.
        """
        _check_names(type(self), kwargs)
        leaves, structures = _merge_values(self.leaves_dict, self._structures, kwargs)
        return self.replace(leaves_dict=leaves, _structures=structures)

    def summary(self, return_list: bool = False) -> str | list[str]:
        """Returns the summaries of its modules as text, by name."""
        values = [(name, getattr(self, name)) for name in self.treedef_dict]
        modules = [(name, value) for name, value in values if isinstance(value, Module)]
        lines = tree_lines(type(self).__qualname__, modules)
        return lines if return_list else "\n".join(lines)

    def parameters(self) -> Any:
        """Raises an error: rebuild a value, and ask that for its parameters.

        Raises:
            InvalidArgumentError: (a ValueError) always.
        """
        raise InvalidArgumentError(
            "A Flattener does not record which of its arrays are trainable.",
            write=f"flattener.{next(iter(self.treedef_dict), 'model')}.parameters()",
        )

    @property
    def treedef_dict(self) -> dict[str, Any]:
        """Name -> treedef of the value."""
        # Not self._structures: __getattr__ is called for attributes that a constructor has not set
        # yet.
        structures = vars(self).get("_structures", ())
        return {structure.name: structure.treedef for structure in structures}

    def __getattr__(self, name: str) -> Any:
        """Rebuilds a value."""
        for structure in vars(self).get("_structures", ()):
            if structure.name == name:
                return _rebuild_value(structure, self.leaves_dict[name])
        text = f"{type(self).__name__!r} object has no value {name!r}"
        raise AttributeError(text, name=name, obj=self)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.treedef_dict]

    def _pax_contents(self) -> dict[str, Any]:
        arrays = tree_leaves(vars(self).get("leaves_dict"))
        count = sum(map(count_array_elements, arrays))
        return {"values": f"[{', '.join(self.treedef_dict)}]", "elements": count}

    def _with_training(self, training: bool) -> Self:
        structures = [_in_mode(structure, training) for structure in self._structures]
        return with_static(self, _training=training, _structures=tuple(structures))

    def __reduce__(self) -> Any:
        # A treedef that names classes cannot be pickled; the values can.
        _, (cls, names, attributes) = super().__reduce__()
        attributes |= {"leaves_dict": None, "_structures": None}
        values = {
            structure.name: (to_picklable(getattr(self, structure.name)), structure.static)
            for structure in self._structures
        }
        return _restore, (cls, names, attributes, values)


def _restore(cls: type, names: tuple, attributes: dict[str, Any], values: dict) -> Any:
    """Makes a Flattener from pickled values: ``{name: (value, its static leaves)}``."""
    parts = {name: _split_value(name, *value) for name, value in values.items()}
    attributes["leaves_dict"] = {name: leaves for name, (leaves, _) in parts.items()}
    attributes["_structures"] = tuple([structure for _, structure in parts.values()])
    return restore(cls, names, attributes)


_Structures = tuple[_Structure, ...]


def _merge_values(
    leaves: dict[str, list[Any]], structures: _Structures, values: dict[str, Any]
) -> tuple[dict[str, list[Any]], _Structures]:
    """Returns the contents of a Flattener after values were replaced or added."""
    leaves, by_name = dict(leaves), {structure.name: structure for structure in structures}
    for name, value in values.items():
        leaves[name], by_name[name] = _split_value(name, value)
    return leaves, tuple([by_name[name] for name in sorted(by_name)])


def _check_names(cls: type, names: Iterable[str]) -> None:
    """Raises for names that lead to something else than a value."""
    reserved = {name for base in cls.__mro__ for name in vars(base)} | {"leaves_dict"}
    for name in names:
        if name in reserved or name.startswith("_"):
            raise InvalidArgumentError(
                "This name cannot be used for a value of a Flattener: it is an attribute "
                "of every Flattener, or begins with an underscore.",
                where=f"{cls.__qualname__}.{name}",
                write=f"another name, e.g. {name.strip('_') or 'model'}_value",
            )


def _split_value(
    name: str, value: PyTree, static: Container[int] | None = None
) -> tuple[list[Any], _Structure]:
    """Splits a value into array leaves and structure; `static` numbers its other leaves."""
    leaves, treedef = tree_flatten(value)
    if static is None:
        static = [number for number, leaf in enumerate(leaves) if not is_array(leaf)]
    data = [leaf for number, leaf in enumerate(leaves) if number not in static]
    others = [(number, leaf) for number, leaf in enumerate(leaves) if number in static]
    return data, _Structure(name, treedef, tuple(others))


def _rebuild_value(structure: _Structure, data: list[Any]) -> Any:
    leaves = list(data)
    for number, leaf in structure.others:
        leaves.insert(number, leaf)
    return tree_unflatten(structure.treedef, leaves)


def _in_mode(structure: _Structure, training: bool) -> _Structure:
    """Returns the structure of a value with all modules in train or eval mode."""
    value = tree_unflatten(structure.treedef, range(structure.treedef.num_leaves))
    return structure._replace(treedef=tree_structure(set_training(value, training)))
