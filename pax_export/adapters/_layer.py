"""Adapted layers: instances of one derived class per layer class, with a dict ``adapters``.

The weight keeps its path, so weights files without adapters fit.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from pax_export._foundations.check import checked_fraction, checked_integer, checked_positive
from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.jax import is_tracer
from pax_export._foundations.types import Array, DTypeLike, PRNGKey
from pax_export.adapters._lora import (
    KernelSizes,
    LoRA,
    apply_of,
    column_norms,
    is_table,
    require_adaptable,
    sizes_of,
)
from pax_export.core import (
    DeclaredArray,
    Frozen,
    Module,
    adaptable_arrays,
    aspect_of,
    attributes_of,
    current_kinds,
    derive_class,
    filled_array,
    frozen_of,
    is_node,
    join_path,
    kernel_of,
    rebuild_tree,
    register_aspect,
    require_module,
    sample_padded,
    set_training,
    split_rng_key,
    update_moduledef,
    with_class,
    with_frozen,
    with_static,
)
from pax_export.nn import weight_in_use
from pax_export.precision import apply_mp_policy, policy_of
from pax_export.weights import chosen_sharding

M = TypeVar("M", bound=Module)

_ATTRIBUTE = "adapters"


def lora(
    module: M,
    rank: int,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    key: PRNGKey | None = None,
    name: str = "default",
    rslora: bool = False,
    dora: bool = False,
) -> M:
    """Adds an adapter to one layer, and freezes the layer's own arrays.

    A layer that declares several kernels gets one for each, ``layer.adapters[name]["up"]``.
    The layer keeps its class and its weight; only the adapter, in its dict ``adapters``, is in its
    `parameters()`.  The adapter initially adds exactly zero: ``a`` is random and ``b`` zero (for an
    `Embed` the other way round), as in PEFT.

    Args:
        module: a `Linear`, `Embed`, convolution or transposed convolution, or any layer that
            declares kernels or tables (`pax_export.Declared`); stacked layers, in `Scan` or
            `Vmap`, get an adapter for each layer.
        rank: the rank of the update.
        alpha: the adapter is scaled by ``alpha / rank``; equal to the rank by default.
        dropout: the dropout rate of the adapter's input in train mode; calls then need `pure`, as
            those of `Dropout`.  Ignored for an `Embed`.
        key: the random key of the initial values; drawn from the global stream by default.
        name: the name of the adapter; a layer may have several.
        rslora: divide alpha by the square root of the rank (Kalajdzievski, 2023).
        dora: train the norms of the weight's columns separately (Liu et al., 2024).

    Returns:
        The layer with the adapter, as an instance of a subclass with the same name.

    Raises:
        InvalidArgumentTypeError: the module does not support adapters.
        InvalidArgumentError: the rank is larger than the layer, the name exists, or an argument is
            out of range.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> layer = pax.Linear(8, 4)
        >>> adapted = pax.adapters.lora(layer, 2)
        >>> bool((adapted(jnp.ones((1, 8))) == layer(jnp.ones((1, 8)))).all())
        True
        >>> adapted.parameters().weight, adapted.parameters().adapters["default"].lora_b.shape
        (EmptyNode, (2, 4))
    """
    found = require_adaptable(module)
    keys = split_rng_key(key, 3 * len(found), "lora: key")
    by_array: dict[str, LoRA] = {}
    for n, (array, adapted) in enumerate(found.items()):
        where = join_path(repr(module)[:200], array)
        sizes = sizes_of(adapted, where)
        if checked_integer(rank, "lora.rank", least=1) > sizes.largest_rank:
            raise InvalidArgumentError(
                "The rank of an adapter is larger than the sizes of its layer.",
                where=where,
                got=f"rank {rank} for {sizes.largest_rank}",
                write=f"a rank of at most {sizes.largest_rank}, or targets without this layer",
            )
        a, b, dtype = _initial_values(adapted, sizes, int(rank), keys[3 * n], keys[3 * n + 1])
        by_array[array] = LoRA(
            a,
            b,
            alpha=checked_positive(rank if alpha is None else alpha, "lora.alpha"),
            dropout=checked_fraction(dropout, "lora.dropout", one_allowed=False),
            rslora=rslora,
            magnitude=column_norms(adapted, adapted.array.astype(dtype)) if dora else None,
            key=keys[3 * n + 2],
        )
    return put_adapter(module, name, by_array)


def _initial_values(
    adapted: DeclaredArray, sizes: KernelSizes, rank: int, a_key: PRNGKey, b_key: PRNGKey
) -> tuple[Array, Array, DTypeLike]:
    """Returns ``a``, ``b``, whose product is zero, and their dtype."""
    dtype = jnp.promote_types(adapted.array.dtype, jnp.float32)
    a_shape, b_shape = (*sizes.a, rank), (*sizes.stacked, rank, sizes.outputs)
    if is_table(adapted):
        draw = lambda key, shape: jax.random.normal(key, shape, dtype)  # noqa: E731
        return filled_array(a_shape, 0, dtype), sample_padded(draw, b_key, b_shape), dtype
    bound = 1 / np.sqrt(np.prod(sizes.inputs, dtype=int))
    draw = lambda key, shape: jax.random.uniform(key, shape, dtype, -bound, bound)  # noqa: E731
    return sample_padded(draw, a_key, a_shape), filled_array(b_shape, 0, dtype), dtype


#: An adapter of a layer: by array, or under ``""`` where the layer has one that can be adapted.
ByArray = dict[str, LoRA]


def put_adapter(layer: Module, name: str, adapter: ByArray) -> Any:
    """Adds an adapter to a layer, with the layer's mode and policy."""
    now = adapters_of(layer)
    if not isinstance(name, str) or not name or "." in name or name in now:
        raise InvalidArgumentError(
            "The name of an adapter is a new word without dots: a part of names of weights.",
            where=repr(layer)[:200],
            got=repr(name),
            write="another name, or pax.adapters.remove(net, name) before",
        )
    if not now and _ATTRIBUTE in attributes_of(layer):
        raise InvalidArgumentError(
            "The layer already has an attribute with the name of that for adapters.",
            where=f"{type(layer).__qualname__}.{_ATTRIBUTE}",
            write="another name for the attribute of that class",
        )
    return set_adapters(
        freeze_for_adapters(layer),
        {**now, name: {array: _as_in(layer, each) for array, each in adapter.items()}},
    )


