"""Adding, activating, removing and merging the adapters of a net."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten_with_path

from pax_export._foundations.check import as_strings, checked_float
from pax_export._foundations.errors import InvalidArgumentError, PaxError, a_few
from pax_export._foundations.types import PRNGKey
from pax_export.adapters import _layer as layers
from pax_export.adapters._lora import LoRA
from pax_export.core import (
    Module,
    Selection,
    Selector,
    adaptable_arrays,
    apply_bottom_up,
    fold_bottom_up,
    frozen_of,
    is_node,
    join_path,
    map_submodules,
    named_leaves,
    named_modules,
    path_name,
    require_module,
    split_rng_key,
    with_static,
)

M = TypeVar("M", bound=Module)
Changes = dict[int, Callable[[Any], Any]]


def add(
    net: M,
    targets: Target | Iterable[Target],
    rank: int,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    key: PRNGKey | None = None,
    name: str = "default",
    rslora: bool = False,
    dora: bool = False,
    train: Target | Iterable[Target] = (),
) -> M:
    """Adds adapters to layers of a net, and freezes everything else.

    Modules selected by `train` stay trainable.  When the last adapter is merged or removed, the
    freezing is undone.  Adapters with different names are summed.

    Args:
        net: the net, which is not changed.
        targets: the layers, or modules that contain them, as for `Module.at`: a class, a path
            (``"layers.*.query_projection"``; a leading ``*`` matches at any depth), a predicate, a
            selection, or several of these.
        rank: see `lora`.
        alpha: see `lora`.
        dropout: see `lora`.
        key: see `lora`; it is split for the layers.
        name: see `lora`.
        rslora: see `lora`.
        dora: see `lora`.
        train: modules that stay trainable, such as a new head.  Their arrays are saved with the
            adapters.

    Returns:
        The net with adapters; the paths of its own arrays do not change.

    Raises:
        InvalidArgumentError: a target matches no layer that supports adapters, a layer is smaller
            than the rank, or the name exists.
        InvalidArgumentTypeError: the net is not a module, or a target has the wrong type.

    Example:
        >>> import pax_export as pax
        >>> net = pax.Sequential(pax.Linear(8, 8), pax.Linear(8, 3))
        >>> net = pax.adapters.add(net, "modules.0", rank=2, train="modules.1")
        >>> print(net.summary())
        Sequential
        ├── modules.0: Linear(in_dim=8, out_dim=8, with_bias=True)
        │   └── adapters.default: LoRA(rank=2, alpha=2.0)
        └── modules.1: Linear(in_dim=8, out_dim=3, with_bias=True)
    """
    require_module(net, "adapters.add")
    whole = {
        id(m) for _, each in chosen_modules(net, train, "add.train") for _, m in named_modules(each)
    }
    found = _find_adaptable(net, targets, whole)
    keys = split_rng_key(key, len(found), "add: key")

    def adapted(layer: Module, path: str, own_key: PRNGKey) -> Any:
        with error_path(path):
            return layers.lora(
                layer, rank, alpha=alpha, dropout=dropout, key=own_key, name=name,
                rslora=rslora, dora=dora,
            )  # fmt: skip

    changes: Changes = freezing_changes(net)
    changes |= dict.fromkeys(whole, layers.unfreeze_own)
    for (path, layer), own_key in zip(found, keys):
        changes[id(layer)] = partial(adapted, path=path, own_key=own_key)
    return apply_changes(net, changes)


def freezing_changes(net: Module) -> Changes:
    """Returns edits that freeze a net for its first adapters; empty if it has adapters."""
    modules = [module for _, module in named_modules(net)]
    if any(map(layers.adapters_of, modules)):
        return {}
    return {id(module): layers.freeze_for_adapters for module in modules}


def _find_adaptable(
    net: Module, targets: Target | Iterable[Target], whole: set[int]
) -> list[tuple[str, Any]]:
    """Returns the layers selected by the targets, except trainable ones."""
    has_adapters = bool(adapted_layers(net))
    found: dict[str, Any] = {}
    trained = []
    for path, module in chosen_modules(net, targets, "add.targets"):
        for below, layer in named_modules(module):
            if adaptable_arrays(layer):
                own = join_path(path, below)
                if id(layer) in whole or (has_adapters and not frozen_of(layer).whole):
                    trained.append(own)
                else:
                    found[own] = layer
    if not found:
        raise InvalidArgumentError(
            "The targets select no layer that declares a kernel or table and is not in train=.",
            where="add.targets",
            got=a_few(trained, 5) if trained else repr(targets)[:200],
            write="the class or path of a layer",
        )
    return list(found.items())


@contextmanager
def error_path(path: str) -> Iterator[None]:
    """Context manager that adds the path of a layer to errors of its adapter."""
    try:
        yield
    except PaxError as error:
        error.where = f"{path}: {error.where}" if error.where and path else error.where or path
        raise


def adapted_layers(net: Module) -> list[tuple[str, Any]]:
    """Returns the adapted layers with their paths."""
    return [(path, module) for path, module in named_modules(net) if layers.adapters_of(module)]


def apply_changes(net: Module, changes: Changes) -> Any:
    """Applies functions to modules given by id, innermost first."""

    def build(module: Module, parts: Iterator[Any]) -> Any:
        new = map_submodules(module, lambda sub: next(parts))
        return changes[id(module)](new) if id(module) in changes else new

    return fold_bottom_up(net, build)


def names(net: Module) -> list[str]:
    """Returns the names of the adapters of a net.

    Example:
        >>> import pax_export as pax
        >>> net = pax.adapters.lora(pax.Linear(8, 4), 2, name="french")
        >>> pax.adapters.names(pax.adapters.lora(net, 2, name="german"))
        ['french', 'german']
    """
    require_module(net, "adapters.names")
    found = [name for _, layer in adapted_layers(net) for name in layers.adapters_of(layer)]
    return list(dict.fromkeys(found))


def require_adapters(net: Module, what: str, wanted: Iterable[str] = ()) -> list[tuple[str, Any]]:
    """Returns the adapted layers of a net; raises if there are none with these names."""
    require_module(net, what)
    found = adapted_layers(net)
    if not found:
        raise InvalidArgumentError(
            f"{what} needs a net with adapters; this net has none, or they were merged.",
            where=repr(net)[:200],
            write="net = pax.adapters.add(net, targets, rank)",
        )
    there = names(net)
    for name in wanted:
        if name not in there:
            raise InvalidArgumentError(
                "The net has no adapter with this name.",
                where=what,
                got=repr(name),
                write=" or ".join(map(repr, there)),
            )
    return found


def activate(net: M, which: str | Iterable[str] | Mapping[str, float]) -> M:
    """Sets which adapters are active, and their strengths.

    Inactive adapters cost nothing and are not trained.  Strengths are static, so a change of them
    retraces jitted functions.

    Args:
        net: the net with adapters.
        which: a name, several names, a dict from names to strengths, or ``()`` for none.

    Returns:
        The net with the same arrays.

    Raises:
        InvalidArgumentError: the net has no adapters, or none of such a name.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> net = pax.adapters.lora(pax.Linear(8, 4), 2, name="french")
        >>> net = pax.adapters.lora(net, 2, name="german")
        >>> net = pax.adapters.activate(net, {"french": 0.3, "german": 0.7})
        >>> net.adapters["german"]
        LoRA(rank=2, alpha=2.0, strength=0.7)
        >>> pax.adapters.activate(net, "french").adapters["german"].parameters().lora_a
        EmptyNode
    """
    if isinstance(which, Mapping):
        strengths = dict(which)
    else:
        strengths = dict.fromkeys(as_strings("which", which, 'which=["french"]'), 1.0)
    found = require_adapters(net, "adapters.activate", strengths)
    numbers = {name: checked_float(value, f"activate: {name}") for name, value in strengths.items()}
    return _change_adapters(
        net, found, lambda _, name, each: layers.with_strength(each, numbers.get(name, 0.0))
    )


def _change_adapters(
    net: Module, found: list[tuple[str, Any]], change: Callable[[str, str, LoRA], LoRA | None]
) -> Any:
    """Changes each adapter by its array's path and its name; drops those that become None."""

    def changed(layer: Module, path: str) -> Any:
        new: dict[str, layers.ByArray] = {}
        for name, adapter in layers.adapters_of(layer).items():
            for array, each in adapter.items():
                changed = change(join_path(path, array), name, each)
                if changed is not None:
                    new.setdefault(name, {})[array] = changed
        return layers.with_adapters(layer, new)

    return apply_changes(net, {id(layer): partial(changed, path=path) for path, layer in found})


