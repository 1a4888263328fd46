"""Rules for sizes that nobody knows yet, where jax has none."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend.source_info_util import register_exclusion

from pax_export._jax import _convolutions, _counted, _fourier, _scans
from pax_export._jax._convolutions import convolution_rules
from pax_export._jax._counted import counted_functions
from pax_export._jax._derivatives import derivative_rules
from pax_export._jax._exchange import exchange
from pax_export._jax._fourier import SymbolicIndex, fourier_rule, fourier_transpose
from pax_export._jax._platforms import lowering_rules
from pax_export._jax._scans import associative_scan, scan_rule

for _file in (_convolutions, _counted, _fourier, _scans):
    register_exclusion(str(_file.__file__))  # these are no lines of a user


def symbolic_rules() -> AbstractContextManager[None]:
    """Lets jax trace, differentiate and lower in its block what it does for numbers only.

    These are convolutions whose strides meet symbolic sizes or with a kernel for each example of
    a batch; Fourier transforms and scans along symbolic sizes; functions of `jax.numpy` that ask
    for a size as a number; and derivatives of what looks at sizes.  Everything else goes its
    way, and the rules go with the block.
    """
    return _exchanged()


def _rules() -> Iterator[tuple[MutableMapping, Any, Any]]:
    from jax.interpreters import ad

    yield from convolution_rules()
    yield from derivative_rules()
    yield from counted_functions()
    fft = jax.lax.fft_p
    transposes: Any = ad.primitive_transposes
    if fft in transposes:
        yield transposes, fft, fourier_transpose(transposes[fft])
    name, scan = "associative_scan", associative_scan(jax.lax.associative_scan)
    names: Any = vars(jax.lax)
    yield names, name, scan
    home = inspect.unwrap(jax.lax.associative_scan).__globals__
    if name in home:  # where jax's gradients of cumulative products find it
        yield home, name, scan
    home = inspect.unwrap(jax.numpy.fft.irfft).__globals__
    if "operator" in home:
        yield home, "operator", SymbolicIndex()
    for table in lowering_rules():
        if fft in table:
            yield table, fft, _replaced(table[fft], fourier_rule)
        if jax.lax.scan_p in table:
            yield table, jax.lax.scan_p, _replaced(table[jax.lax.scan_p], scan_rule)


_exchanged = exchange(_rules)


def _replaced(entry: Any, change: Callable[[Callable], Callable]) -> Any:
    return dataclasses.replace(entry, rule=change(entry.rule))
