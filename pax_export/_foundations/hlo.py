"""What a compiled program costs: its memory, and its collectives and how often each runs.

Collectives are parsed from the HLO text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import numpy as np

from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.tables import bytes_text
from pax_export._foundations.types import AnyMesh

#: The share of the whole array that one device sends, for ``n`` devices in a ring.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,
}


def sent_bytes(kind: str, size: int, devices: int) -> float:
    """Returns the minimum that each device sends when several exchange an array in a ring.

    Args:
        kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``,
            ``"all-to-all"``, ``"collective-permute"`` or ``"collective-broadcast"``.
        size: the bytes of the whole array: the array of each device before an all-reduce or a
            reduce-scatter, and after an all-gather.
        devices: the number of devices.

    Returns:
        Bytes.

    Raises:
        InvalidArgumentTypeError: (a ValueError too) an unknown kind.

    Example:
        >>> import pax_export as pax
        >>> pax.sharding.sent_bytes("all-reduce", 1000, devices=8)
        1750.0
    """
    if kind not in _SENT:
        raise InvalidArgumentTypeError(
            "The collective is unknown.", got=repr(kind), write=" or ".join(_SENT)
        )
    return _SENT[kind](devices) * size if devices > 1 else 0.0


@dataclass(frozen=True)
class Collective:
    """An instruction of a compiled program by which devices exchange arrays.

    Attributes:
        kind: ``"all-reduce"``, ``"all-gather"``, ...
        arrays: the arrays on one device, such as ``("bf16[8192,1024]",)``; of an all-gather the
            results; of a reduce-scatter the operands are larger, see `size`.
        size: the bytes of the whole arrays, as `sent_bytes` counts them.
        group: the devices that exchange them, by their index in the mesh; all groups have the same
            size.
        times: the number of executions per call.
        times_known: False if it is in a loop of unknown length; `times` counts one iteration of
            that.
        source: jax's name of the operation that needs it.

    Example:
        >>> import pax_export as pax
        >>> each = pax.sharding.Collective("all-reduce", ("f32[250]",), 1000, (0, 2), times=3)
        >>> each.sent
        3000.0
        >>> each.axes(pax.sharding.abstract_mesh(data=2, model=2))
        ('data',)
    """

    kind: str
    arrays: tuple[str, ...]
    size: int
    group: tuple[int, ...]
    times: int = 1
    times_known: bool = True
    source: str = ""

    @property
    def sent(self) -> float:
        """The bytes that one device sends in one call, if in rings."""
        return self.times * sent_bytes(self.kind, self.size, len(self.group))

    def axes(self, mesh: AnyMesh) -> tuple[str, ...]:
        """The axes of the mesh along which devices exchange.

        Args:
            mesh: the mesh for which the program was compiled.
        """
        places = np.unravel_index(self.group, tuple(mesh.shape.values()))
        return tuple([name for name, at in zip(mesh.shape, places) if len(set(at.tolist())) > 1])


def collectives(compiled: jax.stages.Compiled | str) -> tuple[Collective, ...]:
    """Returns the collectives of a compiled program.

    Args:
        compiled: the result of ``jax.jit(f).lower(...).compile()``, or its text.

    Returns:
        The instructions by which devices exchange arrays, with their numbers of executions. All
        branches of a conditional are counted.

    Raises:
        InvalidArgumentTypeError: (a TypeError) neither.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> spec = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> program = jax.jit(jnp.dot).lower(spec, spec).compile()  # on one device
        >>> pax.sharding.collectives(program)
        ()
    """
    text = compiled if isinstance(compiled, str) else getattr(compiled, "as_text", lambda: None)()
    if not isinstance(text, str) or "HloModule" not in text:
        raise InvalidArgumentTypeError(
            "Expected a compiled program.",
            got=f"{type(compiled).__name__}: {compiled!r}"[:120],
            write="jax.jit(step).lower(...).compile(); the result of lower(...) has no devices",
        )
    program = _HloProgram.read(text)
    found = [
        _read_collective(line, program.devices, times, known)
        for computation, (times, known) in program.times().items()
        for line in program.computations[computation]
    ]
    return tuple([each for each in found if each is not None])


# --- computations, and how often each runs ------------------------------------------------

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"\b(?:body|to_apply|calls|called_computation|\w+_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_WHILE = re.compile(r" while\(.*\bcondition=%?([\w.\-]+)")
_CONTINUED = re.compile(r" async-(?:update|done)\(")  # refer to the computation of async-start
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BOUND = re.compile(r"= [su]\d+\[\]\S* constant\((\d+)\)")


@dataclass
class _HloProgram:
    """The computations of a program, by name, each a list of instructions."""

    entry: str = ""
    devices: int = 1
    computations: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> _HloProgram:
        program, lines = cls(), []
        for line in text.splitlines():
            header = _HEADER.match(line)
            if line.startswith("HloModule"):
                counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", line)
                program.devices = math.prod(map(int, counts))
            elif header is not None:
                lines = program.computations[header["name"]] = []
                program.entry = header["name"] if header["entry"] else program.entry
            else:
                lines.append(line)
        return program

    def times(self) -> dict[str, tuple[int, bool]]:
        """Returns the number of executions of each computation, and whether it is exact."""
        found: dict[str, tuple[int, bool]] = {}

        def visit(name: str, times: int, known: bool) -> None:
            before, surely = found.get(name, (0, True))
            found[name] = before + times, surely and known
            for line in self.computations.get(name, ()):
                for called, rounds in self._called_computations(line):
                    visit(called, times * (rounds or 1), known and rounds is not None)

        visit(self.entry, 1, True)
        return {name: each for name, each in found.items() if name in self.computations}

    def _called_computations(self, line: str) -> Iterator[tuple[str, int | None]]:
        """Yields the computations that an instruction runs, with counts; None: unknown."""
        if _CONTINUED.search(line):
            return
        loop = _WHILE.search(line)
        body = _BODY.search(line)
        if loop is not None and body is not None:
            yield body[1], self._loop_rounds(line, loop[1])
            return
        for name in _CALLED.findall(line):
            yield name, 1
        for names in _BRANCHES.findall(line):
            yield from ((name.strip().lstrip("%"), 1) for name in names.split(","))

    def _loop_rounds(self, line: str, condition: str) -> int | None:
        """Returns the number of iterations of a loop: annotated, or compared with its counter."""
        known = _TRIPS.search(line)
        if known is not None:
            return int(known[1])
        tests = self.computations.get(condition, ())
        bounds = [found[1] for test in tests if (found := _BOUND.search(test))]
        counts_up = any("direction=LT" in test for test in tests)
        return int(bounds[0]) if len(bounds) == 1 and counts_up else None


# --- one instruction ----------------------------------------------------------------------

_EXCHANGE = re.compile(
    rf"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<types>.*?) (?P<kind>{'|'.join(_SENT)})(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_SOURCE = re.compile(r'op_name="([^"]*)"')


def _read_collective(line: str, devices: int, times: int, known: bool) -> Collective | None:
    """Parses a collective; None for other instructions."""
    found = _EXCHANGE.match(line)
    if found is None:
        return None
    group = _read_group(line, devices)
    if len(group) < 2:
        return None
    arrays = _ARRAY.findall(found["types"])
    if found["start"] and found["kind"] == "collective-permute":
        arrays = arrays[1:2]  # operand, result, and two counters
    elif found["start"] and found["kind"] != "all-reduce":
        arrays = arrays[len(arrays) // 2 :]  # operands, then results
    size = sum([_item_size(dtype) * math.prod(_read_numbers(sizes)) for dtype, sizes in arrays])
    if found["kind"] == "reduce-scatter":  # the text has the result
        size *= len(group)
    names = tuple([f"{dtype}[{sizes}]" for dtype, sizes in arrays])
    source = _SOURCE.search(line)
    return Collective(
        found["kind"], names, math.ceil(size), group, times, known, source[1] if source else ""
    )


def _item_size(dtype: str) -> float:
    """Bytes of a number: f32, bf16, s4, f8e4m3fn, pred, c64."""
    if dtype == "pred":
        return 1
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 0  # a token has none


# --- groups of devices --------------------------------------------------------------------

_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=(?:@?mesh)\[([^\]]*)\](?:, device_ids=\S+)? \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")


def _read_group(line: str, devices: int) -> tuple[int, ...]:
    """The first group of devices of an exchange; all devices if the text has none."""
    if found := _PAIRS.search(line):
        pairs = [pair.split(",") for pair in re.findall(r"\{([\d,]+)\}", found[0])]
        return next(((int(a), int(b)) for a, b in pairs if a != b), ())
    if found := _LISTED.search(line):
        return _read_numbers(found[1])
    if found := _IOTA.search(line):
        sizes = _read_numbers(found[2])
        grid = np.arange(math.prod(sizes)).reshape(sizes)
        if found[3]:
            grid = grid.transpose(_read_numbers(found[3]))
        return tuple(grid.reshape(_read_numbers(found[1]))[0].tolist())
    if found := _MESH.search(line):
        return _group_of_mesh(found[1], found[2])
    return tuple(range(devices))


def _read_numbers(text: str) -> tuple[int, ...]:
    return tuple([int(number) for number in text.split(",") if number])


def _group_of_mesh(mesh: str, along: str) -> tuple[int, ...]:
    """The first group of ``mesh['a'=8,'b'=4] {'a','b':(1)2}``: along a, and a part of b."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    strides, stride = {}, math.prod(sizes.values())
    for name, size in sizes.items():
        stride //= size
        strides[name] = stride
    group = np.zeros(1, int)
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", along):
        count = int(part) if part else sizes[name]
        step = strides[name] * (sizes[name] // (int(before) * count) if part else 1)
        group = (group[:, None] + step * np.arange(count)).reshape(-1)
    return tuple(group.tolist())


# --- the cost of a call -----------------------------------------------------------------


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
