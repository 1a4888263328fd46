"""Which of the parameters an export lets be trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from pax_export._errors import InvalidArgumentError
from pax_export.export.tracing.exportable import Exportable, is_filter, selected


def marked(model: Exportable, trainable: Any) -> Exportable:
    """The model with those leaves trainable that are parameters and are chosen.

    Args:
        model: what is exported.
        trainable: True for all parameters; a name, or names, of leaves or of
            what they lie in; a filter of `pax_export.transforms`; a function of
            the name of a leaf and its value; or, for dicts, lists and tuples of
            parameters, a prefix of them with True and False.
    """
    if isinstance(trainable, bool):
        return model
    if is_filter(trainable):
        chosen = selected(model, trainable)
        if not any(leaf.trainable and picked for leaf, picked in zip(model.leaves, chosen)):
            raise InvalidArgumentError(
                "No parameter of the model that can be trained is selected by this filter.",
                where="trainable",
                got=repr(trainable),
                write=_known(model),
            )
    elif callable(trainable):
        chosen = [bool(trainable(leaf.name, leaf.value)) for leaf in model.leaves]
    elif isinstance(trainable, str):
        chosen = _by_names(model, (trainable,))
    elif _is_prefix(trainable):
        chosen = _by_prefix(model, trainable)
    else:
        chosen = _by_names(model, tuple(trainable))
    leaves = tuple(
        dataclasses.replace(leaf, trainable=leaf.trainable and picked)
        for leaf, picked in zip(model.leaves, chosen)
    )
    return dataclasses.replace(model, leaves=leaves)


def _is_prefix(trainable: Any) -> bool:
    """Whether this holds True and False, and no names."""
    leaves = jax.tree_util.tree_leaves(trainable)
    return isinstance(trainable, Mapping) or any(isinstance(leaf, bool) for leaf in leaves)


def _by_names(model: Exportable, names: Iterable[Any]) -> list[bool]:
    chosen = [False] * len(model.leaves)
    for name in names:
        found = [
            index
            for index, leaf in enumerate(model.leaves)
            if leaf.trainable and f"{leaf.name}.".startswith(f"{name}.")
        ]
        if not found:
            raise InvalidArgumentError(
                "No parameter of the model that can be trained has this name, or lies in it.",
                where="trainable",
                got=repr(name),
                write=_known(model),
            )
        for index in found:
            chosen[index] = True
    return chosen


def _known(model: Exportable) -> str:
    known = ", ".join(leaf.name for leaf in model.leaves if leaf.trainable)
    return f"some of {known}" if known else "a model with parameters"


def _by_prefix(model: Exportable, prefix: Any) -> list[bool]:
    tree = jax.tree_util.tree_unflatten(model.tree, list(range(len(model.leaves))))
    chosen: dict[int, bool] = {}
    try:
        jax.tree_util.tree_map(
            lambda flag, part: chosen.update(
                dict.fromkeys(jax.tree_util.tree_leaves(part), bool(flag))
            ),
            prefix,
            tree,
        )
    except ValueError as error:
        raise InvalidArgumentError(
            "The prefix has another structure than the parameters.",
            where="trainable",
            got=str(error).splitlines()[0],
            write='a prefix of the parameters with True and False, or names: ("head",)',
        ) from error
    return [chosen.get(index, False) for index in range(len(model.leaves))]
