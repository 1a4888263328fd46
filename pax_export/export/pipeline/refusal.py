"""Finds the module of a refused operation, by exporting once more with labeled modules."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pax_export._errors import PaxError
from pax_export.core import Module, label_modules, named_modules, traced_anew
from pax_export.export.pipeline.export_run import scratch_place
from pax_export.export.pipeline.format_exporter import FormatExporter, Request
from pax_export.export.tracing.owners import owner_of
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.source_lines import (
    Chain,
    join_places,
    module_path,
    operations,
    source_text,
)


def with_paths(model: object) -> tuple[Any, dict[str, str]]:
    """Returns a model whose modules record their paths in traces, and their classes by path."""
    if not isinstance(model, Module):
        return model, {}
    kinds = {path: type(each).__name__ for path, each in named_modules(model)}
    return label_modules(model), kinds


def name_modules(error: PaxError, exporter: FormatExporter, request: Request) -> None:
    """Adds to an error about operations their modules."""
    chains = operations(error)
    if not chains:
        return
    # It only improves a message: a failure here must not hide the error.
    with contextlib.suppress(Exception):
        net, kinds = with_paths(request.model)
        if kinds:
            labeled = dataclasses.replace(request, model=net)
            chains = _refused_again(error, exporter, labeled) or chains
        named = [(_module_text(chain, kinds), chain) for chain in chains]
        if not any(name for name, _ in named):
            programs = exporter.trace(request)[1]
            named = [(_owner_text(chain, programs), chain) for chain in chains]
        error.where = join_places(
            ", ".join(filter(None, (n, source_text(chain)))) for n, chain in named
        )


def _refused_again(
    error: PaxError, exporter: FormatExporter, request: Request
) -> tuple[Chain, ...]:
    """Returns the operations of the error of another export, if it is the same error."""
    try:
        with traced_anew(), scratch_place(exporter.format) as place:
            exporter.lower(*exporter.trace(request), request).write(place)
    except PaxError as other:
        if other.what == error.what:
            return operations(other)
    return ()


def _module_text(chain: Chain, kinds: Mapping[str, str]) -> str:
    """Formats ``encoder.pool: Pool``; or another library's names of its modules."""
    path = module_path(chain)
    return ": ".join(filter(None, (path, kinds.get(path, ""))))


def _owner_text(chain: Chain, programs: Sequence[Program]) -> str:
    return next(filter(None, (owner_of(each.traced, chain) for each in programs)), "")
