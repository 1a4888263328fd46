"""Rules for sizes that nobody knows yet, where jax has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend.source_info_util import register_exclusion

from pax_export._jax import _convolutions, _fourier, _scans
from pax_export._jax._convolutions import convolution_rules
from pax_export._jax._derivatives import derivative_rules
from pax_export._jax._exchange import exchange
from pax_export._jax._fourier import fourier_rule, fourier_transpose
from pax_export._jax._platforms import lowering_rules
from pax_export._jax._scans import scan_rule

for _file in (_convolutions, _fourier, _scans):
    register_exclusion(str(_file.__file__))  # these are no lines of a user


def symbolic_rules() -> AbstractContextManager[None]:
    """Lets jax trace, differentiate and lower in its block what it does for numbers only.

    These are convolutions whose strides meet symbolic sizes or with a kernel for each example of
    a batch; Fourier transforms and scans along symbolic sizes; and derivatives of what looks at
    sizes.  The namespaces `jax.numpy`, `jax.lax` and `jax.nn` stay as they are: their functions
    that ask for a size as a number have counterparts in `export.symbolic_numpy`.
    """
    return _exchanged()


def _rules() -> Iterator[tuple[MutableMapping, Any, Any]]:
    from jax.interpreters import ad

    yield from convolution_rules()
    yield from derivative_rules()
    fft = jax.lax.fft_p
    transposes: Any = ad.primitive_transposes
    if fft in transposes:
        yield transposes, fft, fourier_transpose(transposes[fft])
    for table in lowering_rules():
        if fft in table:
            yield table, fft, _replaced(table[fft], fourier_rule)
        if jax.lax.scan_p in table:
            yield table, jax.lax.scan_p, _replaced(table[jax.lax.scan_p], scan_rule)


_exchanged = exchange(_rules)


def _replaced(entry: Any, change: Callable[[Callable], Callable]) -> Any:
    return dataclasses.replace(entry, rule=change(entry.rule))