def remove(net: M, name: str) -> M:
    """Removes the adapters of one name from a net.

    Args:
        net: the net with adapters.
        name: the name of the adapters.

    Returns:
        The net without them; the original net if these were the last.

    Raises:
        InvalidArgumentError: the net has no adapters, or none of this name.

    Example:
        >>> import pax_export as pax
        >>> layer = pax.Linear(8, 4)
        >>> pax.adapters.remove(pax.adapters.lora(layer, 2), "default") == layer
        True
    """
    found = require_adapters(net, "adapters.remove", [name])
    rest = _change_adapters(net, found, lambda _, other, each: None if other == name else each)
    return _unmarked_if_bare(rest)


def _unmarked_if_bare(net: Module) -> Any:
    return net if adapted_layers(net) else apply_bottom_up(net, layers.undo_freezing)


def merge(net: M) -> M:
    """Adds the active adapters to the weights of their layers, and removes all adapters.

    A weight becomes ``weight + alpha / rank * a · b``, computed in at least float32 and cast to
    the dtype of the weight.  Keep the given net to continue training; `unmerge` restores its
    adapters.

    Args:
        net: the net with adapters.

    Returns:
        A net with the structure and trainable parameters from before adapters were added.

    Raises:
        InvalidArgumentError: the net has no adapters, for example because it is already merged.

    Example:
        >>> import jax, pax_export as pax
        >>> layer = pax.Linear(8, 4)
        >>> merged = pax.adapters.merge(pax.adapters.lora(layer, 2))
        >>> jax.tree_util.tree_structure(merged) == jax.tree_util.tree_structure(layer)
        True
    """
    found = require_adapters(net, "adapters.merge")
    return _unmarked_if_bare(
        apply_changes(net, {id(layer): layers.merge_layer for _, layer in found})
    )


