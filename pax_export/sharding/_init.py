"""Initializes a model on a mesh, without a full copy on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import tree_flatten

from pax_export._errors import ShardingError
from pax_export._jax import call_with_constants
from pax_export._jaxpr import jaxpr_constants
from pax_export.sharding._leaf_shardings import shardings_of_leaves
from pax_export.sharding._mesh import require_devices
from pax_export.sharding._shard import require_same_program

T = TypeVar("T")


def init(constructor: Callable[[], T], mesh: Mesh, rules: object = None) -> T:
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


def program_of(constructor: Callable[[], Any], mesh: Mesh, rules: object) -> InitProgram:
    """Returns the program that `init` compiles."""
    require_devices(mesh)
    # A new function each time: jax caches traces by function, and two models of one constructor
    # would get the same keys.
    try:
        traced, made = jax.make_jaxpr(lambda: constructor(), return_shape=True)()
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise ShardingError(
            "The constructor looks at the values of arrays that it makes, and init traces it: "
            "they are not known yet.",
            got=str(error).splitlines()[0],
            write="numpy for decisions by values, or pax.sharding.shard(constructor(), ...) for a "
            "model that fits on one device",
        ) from error
    found = shardings_of_leaves(made, mesh, rules)
    constants = list({id(x): x for x in jaxpr_constants(traced)}.values())
    ids = [id(x) for x in constants]

    def build(values: list[Any]) -> list[Any]:
        return call_with_constants(traced, dict(zip(ids, values)), ())

    return InitProgram(build, constants, found, tree_flatten(made)[1])
