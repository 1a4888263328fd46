"""Unique names of outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pax_export.export.tracing.programs import Program


def with_names_of_their_own(program: Program) -> Program:
    """Renames outputs that have the name of an input.

    The structure of the results does not change, so `load` returns the names of the model.
    """
    inputs = {entry.name for entry in program.inputs.flat}
    taken = {*inputs, *program.output_names}
    new = {}
    for name in program.output_names:
        new[name] = _free(name, taken) if name in inputs else name
        taken.add(new[name])
    return dataclasses.replace(
        program,
        output_names=tuple(new[name] for name in program.output_names),
        output_structure=_renamed(program.output_structure, new),
    )


def _free(name: str, taken: set[str]) -> str:
    free, number = f"{name}_output", 1
    while free in taken:
        number += 1
        free = f"{name}_output_{number}"
    return free


def _renamed(structure: Mapping[str, Any], new: Mapping[str, str]) -> dict[str, Any]:
    """A description of a structure, see `describe`, with other names of its leaves."""
    ((kind, held),) = structure.items()
    if kind == "leaf":
        return {kind: new[held]}
    if kind == "dict":
        return {kind: [[key, _renamed(child, new)] for key, child in held]}
    if kind in ("list", "tuple"):
        return {kind: [_renamed(child, new) for child in held]}
    return dict(structure)