def unmerge(merged: M, origin: Module) -> M:
    """Restores the adapters and the weights from before `merge`, bit for bit.

    Args:
        merged: the result of `merge`, possibly changed in other modules.
        origin: the net that was merged.

    Returns:
        ``merged`` with the adapted layers of ``origin``, frozen as those of ``origin`` are.

    Raises:
        InvalidArgumentError: the origin has no adapters, or an adapted layer of ``merged`` was
            replaced or trained since.

    Example:
        >>> import pax_export as pax
        >>> net = pax.adapters.lora(pax.Linear(8, 4), 2)
        >>> pax.adapters.unmerge(pax.adapters.merge(net), net) == net
        True
    """
    found = require_adapters(origin, "adapters.unmerge")
    there = dict(named_modules(merged))
    is_marked = {p for p, m in named_modules(origin) if layers.is_marked(m)}
    changes: Changes = {
        id(there[path]): layers.freeze_for_adapters for path in is_marked & there.keys()
    }
    for path, layer in found:
        if path not in there or not _same_arrays(layers.merge_layer(layer), there[path]):
            raise InvalidArgumentError(
                "Only unchanged results of merge can be unmerged.",
                where=path or repr(layer)[:200],
                got="another layer, or one that was replaced" if path in there else "no layer",
                write="pax.adapters.unmerge(pax.adapters.merge(net), net)",
            )
        changes[id(there[path])] = lambda _, layer=layer: layer
    return apply_changes(merged, changes)