def _as_in(layer: Module, adapter: LoRA) -> LoRA:
    """The adapter in the mode of a layer, and with its policy."""
    policy = policy_of(layer)
    if policy is not None:
        # Adapters stay in float32, for small updates and loss scales.
        wide = jnp.promote_types(policy.param_dtype, jnp.float32)
        policy = jmp.Policy(wide, policy.compute_dtype, policy.output_dtype)
        adapter = apply_mp_policy(adapter, policy)
    return set_training(adapter, layer.training)


def adapters_of(module: Module) -> dict[str, ByArray]:
    """Returns the adapters of a layer by name; empty for other objects."""
    if not is_node(module) or aspect_of(type(module), "adapted") is None:
        return {}
    adapters = getattr(module, _ATTRIBUTE)
    return {n: {"": each} if isinstance(each, LoRA) else each for n, each in adapters.items()}


def with_adapters(layer: Module, adapters: dict[str, ByArray]) -> Any:
    """Replaces the adapters of a layer; without any, restores the original class."""
    return set_adapters(layer, adapters) if adapters else undo_freezing(set_adapters(layer, {}))


def set_adapters(layer: Module, adapters: dict[str, ByArray]) -> Any:
    """Replaces the adapters of a layer, which stays frozen; without any, it has its own class."""
    new = rebuild_tree(layer)
    known = {name: kind for name, kind in current_kinds(new).items() if name != _ATTRIBUTE}
    attributes_of(new)[_ATTRIBUTE] = {n: each.get("", each) for n, each in adapters.items()}
    if not adapters:
        del attributes_of(new)[_ATTRIBUTE]
    update_moduledef(new, known)
    return with_class(new, derive_class(type(new), "adapted", True if adapters else None))


def freeze_for_adapters(module: Module) -> Any:
    """Freezes a module's own arrays because adapters train instead of them."""
    frozen = frozen_of(module)
    if frozen.whole:
        return module
    return with_frozen(module, replace(frozen, whole=True, before_adapters=frozen.paths))


