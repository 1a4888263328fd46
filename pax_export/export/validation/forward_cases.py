"""Calls of one program with what jax says of them, for targets that compute outputs only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pax_export.export.lowering.variables import Store
from pax_export.export.tracing.programs import Program
from pax_export.export.validation import validate


def cases(program: Program, store: Store) -> list[validate.Case]:
    """Random calls at several sizes."""
    return list(_cases(program, store))


def _cases(program: Program, store: Store) -> Iterator[validate.Case]:
    leaves = [store.variables[place].value for place in store.of_leaf]

    def expected(inputs: dict[str, np.ndarray], _: Any) -> dict[str, np.ndarray]:
        results = program.traced.run([*leaves, *inputs.values()])
        return dict(zip(program.output_names, map(np.asarray, results)))

    structs = {entry.name: entry.struct for entry in program.inputs.flat}
    yield from validate.cases(program.key, structs, program.inputs.dimensions, expected)
