"""Places arrays on devices: existing ones, batches, initial values, results of steps."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
)

from pax_export._foundations.errors import ShardingError
from pax_export._foundations.jax import call_with_constants, is_tracer
from pax_export._foundations.jaxpr import jaxpr_constants
from pax_export._foundations.types import AnyMesh, Array, ArrayLike, PyTree
from pax_export.sharding._leaf_shardings import shardings_of_leaves
from pax_export.sharding._mesh import require_devices
from pax_export.sharding._rules import RulesLike

T = TypeVar("T")


def shard(tree: T, mesh: AnyMesh, rules: RulesLike = None) -> T:
    """Places the arrays of a module on a mesh.

    With several processes, each one calls this with the same values and keeps its own part of them.
    Arrays that are on the mesh already are moved. Inside a jitted function it is a sharding
    constraint.

    Args:
        tree: a module, or a pytree of modules and arrays.  Leaves of an abstract one, from
            `jax.eval_shape`, get their shardings, for ``jax.jit(step).lower`` and checkpoints.
        mesh: a `jax.sharding.Mesh`; for an abstract module an abstract one, too.
        rules: `Rules`, or a mapping; see `Rules.of`.  Specs declared with `with_sharding` take
            precedence.  For the state of an optimizer, see `following`.

    Returns:
        The same pytree with placed arrays.  Leaves without a rule are replicated; `table` lists
        them.

    Raises:
        ShardingError: (a ValueError) a rule matches no leaf, a spec does not fit its leaf or the
            mesh, or two processes have different values.
        InvalidArgumentTypeError: (a TypeError) not a mesh, or not rules.

    Example:
        >>> import jax, pax_export as pax
        >>> mesh = pax.sharding.make_mesh(data=len(jax.devices()))
        >>> net = pax.Linear(64, 128 * mesh.size)
        >>> net = pax.sharding.shard(net, mesh, pax.sharding.fully_sharded())
        >>> net.weight.sharding.shard_shape(net.weight.shape)
        (64, 128)
    """
    leaves, treedef = tree_flatten(tree)
    found = shardings_of_leaves(tree, mesh, rules)
    if not all(map(_needs_no_device, leaves)):
        require_devices(mesh)
    require_same_values([leaf for leaf in leaves if _is_local(leaf)], mesh)
    return treedef.unflatten([_put_leaf(leaf, each) for leaf, each in zip(leaves, found)])


def _needs_no_device(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or is_tracer(leaf)


def _is_local(leaf: object) -> bool:
    """Returns whether this process has all values of a leaf."""
    if _needs_no_device(leaf):
        return False
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _put_leaf(leaf: ArrayLike | jax.ShapeDtypeStruct, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if is_tracer(leaf):
        return jax.lax.with_sharding_constraint(leaf, sharding)
    if not _is_local(leaf):
        return jax.jit(_same, out_shardings=sharding)(leaf)
    if not sharding.is_fully_addressable:
        return _own_part(leaf, sharding)
    return jax.device_put(leaf if hasattr(leaf, "dtype") else np.asarray(leaf), sharding)


def _same(x: Array) -> Array:
    return x


def _own_part(leaf: ArrayLike, sharding: NamedSharding) -> jax.Array:
    if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        data = _own_part(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    value = _to_canonical(leaf)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def gather(tree: T, *, host: bool = False) -> T:
    """Gathers the arrays of a module: replicated on every device, or as numpy arrays.

    With several processes each one must call it.

    Args:
        tree: a module, or a pytree of modules and arrays.
        host: return numpy arrays, one leaf at a time, so that a device needs memory for one more
            whole leaf.  (Typed random keys stay jax arrays, replicated.)

    Returns:
        The same pytree.  Arrays that are not on a mesh are those of ``tree``, or numpy copies.

    Example:
        >>> import jax, pax_export as pax
        >>> mesh = pax.sharding.make_mesh(data=len(jax.devices()))
        >>> net = pax.Linear(64, 128 * mesh.size)
        >>> net = pax.sharding.shard(net, mesh, pax.sharding.fully_sharded())
        >>> pax.sharding.gather(net).weight.is_fully_replicated
        True
        >>> type(pax.sharding.gather(net, host=True).weight)
        <class 'numpy.ndarray'>
    """
    leaves, treedef = tree_flatten(tree)
    return treedef.unflatten([_on_host(x) if host else _replicate_leaf(x) for x in leaves])


def _replicate_leaf(leaf: object) -> Any:
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
        return leaf
    whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    if leaf.is_fully_addressable:
        return jax.device_put(leaf, whole)
    return jax.jit(_same, out_shardings=whole)(leaf)


def _on_host(leaf: object) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _replicate_leaf(leaf)
    whole = leaf if leaf.is_fully_addressable else _replicate_leaf(leaf)
    return np.array(whole)  # a copy: a view would keep the device's buffer


def shard_batch(batch: T, mesh: Mesh, axis: str | tuple[str, ...] = "data") -> T:
    """Splits a batch over a mesh, along the first axis of its arrays.

    With several processes, each one passes the examples of its own devices, in the order of the
    processes along the axis; together they are one batch. Processes whose devices have the same
    positions along the axis pass the same examples.

    Args:
        batch: a pytree of arrays ``[batch, ...]``.
        mesh: the mesh.
        axis: the mesh axis, or several as one.

    Returns:
        The same pytree of arrays ``[whole batch, ...]``.

    Raises:
        ValueError: the mesh has no such axis, or the devices of this process do not divide the
            batch.

    Example:
        >>> import jax, numpy as np, pax_export as pax
        >>> mesh = pax.sharding.make_mesh(data=len(jax.devices()))
        >>> x = pax.sharding.shard_batch(np.ones((4 * mesh.size, 8)), mesh)
        >>> x.sharding.shard_shape(x.shape)
        (4, 8)
    """
    require_devices(mesh)
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    return tree_map(lambda leaf: _split_leaf(leaf, sharding), batch)


def _split_leaf(leaf: ArrayLike, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    return jax.make_array_from_process_local_data(sharding, _to_canonical(leaf))


def _to_canonical(leaf: ArrayLike) -> np.ndarray:
    value = np.asarray(leaf)
    return value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)


def require_same_values(values: Sequence[Any], mesh: AnyMesh) -> None:
    """Raises a ShardingError in every process if their values for a mesh differ."""
    if values:
        what = "The processes of a mesh must give the same values."
        _require_same(map(_bytes_of, values), mesh, what)


def require_same_program(text: str, mesh: AnyMesh) -> None:
    """Raises a ShardingError in every process if their programs differ."""
    _require_same([text.encode()], mesh, "The processes of a mesh must build the same model.")


def _is_ours(mesh: AnyMesh) -> bool:
    """True where no other process has devices of the mesh."""
    here = jax.process_index()
    devices = getattr(mesh, "devices", None)
    return devices is None or all(device.process_index == here for device in devices.flat)


def _bytes_of(value: ArrayLike) -> bytes:
    if jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.ascontiguousarray(value)
    return f"{array.shape}{array.dtype}".encode() + array.tobytes()


def _require_same(parts: Iterable[bytes], mesh: AnyMesh, what: str) -> None:
    """Each sends a digest of 32 bytes, unless this process has all devices of the mesh."""
    if _is_ours(mesh):
        return
    from jax.experimental import multihost_utils

    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    own = np.frombuffer(digest.digest(), np.uint8)
    all_of_them = np.asarray(multihost_utils.process_allgather(own))
    if (all_of_them == own).all():
        return
    same = [i for i, other in enumerate(all_of_them) if (other == all_of_them[0]).all()]
    raise ShardingError(
        what,
        got=f"values of {len(all_of_them)} processes, of which only "
        f"{', '.join(map(str, same))} agree with process 0",
        write="pax.seed_rng_key(n) with one n in every process, before the model is made",
    )


# --- initial values on a mesh, without a full copy on any device ----------------------


def init(constructor: Callable[[], T], mesh: Mesh, rules: RulesLike = None) -> T:
    """Builds a module whose arrays are created on a mesh.

    The constructor is traced once and compiled; each device computes its own parts of the initial
    values. They equal those of ``constructor()`` up to rounding, and the ambient stream of keys
    continues as after it. With several processes, each one calls this with the same seed.

    Args:
        constructor: builds a module, or a pytree of modules and arrays, without
            arguments.  Like any traced function it cannot use the values of the arrays that it
            creates.
        mesh: a `jax.sharding.Mesh`.
        rules: `Rules`, or a mapping; see `Rules.of`.

    Returns:
        The result of the constructor.

    Raises:
        ShardingError: (a ValueError) a rule matches no leaf, a spec does not fit its leaf or the
            mesh, two processes build different models, or the constructor uses values.
        InvalidArgumentTypeError: (a TypeError) not a mesh, or not rules.

    Example:
        >>> import jax, optax, pax_export as pax
        >>> mesh = pax.sharding.make_mesh(data=len(jax.devices()))
        >>> rules = pax.sharding.fully_sharded()
        >>> net = pax.sharding.init(lambda: pax.Linear(64, 128 * mesh.size), mesh, rules)
        >>> net.weight.sharding.shard_shape(net.weight.shape)
        (64, 128)
        >>> adam = pax.optim.from_optax(optax.adam(1e-3))
        >>> rules = pax.sharding.following(net, rules)
        >>> optimizer = pax.sharding.init(lambda: adam(net.parameters()), mesh, rules)
    """
    program = program_of(constructor, mesh, rules)
    lowered = program.lowered()
    require_same_program(lowered.as_text(), mesh)
    return program.treedef.unflatten(lowered.compile()(program.constants))


@dataclass(frozen=True)
class InitProgram:
    """The compiled program that computes the leaves of a new module."""

    function: Callable[[list[Any]], list[Any]]  # from the constants to the leaves
    constants: list[Any]  # that the constructor took from outside
    shardings: list[NamedSharding]
    treedef: Any

    def lowered(self) -> Any:
        """The program for the devices of its mesh, to be compiled."""
        return jax.jit(self.function, out_shardings=self.shardings).lower(self.constants)


def program_of(constructor: Callable[[], Any], mesh: Mesh, rules: RulesLike) -> InitProgram:
    """Returns the program that `init` compiles."""
    require_devices(mesh)
    # A new function each time: jax caches traces by function, and two models of one constructor
    # would get the same keys.
    try:
        traced, module = jax.make_jaxpr(lambda: constructor(), return_shape=True)()
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise ShardingError(
            "The constructor looks at the values of arrays that it makes, and init traces it: "
            "they are not known yet.",
            got=str(error).splitlines()[0],
            write="numpy for decisions by values, or pax.sharding.shard(constructor(), ...) for a "
            "model that fits on one device",
        ) from error
    found = shardings_of_leaves(module, mesh, rules)
    constants = list({id(x): x for x in jaxpr_constants(traced)}.values())
    ids = [id(x) for x in constants]

    def build(values: list[Any]) -> list[Any]:
        return call_with_constants(traced, dict(zip(ids, values)), ())

    return InitProgram(build, constants, found, tree_flatten(module)[1])


# --- steps that preserve shardings ----------------------------------------------------


F = Callable[..., Any]


def keep(function: F, *trees: PyTree) -> F:
    """Wraps a function so that its results keep the shardings of these trees.

    The compiler chooses the shardings of results of a jitted function. It mostly keeps those of the
    arguments, but it may split a small replicated array, and then the next call recompiles.

    Args:
        function: for example a training step, to be jitted.
        *trees: placed modules, such as the model and the optimizer.

    Returns:
        A function whose results, also in containers, are constrained to the shardings of the tree
        with the same structure.

    Raises:
        ShardingError: (a ValueError, when called) no result has one of these structures.

    Example:
        >>> import jax, optax, pax_export as pax
        >>> mesh = pax.sharding.make_mesh(data=len(jax.devices()))
        >>> net = pax.sharding.shard(pax.Linear(2, 3), mesh, pax.sharding.data_parallel())
        >>> grow = jax.jit(pax.sharding.keep(lambda net: net.map(lambda x: 2 * x), net))
        >>> grow(net).weight.sharding == net.weight.sharding
        True
    """
    known = [
        (tree_structure(tree), [getattr(leaf, "sharding", None) for leaf in tree_leaves(tree)])
        for tree in trees
    ]

    def shardings_of(value: object) -> list[Any] | None:
        structure = tree_structure(value)
        return next((each for own, each in known if own == structure), None)

    @functools.wraps(function)
    def wrapped(*args: object, **kwargs: object) -> Any:
        any_known = False

        def constrained(value: object) -> Any:
            nonlocal any_known
            shardings = shardings_of(value)
            if shardings is None:
                return value
            any_known = True
            leaves, treedef = tree_flatten(value)
            return treedef.unflatten([_constrain_leaf(*pair) for pair in zip(leaves, shardings)])

        results = function(*args, **kwargs)
        results = tree_map(constrained, results, is_leaf=lambda x: shardings_of(x) is not None)
        if not any_known:
            raise ShardingError(
                "The function returns none of the trees whose shardings are to be preserved.",
                got=f"results of structure {tree_structure(results)}"[:300],
                write="keep(function, net, optimizer) with both as the function returns them: in "
                "the same mode (train or eval), of the same classes",
            )
        return results

    return wrapped


def _constrain_leaf(leaf: ArrayLike, sharding: Sharding) -> Any:
    if not isinstance(sharding, NamedSharding):
        return leaf
    return jax.lax.with_sharding_constraint(leaf, sharding)
