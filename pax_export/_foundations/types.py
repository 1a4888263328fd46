"""Type aliases of arguments, and the parts of a traced program; without jax at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

#: A `jax.tree_util.PyTreeDef`, which type checkers do not take for a class.
TreeDef: TypeAlias = Any
#: Arrays, modules, static values, and containers of them: what `jax.tree_util` flattens.
PyTree: TypeAlias = Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import jax
    import numpy as np
    from jax.extend import core
    from jax.sharding import AbstractMesh, Mesh

    Array: TypeAlias = jax.Array | np.ndarray
    ArrayLike: TypeAlias = jax.typing.ArrayLike
    DTypeLike: TypeAlias = jax.typing.DTypeLike
    PRNGKey: TypeAlias = jax.Array  # a typed key, or one of uint32
    AnyMesh: TypeAlias = Mesh | AbstractMesh
    #: A size of an array, or jax's symbolic size, which its own types count among integers.
    Size: TypeAlias = int

    class HasShape(Protocol):
        """An array, its type or its description."""

        @property
        def shape(self) -> tuple[Size, ...]: ...
        @property
        def dtype(self) -> Any: ...

    # jax's own classes; jax's types say nothing of the shape of a variable, and a program and its
    # jaxpr are one class since jax 0.12.

    class Aval:
        shape: tuple[Size, ...]
        dtype: np.dtype[Any]
        ndim: int
        size: Size
        weak_type: bool

    class Var:
        aval: Aval

    class Literal(Var):
        val: Any

    Atom: TypeAlias = Var | Literal

    class Primitive:
        name: str
        multiple_results: bool
        impl: Callable[..., Any]

        def bind(self, *operands: Any, **parameters: Any) -> Any: ...
        def get_bind_params(self, params: Mapping[str, Any]) -> dict[str, Any]: ...

    class Equation:
        primitive: Primitive
        invars: list[Atom]
        outvars: list[Var]
        params: dict[str, Any]
        effects: set[Any]
        source_info: Any
        ctx: Any

        def replace(self, **changed: Any) -> Equation: ...

    class Jaxpr:
        jaxpr: Jaxpr
        consts: Sequence[Any]
        constvars: list[Var]
        invars: list[Var]
        outvars: list[Atom]
        eqns: list[Equation]
        effects: set[Any]
        debug_info: Any
        in_avals: Sequence[Aval]
        out_avals: Sequence[Aval]

        def replace(self, **changed: Any) -> Jaxpr: ...

    #: A program of ours or of jax; `jaxpr_of` opens it.
    ClosedJaxpr: TypeAlias = Jaxpr | core.ClosedJaxpr
    TracedProgram: TypeAlias = ClosedJaxpr | core.Jaxpr
else:
    Array = ArrayLike = DTypeLike = PRNGKey = AnyMesh = Size = HasShape = Any
    Aval = Var = Literal = Atom = Primitive = Equation = Jaxpr = ClosedJaxpr = TracedProgram = Any
