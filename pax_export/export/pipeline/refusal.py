"""Finds the module of a refused operation, by exporting once more with labelled modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pax_export._errors import PaxError
from pax_export._files import stale_temporaries
from pax_export.core import Module, label_modules, named_modules, traced_anew
from pax_export.export.artifact.formats import Format
from pax_export.export.tracing.owners import owner_of
from pax_export.export.tracing.programs import Program
from pax_export.export.tracing.source_lines import (
    Chain,
    join_places,
    module_path,
    operations,
    source_text,
)


@contextlib.contextmanager
def scratch_place(format: Format) -> Iterator[Path]:
    """A place that a part of a model is written to, for a look at it."""
    with stale_temporaries.scratch() as folder:
        place = folder / f"part{format.suffix}"
        if not format.suffix:
            place.mkdir()
        yield place


def with_paths(model: object) -> tuple[Any, dict[str, str]]:
    """Returns a model whose modules record their paths in traces, and their classes by path."""
    if not isinstance(model, Module):
        return model, {}
    kinds = {path: type(each).__name__ for path, each in named_modules(model)}
    return label_modules(model), kinds


def name_modules(
    error: PaxError,
    model: object,
    again: Callable[[Any], object],
    programs: Callable[[], Sequence[Program]],
) -> None:
    """Adds to an error about operations their modules; `again` repeats the export."""
    net, kinds = with_paths(model)
    chains = operations(error)
    if not chains:
        return
    # It only improves a message: a failure here must not hide the error.
    with contextlib.suppress(Exception):
        if kinds:
            chains = _of_refusal(lambda: again(net), error) or chains
        named = [(_module_text(chain, kinds), chain) for chain in chains]
        if not any(name for name, _ in named):
            named = [(_owner_text(chain, programs()), chain) for chain in chains]
        error.where = join_places(
            ", ".join(filter(None, (n, source_text(chain)))) for n, chain in named
        )


def _of_refusal(attempt: Callable[[], object], error: PaxError) -> tuple[Chain, ...]:
    """Returns the operations of the error of an attempt, if it is the same error."""
    try:
        with traced_anew():
            attempt()
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