def _same_arrays(one: Module, other: Module) -> bool:
    ours, theirs = named_leaves(one), named_leaves(other)
    return [name for name, _ in ours] == [name for name, _ in theirs] and all(
        np.array_equal(a, b) for (_, a), (_, b) in zip(ours, theirs)
    )


Target = type[Module] | str | Callable[..., Any] | Selection


def chosen_modules(net: Module, targets: Selector, where: str) -> list[tuple[str, Any]]:
    """Returns the selected modules, also those in selected containers, with their paths.

    Raises:
        InvalidArgumentError: nothing matches, or only arrays and other values.
    """
    if isinstance(targets, (tuple, list)) and not targets:
        return []
    try:
        selection = Selection.of(net, targets)
    except InvalidArgumentError as error:
        error.where = f"{where}, in {error.where}"
        raise
    found: dict[str, Any] = {}
    for name, part in selection.items():
        for path, item in tree_flatten_with_path(part, is_leaf=is_node)[0]:
            if is_node(item):
                below = path_name(path)
                found[join_path(name, below)] = item
    if not found:
        raise InvalidArgumentError(
            "The selection contains no modules.",
            where=where,
            got=", ".join(selection.names())[:200],
            write="the paths or classes of modules, as net.at(...) takes them",
        )
    return list(found.items())


def pad_ranks(net: M) -> M:
    """Pads the adapters of repeated layers with zeros to the same rank.

    PEFT's ``rank_pattern`` and ``alpha_pattern`` give layers adapters of different ranks and
    scales, but only equal layers can be stacked.  The outputs do not change, and the padding stays
    zero, since it gets no gradient.

    Args:
        net: the net with adapters.

    Returns:
        The net, in which all adapters with one name at, for example, ``layers.*.query`` have the
        rank and alpha of the largest.

    Raises:
        InvalidArgumentError: the net has no adapters.

    Example:
        >>> import pax_export as pax
        >>> net = pax.Sequential(pax.Linear(4, 4), pax.Linear(4, 4))
        >>> net = pax.adapters.add(net, "modules.0", rank=1)
        >>> net = pax.adapters.add(net, "modules.1", rank=3)
        >>> [layer.adapters["default"].rank for layer in pax.adapters.pad_ranks(net).modules]
        [3, 3]
    """
    found = require_adapters(net, "adapters.pad_ranks")
    largest: dict[tuple[str, str], LoRA] = {}
    for path, layer in found:
        for name, adapter in layers.adapters_of(layer).items():
            for array, each in adapter.items():
                pattern = _pattern_of_path(join_path(path, array))
                old = largest.setdefault((pattern, name), each)
                if each.rank > old.rank:
                    largest[pattern, name] = each

    def padded(path: str, name: str, adapter: LoRA) -> LoRA:
        return _pad_adapter(adapter, largest[_pattern_of_path(path), name])

    return _change_adapters(net, found, padded)


def _pattern_of_path(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _pad_adapter(adapter: LoRA, like: LoRA) -> LoRA:
    """Pads an adapter to the rank and scale of another one, with the same output."""
    missing = like.rank - adapter.rank
    if not missing and adapter.scale == like.scale:
        return adapter
    a, b = adapter.lora_a, adapter.lora_b * (adapter.scale / like.scale)
    unpadded = [(0, 0)] * (b.ndim - 2)
    adapter = adapter.replace(
        lora_a=jnp.pad(a, [*[(0, 0)] * (a.ndim - 1), (0, missing)]),
        lora_b=jnp.pad(b.astype(adapter.lora_b.dtype), [*unpadded, (0, missing), (0, 0)]),
    )
    return with_static(adapter, rank=like.rank, alpha=like.alpha)
