"""Adapters over a whole net: added, switched, taken out, merged into its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from pax_export._errors import InvalidArgumentError, PaxError, a_few
from pax_export.adapters import _kinds as kinds
from pax_export.adapters import _layer as layers
from pax_export.adapters._targets import Target, chosen
from pax_export.core import (
    apply_bottom_up,
    aspect_of,
    join,
    map_submodules,
    named_leaves,
    named_modules,
    near_names,
    require_module,
    split_rng_key,
    upwards,
)
from pax_export.nn import integer

M = TypeVar("M")
Changes = dict[int, Callable[[Any], Any]]


def add(
    net: M,
    targets: Target | Iterable[Target],
    rank: int,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    key: Any = None,
    name: str = "default",
    rslora: bool = False,
    dora: bool = False,
    train: Target | Iterable[Target] = (),
) -> M:
    """Puts adapters at layers of a net; only these train from then on.

    All else is frozen, apart from what `train` chooses.  Once the last adapter is merged or
    removed, what was frozen for them is as it was.  Adapters of several names add up.

    Args:
        net: the net; it stays as it is.
        targets: the layers, or modules around them, as `Module.at` takes them: a class, a path
            (``"layers.*.query_projection"``; one that begins with ``*`` may begin anywhere), a
            function of a module, a selection, or several of these.
        rank: as in `lora`, and so the following.
        alpha: the same.
        dropout: the same.
        key: the same; each layer gets one of its own.
        name: the same.
        rslora: the same.
        dora: the same.
        train: what is trained as a whole beside them, a new head for example.  Its arrays are
            saved with the adapters.

    Returns:
        The net with adapters; paths of its own arrays are what they were.

    Raises:
        InvalidArgumentError: a target matches nothing, or nothing that can be adapted; a layer is
            smaller than the rank; the name is taken.
        InvalidArgumentTypeError: no module, or no target.

    Example:
        >>> import pax_export as pax
        >>> net = pax.Sequential(pax.Linear(8, 8), pax.Linear(8, 3))
        >>> net = pax.adapters.add(net, "modules.0", rank=2, train="modules.1")
        >>> print(net.summary())
        Sequential
        ├── Linear(in_dim=8, out_dim=8, with_bias=True)
        │   └── LoRA(rank=2, alpha=2.0)
        └── Linear(in_dim=8, out_dim=3, with_bias=True)
    """
    require_module(net, "adapters.add")
    whole = {id(m) for _, each in chosen(net, train, "add.train") for _, m in named_modules(each)}
    found = _adaptable(net, targets, rank, whole)
    keys = split_rng_key(key, len(found), "add: key")

    def adapted(layer: Any, path: str, own_key: Any) -> Any:
        with told_where(path):
            return layers.lora(
                layer, rank, alpha=alpha, dropout=dropout, key=own_key, name=name,
                rslora=rslora, dora=dora,
            )  # fmt: skip

    changes: Changes = marks(net)
    changes |= dict.fromkeys(whole, layers.unfrozen)
    for (path, layer), own_key in zip(found, keys):
        changes[id(layer)] = partial(adapted, path=path, own_key=own_key)
    return changed(net, changes)


def marks(net: Any) -> Changes:
    """What freezes a net for its first adapters; nothing if it has some."""
    modules = [module for _, module in named_modules(net)]
    if any(map(layers.adapters_of, modules)):
        return {}
    return {id(module): layers.marked for module in modules}


def _adaptable(net: Any, targets: Any, rank: int, whole: set[int]) -> list[tuple[str, Any]]:
    """The layers in what the targets choose, apart from those that are trained as a whole."""
    has_adapters = bool(adapted_layers(net))
    found: dict[str, Any] = {}
    trained = []
    for path, module in chosen(net, targets, "add.targets"):
        for below, layer in named_modules(module):
            if kinds.is_adaptable(layer):
                own = join(path, below) if below else path
                frozen = aspect_of(type(layer), "frozen") is not None
                if id(layer) in whole or (has_adapters and not frozen):
                    trained.append(own)
                else:
                    found[own] = layer
    if not found:
        why = "all of it is trained as a whole" if trained else "no Linear, Embed or convolution"
        raise InvalidArgumentError(
            f"There is nothing to adapt in what the targets choose: {why}.",
            where="add.targets",
            got=a_few(trained, 5) if trained else repr(targets)[:200],
            write="targets beside those of train=" if trained else "the class or path of a layer",
        )
    largest = {path: kinds.sizes_of(layer, path).largest_rank for path, layer in found.items()}
    small = [path for path, most in largest.items() if most < integer(rank, "add.rank", least=1)]
    if small:
        raise InvalidArgumentError(
            "The rank of an adapter is larger than the sizes of its layer.",
            where=a_few(small, 5),
            got=f"rank {rank} for {min(largest[path] for path in small)}",
            write="a smaller rank, or targets without these layers",
        )
    return list(found.items())


@contextmanager
def told_where(path: str) -> Iterator[None]:
    """Adds the path of a layer to errors of its adapter."""
    try:
        yield
    except PaxError as error:
        error.where = f"{path}: {error.where}" if error.where and path else error.where or path
        raise


def adapted_layers(net: Any) -> list[tuple[str, Any]]:
    """The layers with adapters, with their paths."""
    return [(path, module) for path, module in named_modules(net) if layers.adapters_of(module)]


def changed(net: Any, changes: Changes) -> Any:
    """The net with some modules, known by their ids, changed by functions; inner ones first."""

    def build(module: Any, parts: Iterator[Any]) -> Any:
        new = map_submodules(module, lambda sub: next(parts))
        return changes[id(module)](new) if id(module) in changes else new

    return upwards(net, build)


def names(net: Any) -> list[str]:
    """The names of the adapters that a net has.

    Example:
        >>> import pax_export as pax
        >>> net = pax.adapters.lora(pax.Linear(8, 4), 2, name="french")
        >>> pax.adapters.names(pax.adapters.lora(net, 2, name="german"))
        ['french', 'german']
    """
    found = [name for _, layer in adapted_layers(net) for name in layers.adapters_of(layer)]
    return list(dict.fromkeys(found))


def required(net: Any, what: str, wanted: Iterable[str] = ()) -> list[tuple[str, Any]]:
    """The adapted layers of a net; raises unless there are some, with adapters of these names."""
    require_module(net, what)
    found = adapted_layers(net)
    if not found:
        raise InvalidArgumentError(
            f"{what} needs a net with adapters, and this one has none: they were not added, or "
            "merged already.",
            where=repr(net)[:200],
            write="net = pax.adapters.add(net, targets, rank)",
        )
    there = names(net)
    for name in wanted:
        if name not in there:
            near = near_names(str(name), there)
            raise InvalidArgumentError(
                "The net has no adapter of this name.",
                where=what,
                got=repr(name),
                write=" or ".join(map(repr, near or there)),
            )
    return found


def activate(net: M, which: str | Iterable[str] | Mapping[str, float]) -> M:
    """Chooses which adapters add to the outputs of their layers, and by how much.

    Those that are not active cost nothing, and are not trained.  What is active is static: a
    jitted function is traced again where it changes.

    Args:
        net: the net with adapters.
        which: the name of one, several, a dict from names to strengths, or ``()`` for none.

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
    if isinstance(which, str):
        which = [which]
    strengths = dict(which) if isinstance(which, Mapping) else dict.fromkeys(which, 1.0)
    found = required(net, "adapters.activate", strengths)
    numbers = {name: _strength(value, name) for name, value in strengths.items()}

    def switched(layer: Any) -> Any:
        now = layers.adapters_of(layer)
        new = {n: layers.with_strength(each, numbers.get(n, 0.0)) for n, each in now.items()}
        return layers.with_adapters(layer, new)

    return changed(net, {id(layer): switched for _, layer in found})


