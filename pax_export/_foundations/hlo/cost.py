"""Cost of a compiled program on each device: memory and bytes sent."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.files.system import bytes_text
from pax_export._foundations.hlo.collectives import Collective, collectives
from pax_export._foundations.types import AnyMesh


@dataclass(frozen=True)
class Cost:
    """The cost of one call of a compiled program on each device; prints as a table.

    Attributes:
        arguments: bytes of the arguments.
        results: bytes of the results.
        reused: bytes of arguments reused for results (donated arrays).
        temporary: the peak of bytes of intermediate values.
        collectives: the exchanges between devices, see `Collective`.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> spec = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        >>> step = jax.jit(jnp.add, donate_argnums=0).lower(spec, spec)
        >>> cost = pax.sharding.cost(step.compile())
        >>> cost.arguments == 2 * cost.results == 2 * cost.reused == 8 * 2**20
        True
        >>> cost.sent  # on one device
        0.0
    """

    arguments: int
    results: int
    reused: int
    temporary: int
    collectives: tuple[Collective, ...]

    @property
    def memory(self) -> int:
        """The bytes that a device needs for the call."""
        return self.arguments + self.results - self.reused + self.temporary

    @property
    def sent(self) -> float:
        """The bytes that a device sends, if all exchanges go round in rings."""
        return sum([each.sent for each in self.collectives], 0.0)

    def sent_by(self, mesh: AnyMesh | None = None) -> dict[tuple[str, tuple[str, ...]], float]:
        """The bytes that a device sends, by the kind of exchange and the axes of the mesh.

        Args:
            mesh: the mesh for which the program was compiled; without it the axes
                are empty.

        Returns:
            By ``(kind, axes)``, the largest first.
        """
        found: dict[tuple[str, tuple[str, ...]], float] = {}
        for each in self.collectives:
            key = each.kind, each.axes(mesh) if mesh is not None else ()
            found[key] = found.get(key, 0.0) + each.sent
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def __str__(self) -> str:
        rows = [
            ("arguments", self.arguments),
            ("results", self.results),
            ("  of them reused arguments", self.reused),
            ("temporary", self.temporary),
            ("memory", self.memory),
            *[(f"sent by {kind}", size) for (kind, _), size in self.sent_by().items()],
            ("sent", self.sent),
        ]
        width = max([len(name) for name, _ in rows])
        lines = [f"{name:<{width}}  {bytes_text(size):>10}" for name, size in rows]
        if not all(each.times_known for each in self.collectives):
            lines.append("(of a loop whose length is not known, one round is counted)")
        return "\n".join(lines)


def cost(compiled: jax.stages.Compiled) -> Cost:
    """Returns the compiler's estimate of the cost of a program on each device.

    Nothing is computed, and no array is needed: lower the function for abstract
    arguments (`jax.eval_shape`, `jax.ShapeDtypeStruct`) and compile it for a mesh
    of virtual devices.  The estimate of a compiler for CPUs differs from one for GPUs
    or TPUs; the page on scale explains how.

    Args:
        compiled: the result of ``jax.jit(f).lower(...).compile()``.

    Returns:
        A `Cost`.

    Raises:
        InvalidArgumentTypeError: (a TypeError) not a compiled program, or one for a platform that
            does not report memory.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> spec = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> program = jax.jit(jnp.dot).lower(spec, spec).compile()
        >>> pax.sharding.cost(program).arguments
        512
    """
    found = collectives(compiled)
    memory = getattr(compiled, "memory_analysis", lambda: None)()
    if memory is None:
        raise InvalidArgumentTypeError(
            "The compiler reports no memory use of this program.",
            got=f"{type(compiled).__name__}",
            write="pax.sharding.collectives(compiled) for the exchanges between devices",
        )
    return Cost(
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        reused=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        collectives=found,
    )
