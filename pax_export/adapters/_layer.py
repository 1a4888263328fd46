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
from pax_export._foundations.types import Array
from pax_export.adapters import _kernels as kernels
from pax_export.adapters._lora import LoRA
from pax_export.core import (
    Frozen,
    Module,
    aspect_of,
    attributes_of,
    current_kinds,
    derive_class,
    filled_array,
    frozen_of,
    is_node,
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
    key: Any = None,
    name: str = "default",
    rslora: bool = False,
    dora: bool = False,
) -> M:
    """Adds an adapter to one layer, and freezes the layer's own arrays.

    The layer keeps its class and its weight; only the adapter, in its dict ``adapters``, is in its
    `parameters()`.  The adapter initially adds exactly zero: ``a`` is random and ``b`` zero (for an
    `Embed` the other way round), as in PEFT.

    Args:
        module: a `Linear`, `Embed`, convolution or transposed convolution, or any layer that
            declares a kernel or table (`pax_export.Declared`); stacked layers, in `Scan` or
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
    where = repr(module)[:200]
    sizes = kernels.sizes_of(module, where)
    if checked_integer(rank, "lora.rank", least=1) > sizes.largest_rank:
        raise InvalidArgumentError(
            "The rank of an adapter is larger than the sizes of its layer.",
            where=where,
            got=f"rank {rank} for {sizes.largest_rank}",
            write=f"a rank of at most {sizes.largest_rank}, or train the layer itself",
        )
    a_key, b_key, dropout_key = split_rng_key(key, 3, "lora: key")
    own = kernels.adapted_array(module).array
    dtype = jnp.promote_types(own.dtype, jnp.float32)
    a_shape, b_shape = (*sizes.a, int(rank)), (*sizes.stacked, int(rank), sizes.outputs)
    if kernels.is_table(module):
        a = filled_array(a_shape, 0, dtype)
        b = sample_padded(lambda key, shape: jax.random.normal(key, shape, dtype), b_key, b_shape)
    else:
        bound = 1 / np.sqrt(np.prod(sizes.inputs, dtype=int))
        draw = lambda key, shape: jax.random.uniform(key, shape, dtype, -bound, bound)  # noqa: E731
        a, b = sample_padded(draw, a_key, a_shape), filled_array(b_shape, 0, dtype)
    adapter = LoRA(
        a,
        b,
        alpha=checked_positive(rank if alpha is None else alpha, "lora.alpha"),
        dropout=checked_fraction(dropout, "lora.dropout", one_allowed=False),
        rslora=rslora,
        magnitude=kernels.column_norms(module, own.astype(dtype)) if dora else None,
        key=dropout_key,
    )
    return put_adapter(module, name, adapter)


def put_adapter(layer: Module, name: str, adapter: LoRA) -> Any:
    """Adds an adapter to a layer, with the layer's mode and policy."""
    now = adapters_of(layer)
    if not isinstance(name, str) or not name or "." in name:
        raise InvalidArgumentError(
            "The name of an adapter is a word without dots: it is a part of names of weights.",
            got=repr(name),
            write='name="default"',
        )
    if name in now:
        raise InvalidArgumentError(
            "This layer has an adapter of this name already.",
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
    policy = policy_of(layer)
    if policy is not None:
        # Adapters stay in float32, for small updates and loss scales.
        wide = jnp.promote_types(policy.param_dtype, jnp.float32)
        policy = jmp.Policy(wide, policy.compute_dtype, policy.output_dtype)
        adapter = apply_mp_policy(adapter, policy)
    adapter = set_training(adapter, layer.training)
    return set_adapters(freeze_for_adapters(layer), {**now, name: adapter})


def adapters_of(module: Module) -> dict[str, LoRA]:
    """Returns the adapters of a layer by name; empty for other objects."""
    if not is_node(module) or aspect_of(type(module), "adapted") is None:
        return {}
    return dict(getattr(module, _ATTRIBUTE))


def with_adapters(layer: Module, adapters: dict[str, LoRA]) -> Any:
    """Replaces the adapters of a layer; without any, restores the original class."""
    return set_adapters(layer, adapters) if adapters else undo_freezing(set_adapters(layer, {}))


def set_adapters(layer: Module, adapters: dict[str, LoRA]) -> Any:
    """Replaces the adapters of a layer, which stays frozen; without any, it has its own class."""
    new = rebuild_tree(layer)
    known = {name: kind for name, kind in current_kinds(new).items() if name != _ATTRIBUTE}
    attributes_of(new)[_ATTRIBUTE] = adapters
    if not adapters:
        del attributes_of(new)[_ATTRIBUTE]
    update_moduledef(new, known)
    return with_class(new, derive_class(type(new), "adapted", True if adapters else None))


def freeze_for_adapters(module: Module) -> Any:
    """Freezes a module's own arrays because adapters train instead of them."""
    frozen = frozen_of(module)
    if frozen.whole:
        return module
    return with_frozen(module, replace(frozen, whole=True, for_adapters=True))


def undo_freezing(module: Module) -> Any:
    """Undoes `freeze_for_adapters`; modules frozen by the user stay frozen."""
    return unfreeze_own(module) if is_marked(module) else module


def is_marked(module: Module) -> bool:
    """Returns True for modules frozen by `freeze_for_adapters`."""
    return frozen_of(module).for_adapters


def unfreeze_own(module: Module) -> Any:
    """Unfreezes a module's own arrays."""
    return with_frozen(module, Frozen(paths=frozen_of(module).paths))


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


def _with_changes(layer: Module) -> Any:
    weight = kernels.adapted_array(layer).array
    changes = [each.change(layer) for each in adapters_of(layer).values() if each.strength]
    if not changes:
        return weight
    total = weight.astype(changes[0].dtype)
    for change in changes:
        total = total + change
    return total.astype(weight.dtype)


def merge_layer(layer: Module) -> Any:
    """Adds the active adapters of a layer to its weight, and removes them."""
    kernel = kernels.adapted_array(layer)
    weight, total = kernel.array, _with_changes(layer)
    layer = set_adapters(layer, {})
    if total is weight:
        return layer
    if isinstance(weight, np.ndarray) and not is_tracer(total):
        total = np.asarray(total)
    elif not is_tracer(total) and (sharding := chosen_sharding(weight)) is not None:
        total = jax.device_put(total, sharding)
    return layer.replace(**{kernel.name: total})


# --- the derived class --------------------------------------------------------------


def _adapted_namespace(base: type, namespace: dict[str, Any], value: bool) -> dict[str, Any]:
    """Calls the layer under its policy, and adds the outputs of the adapters."""
    inner: Any = namespace.get("__call__") or base.__call__

    def __call__(self: Any, x: Array, /, *args: object, **kwargs: object) -> Any:
        active = [each for each in getattr(self, _ATTRIBUTE).values() if each.strength]
        kernel = kernels.adapted_array(self)
        if kernel.declared.apply is None and not any(each.dropout for each in active):
            changed = self.replace(**{kernel.name: _with_changes(self)})
            return inner.__get__(changed, type(self))(x, *args, **kwargs)
        plain = y = inner.__get__(self, type(self))(x, *args, **kwargs)
        for adapter in active:
            y = y + adapter(self, x, plain).astype(y.dtype)
        return y

    return {"__call__": functools.update_wrapper(__call__, inner), "_weight_in_use": _with_changes}


register_aspect("adapted", _adapted_namespace)