def _strength(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidArgumentError(
            "The strength of an adapter is a number that is known before the net is called.",
            where=f"activate: {name}",
            got=repr(value)[:120],
            write="a Python float",
        )
    return number


def remove(net: M, name: str) -> M:
    """Takes the adapters of one name out of a net.

    Args:
        net: the net with adapters.
        name: theirs.

    Returns:
        The net without them; without any left it is what it was before the first were added.

    Raises:
        InvalidArgumentError: the net has no adapters, or none of this name.

    Example:
        >>> import pax_export as pax
        >>> layer = pax.Linear(8, 4)
        >>> pax.adapters.remove(pax.adapters.lora(layer, 2), "default") == layer
        True
    """
    found = required(net, "adapters.remove", [name])

    def without(layer: Any) -> Any:
        kept = {n: each for n, each in layers.adapters_of(layer).items() if n != name}
        return layers.with_adapters(layer, kept)

    return _unmarked_if_bare(changed(net, {id(layer): without for _, layer in found}))


def _unmarked_if_bare(net: Any) -> Any:
    return net if adapted_layers(net) else apply_bottom_up(net, layers.unmarked)


def merge(net: M) -> M:
    """Adds what the active adapters add to the weights of their layers, and takes all out.

    A weight becomes ``weight + alpha / rank * a · b``, computed in float32 at least, in the dtype
    that it has.  The net that was given stays as it is: it is what to train on with, and
    `unmerge` puts its adapters back.

    Args:
        net: the net with adapters.

    Returns:
        A net of the structure that it had before adapters were added, trainable as then.

    Raises:
        InvalidArgumentError: the net has no adapters: merged twice, for example.

    Example:
        >>> import jax, pax_export as pax
        >>> layer = pax.Linear(8, 4)
        >>> merged = pax.adapters.merge(pax.adapters.lora(layer, 2))
        >>> jax.tree_util.tree_structure(merged) == jax.tree_util.tree_structure(layer)
        True
    """
    found = required(net, "adapters.merge")
    return _unmarked_if_bare(changed(net, {id(layer): layers.merged for _, layer in found}))


def unmerge(merged: M, origin: Any) -> M:
    """Puts the adapters back that were merged, and the weights, bit for bit, that were before.

    Args:
        merged: what `merge` gave, changed elsewhere perhaps.
        origin: the net that was merged.

    Returns:
        ``merged`` with the adapted layers of ``origin``, frozen as those of ``origin`` are.

    Raises:
        InvalidArgumentError: the origin has no adapters, or ``merged`` is not what it gives: a
            layer is another one, or was trained since.

    Example:
        >>> import pax_export as pax
        >>> net = pax.adapters.lora(pax.Linear(8, 4), 2)
        >>> pax.adapters.unmerge(pax.adapters.merge(net), net) == net
        True
    """
    found = required(origin, "adapters.unmerge")
    there = dict(named_modules(merged))
    is_marked = {p for p, m in named_modules(origin) if layers.is_marked(m)}
    changes: Changes = {id(there[path]): layers.marked for path in is_marked & there.keys()}
    for path, layer in found:
        if path not in there or not _same_arrays(layers.merged(layer), there[path]):
            raise InvalidArgumentError(
                "What was merged can only be taken out of the layers that merge gave.",
                where=path or repr(layer)[:200],
                got="another layer, or one that was changed since" if path in there else "no layer",
                write="pax.adapters.unmerge(pax.adapters.merge(net), net)",
            )
        changes[id(there[path])] = lambda _, layer=layer: layer
    return changed(merged, changes)


def _same_arrays(one: Any, other: Any) -> bool:
    ours, theirs = named_leaves(one), named_leaves(other)
    return [name for name, _ in ours] == [name for name, _ in theirs] and all(
        np.array_equal(a, b) for (_, a), (_, b) in zip(ours, theirs)
    )
