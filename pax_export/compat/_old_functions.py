"""Functions removed from JAX since 2021, in terms of current ones."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pax_export._types import PyTree


def find_object(name: str) -> Any:
    """The object with a dotted name; imports modules on the way."""
    parts = name.split(".")
    value, at = importlib.import_module(parts[0]), 1
    while at < len(parts):
        try:
            value = getattr(value, parts[at])
        except AttributeError:
            value = importlib.import_module(".".join(parts[: at + 1]))
        at += 1
    return value


def rename_arguments(function: str, /, **names: str) -> Callable[..., Any]:
    """A current function that also takes old argument names; "" is its first argument."""
    now = find_object(function)

    @functools.wraps(now)
    def call(*args: object, **kwargs: object) -> Any:
        given = {names.get(name, name): value for name, value in kwargs.items()}
        if "" in given:
            args = (given.pop(""), *args)
        return now(*args, **given)

    return call


def without_arguments(function: str, *names: str) -> Callable[..., Any]:
    """A current function that ignores arguments it once had."""
    now = find_object(function)

    @functools.wraps(now)
    def call(*args: object, **kwargs: object) -> Any:
        return now(*args, **{name: x for name, x in kwargs.items() if name not in names})

    return call


# --- jax ----------------------------------------------------------------------------


def _one_row_each(devices: Sequence[Any]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec("devices"))


def device_put_replicated(x: object, devices: Sequence[Any]) -> Any:
    """A tree repeated along a new first axis, one row per device."""
    sharding = _one_row_each(devices)

    def put(leaf: object) -> jax.Array:
        return jax.device_put(jnp.stack([jnp.asarray(leaf)] * len(devices)), sharding)

    return jax.tree_util.tree_map(put, x)


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Any]) -> Any:
    """Trees stacked along a new first axis, one row per device."""
    sharding = _one_row_each(devices)

    def put(*leaves: object) -> jax.Array:
        return jax.device_put(jnp.stack([jnp.asarray(leaf) for leaf in leaves]), sharding)

    return jax.tree_util.tree_map(put, *shards)


def xla_computation(function: Callable, static_argnums: PyTree = ()) -> Callable[..., Any]:
    """Returns a function that returns the HLO of a function for its arguments."""

    def make(*args: PyTree, **kwargs: PyTree) -> Any:
        lowered = jax.jit(function, static_argnums=static_argnums).lower(*args, **kwargs)
        return lowered.compiler_ir("hlo")

    return make


# --- jax.numpy, jax.lax, jax.scipy ------------------------------------------------------


def where(*args: PyTree, **kwargs: PyTree) -> Any:
    """`jnp.where` with its old argument names."""
    named = [kwargs.pop(name) for name in ("condition", "x", "y") if name in kwargs]
    return jnp.where(*args, *named, **kwargs)


def in1d(ar1: PyTree, ar2: PyTree, assume_unique: bool = False, invert: bool = False) -> jax.Array:
    """Returns which elements of a flat array are in another one."""
    return jnp.isin(jnp.ravel(ar1), jnp.asarray(ar2), assume_unique=assume_unique, invert=invert)


def solve(*args: object, sym_pos: bool = False, **kwargs: object) -> jax.Array:
    """`jax.scipy.linalg.solve`, with the old option for positive definite matrices."""
    if sym_pos:
        kwargs["assume_a"] = "pos"
    return find_object("jax.scipy.linalg.solve")(*args, **kwargs)


# --- jax.ops --------------------------------------------------------------------------


class _Index:
    """``index[1:, 0]`` is the index itself."""

    def __getitem__(self, index: int) -> Any:
        return index


INDEX = _Index()


def index_act(method: str) -> Callable[..., jax.Array]:
    """Makes a function of an array, an index and values, by a method of ``x.at[index]``."""

    def act(x: object, idx: object, y: object, *flags: bool, **named: bool) -> jax.Array:
        given = dict(zip(("indices_are_sorted", "unique_indices"), flags)) | named
        return getattr(jnp.asarray(x).at[idx], method)(y, **given)

    return act


# --- jax.random -----------------------------------------------------------------------


def shuffle(key: PyTree, x: PyTree, axis: int = 0) -> jax.Array:
    """Shuffles elements along an axis, each row by itself."""
    return jax.random.permutation(key, x, axis=axis, independent=True)


def with_implementation(kind: str) -> Callable[[int], jax.Array]:
    """Returns a function from a seed to a key of one implementation."""
    return functools.partial(jax.random.PRNGKey, impl=kind)


# --- jax.util -------------------------------------------------------------------------


def unzip2(pairs: Iterable[tuple[Any, Any]]) -> tuple[tuple, tuple]:
    """The first and the second of each pair."""
    first, second = [], []
    for a, b in pairs:
        first.append(a)
        second.append(b)
    return tuple(first), tuple(second)


# --- jax.experimental -----------------------------------------------------------------


def id_print(
    arg: object, *, result: object = None, tap_with_device: bool = False, **names: object
) -> Any:
    """Prints a value while a compiled function runs, and is that value, or `result`."""
    what = "".join(f"{name}: {value}  " for name, value in names.items())
    jax.debug.callback(lambda value: print(what, *jax.tree_util.tree_leaves(value)), arg)
    return arg if result is None else result


def id_tap(tap: Callable, arg: object, *, result: object = None, **options: object) -> Any:
    """Calls a function while a compiled function runs, and is its argument, or `result`."""
    jax.debug.callback(lambda value: tap(value, ()), arg)
    return arg if result is None else result


def host_call(
    function: Callable, arg: object, *, result_shape: object = None, **options: object
) -> Any:
    """Calls a Python function on a value of a compiled function."""
    return find_object("jax.experimental.io_callback")(function, result_shape, arg)