def undo_freezing(module: Module) -> Any:
    """Undoes `freeze_for_adapters`; modules frozen by the user stay frozen."""
    frozen = frozen_of(module)
    if frozen.before_adapters is None:
        return module
    own = frozen.before_adapters
    return with_frozen(module, replace(frozen, whole=False, paths=own, before_adapters=None))


def is_marked(module: Module) -> bool:
    """Returns True for modules frozen by `freeze_for_adapters`."""
    return frozen_of(module).before_adapters is not None


def unfreeze_own(module: Module) -> Any:
    """Unfreezes a module's own arrays."""
    frozen = frozen_of(undo_freezing(module))
    return with_frozen(module, Frozen(paths=frozen.paths))


def with_strength(adapter: LoRA, strength: float) -> LoRA:
    """Sets the strength of an adapter; strength 0 also freezes it."""
    adapter = with_static(adapter, strength=strength)
    return undo_freezing(adapter) if strength else freeze_for_adapters(adapter)


def weight_of(layer: Module) -> Any:
    """Returns the weight of a layer including its active adapters.

    Layers apply their adapters themselves.  Use this function where a net uses a layer's weight
    directly, as a head tied to an embedding does, so that the adapters apply there as well, as
    they do after merging.

    Args:
        layer: a layer with or without adapters.

    Returns:
        An array like ``layer.weight``, or that array itself without active adapters.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> embed = pax.adapters.lora(pax.Embed(9, 4), 2)
        >>> logits = jnp.ones((1, 4)) @ pax.adapters.weight_of(embed).T
    """
    require_module(layer, "adapters.weight_of")
    return weight_in_use(layer)


def _changed_arrays(layer: Module) -> dict[str, Any]:
    """Returns the arrays that active adapters of a layer change, with the changes, by name."""
    changed = {}
    for array, adapted in adaptable_arrays(layer).items():
        active = [a[array] for a in adapters_of(layer).values() if array in a and a[array].strength]
        changes = [each.change(adapted) for each in active]
        if changes:
            weight = adapted.array
            total = sum(changes, weight.astype(changes[0].dtype))
            changed[adapted.name] = total.astype(weight.dtype)
    return changed


def merge_layer(layer: Module) -> Any:
    """Adds the active adapters of a layer to its arrays, and removes them."""
    changed = _changed_arrays(layer)
    layer = set_adapters(layer, {})
    for name, total in changed.items():
        weight = getattr(layer, name)
        if isinstance(weight, np.ndarray) and not is_tracer(total):
            changed[name] = np.asarray(total)
        elif not is_tracer(total) and (sharding := chosen_sharding(weight)) is not None:
            changed[name] = jax.device_put(total, sharding)
    return layer.replace(**changed)


# --- the derived class --------------------------------------------------------------


def _adapted_namespace(base: type, namespace: dict[str, Any], value: bool) -> dict[str, Any]:
    """Calls the layer under its policy, and adds the outputs of the adapters."""
    inner: Any = namespace.get("__call__") or base.__call__

    def __call__(self: Any, x: Array, /, *args: object, **kwargs: object) -> Any:
        adapters = [pair for each in adapters_of(self).values() for pair in each.items()]
        active = [(array, each) for array, each in adapters if each.strength]
        if apply_of(self) is None:
            if self.training and any(each.dropout for _, each in active):
                raise InvalidArgumentError(
                    "Adapters with dropout require a layer with one kernel, and how it is applied.",
                    where=repr(self)[:200],
                    write='pax.Declared("kernel", ..., apply=lambda layer, array, x: ...)',
                )
            changed = self.replace(**_changed_arrays(self))
            return inner.__get__(changed, type(self))(x, *args, **kwargs)
        plain = y = inner.__get__(self, type(self))(x, *args, **kwargs)
        arrays = adaptable_arrays(self)
        for array, adapter in active:
            y = y + adapter(arrays[array], x, plain).astype(y.dtype)
        return y

    return {"__call__": functools.update_wrapper(__call__, inner), "_weight_in_use": _weight_in_use}


def _weight_in_use(layer: Module) -> Any:
    kernel = kernel_of(layer)
    return _changed_arrays(layer).get(kernel.name, kernel.array) if kernel else layer.weight


register_aspect("adapted", _adapted_namespace)
