"""Type aliases of arguments; at run time `typing.Any`, without jax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

#: A `jax.tree_util.PyTreeDef`, which type checkers do not take for a class.
TreeDef: TypeAlias = Any
#: Arrays, modules, static values, and containers of them: what `jax.tree_util` flattens.
PyTree: TypeAlias = Any

if TYPE_CHECKING:
    import jax
    import numpy as np
    from jax.extend import core
    from jax.sharding import AbstractMesh, Mesh

    Array: TypeAlias = jax.Array | np.ndarray
    ArrayLike: TypeAlias = jax.typing.ArrayLike
    DTypeLike: TypeAlias = jax.typing.DTypeLike
    PRNGKey: TypeAlias = jax.Array  # a typed key, or one of uint32
    AnyMesh: TypeAlias = Mesh | AbstractMesh
    Equation: TypeAlias = core.JaxprEqn
    Jaxpr: TypeAlias = core.Jaxpr
    Var: TypeAlias = core.Var
    Atom: TypeAlias = core.Var | core.Literal
    ClosedJaxpr: TypeAlias = core.ClosedJaxpr
    TracedProgram: TypeAlias = core.Jaxpr | core.ClosedJaxpr  # one class since jax 0.12
else:
    Array = ArrayLike = DTypeLike = PRNGKey = AnyMesh = Any
    Equation = Jaxpr = ClosedJaxpr = Var = Atom = TracedProgram = Any
