"""Operations whose results differ between runtimes and jax, for reports and the guide.

``python -m tests.export.sweep_differences`` measures them and writes the rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

#: Omitted from reports, because it affects most operations, and hardly any model.
SIGNS, TINY = "at -0", "subnormal"
#: Differences that exact exports do not have.
_UNLESS_EXACT = "inexact"


@dataclass(frozen=True)
class KnownDifference:
    """Operands for which a runtime's operation differs, by the name of the primitive."""

    runtime: str
    operation: str
    where: str  # "above 88.4"
    example: str  # "exp(88.5) = inf, in jax 2.72e+38"
    exact: bool = True  # whether exports with exact=True differ, too

    @property
    def line(self) -> str:
        """The row as text, which `_parse_row` reads."""
        columns = (self.runtime, self.operation, self.where, self.example)
        return " | ".join((*columns, *(() if self.exact else (_UNLESS_EXACT,))))


def _parse_row(line: str) -> KnownDifference:
    runtime, operation, where, example, *more = line.split(" | ")
    return KnownDifference(runtime, operation, where, example, not more)


# The sweep writes this text.
_ROWS = """\
LiteRT | cbrt | subnormal | cbrt(1e-39) = 1e-13, in jax -5.6e-16
LiteRT | cos | beyond ±1.37e+07 | cos(-2.99e+23) = nan, in jax 0.998
LiteRT | exp | above 88.4 | exp(88.5) = inf, in jax 2.72e+38
LiteRT | lgamma | subnormal | lgamma(1e-39) = inf, in jax 89.8
LiteRT | log | above 2.41e+38 | log(2.96e+38) = inf, in jax 88.6
LiteRT | log1p | above 2.41e+38 | log1p(2.96e+38) = inf, in jax 88.6
LiteRT | logistic | beyond ±4.29e+26 | logistic(-1.13e+33) = nan, in jax 0
LiteRT | rsqrt | above 8.51e+37 | rsqrt(1.7e+38) = 1.15e-19, in jax 7.67e-20
LiteRT | rsqrt | subnormal | rsqrt(1e-39) = nan, in jax inf
LiteRT | rsqrt | at -0 | rsqrt(-0) = inf, in jax -inf
LiteRT | sign | subnormal | sign(1e-39) = 1, in jax 0
LiteRT | sin | beyond ±5.43e+06 | sin(4.33e+23) = nan, in jax 0.432
LiteRT | sin | at -0 | sin(-0) = 0, in jax -0
LiteRT | sqrt | above 8.51e+37 | sqrt(1.78e+38) = 2e+19, in jax 1.33e+19
LiteRT | tan | beyond ±5.43e+06 | tan(-2.17e+23) = nan, in jax 0.812
LiteRT | tan | at -0 | tan(-0) = 0, in jax -0
LiteRT | atan2 | subnormal | atan2(-1e-39, -1e-39) = -2.36, in jax nan
LiteRT | eq | subnormal | eq(-1e-42, 1.4e-45) = 0, in jax 1
LiteRT | ge | subnormal | ge(-1e-42, -0) = 0, in jax 1
LiteRT | gt | subnormal | gt(-1e-42, -1e-39) = 1, in jax 0
LiteRT | le | subnormal | le(-1e-42, -1e-39) = 0, in jax 1
LiteRT | lt | subnormal | lt(-1e-42, -0) = 1, in jax 0
LiteRT | max | at -0 | max(-0, 0) = -0, in jax 0
LiteRT | min | at -0 | min(0, -0) = 0, in jax -0
LiteRT | ne | subnormal | ne(-1e-42, 1.4e-45) = 1, in jax 0
LiteRT | pow | subnormal | pow(1e-39, 0.5) = 3.16e-20, in jax 2.65e-23
LiteRT | rem | subnormal | rem(-0.5, -1e-42) = -0, in jax nan
LiteRT | rem | at -0 | rem(-0, 1e+03) = 0, in jax -0
LiteRT | clip | at -0 | clip(-0) = -0, in jax 0
LiteRT | silu | beyond ±4.29e+26 | silu(-1.13e+33) = nan, in jax -0
LiteRT | gelu | below -3.56 | gelu(-7.5) = -0, in jax -2.39e-13 | inexact
LiteRT | reduce_window_max | at NaN | reduce_window_max(nan) = -inf, in jax nan | inexact
LiteRT | reduce_window_max (NCHW) | at NaN | reduce_window_max(nan) = -inf, in jax nan | inexact
LiteRT | convert_element_type to bool | subnormal | convert_element_type(1e-39) = 1, in jax 0
onnxruntime | bessel_i1e | at -0 | bessel_i1e(-0) = 0, in jax -0
onnxruntime | cbrt | subnormal | cbrt(1e-39) = 1e-13, in jax -5.6e-16
onnxruntime | cbrt | at -0 | cbrt(-0) = 0, in jax -0
onnxruntime | ceil | subnormal | ceil(1e-39) = 1, in jax 0
onnxruntime | digamma | subnormal | digamma(-1e-39) = inf, in jax -inf
onnxruntime | expm1 | at -0 | expm1(-0) = 0, in jax -0
onnxruntime | floor | subnormal | floor(-1e-39) = -1, in jax -0
onnxruntime | lgamma | subnormal | lgamma(1.4e-45) = 103.3251, in jax 103.2789
onnxruntime | log | subnormal | log(1e-39) = -89.8, in jax -inf
onnxruntime | log1p | at -0 | log1p(-0) = 0, in jax -0
onnxruntime | logistic | below -7.83 | logistic(-42) = 0, in jax 5.75e-19 | inexact
onnxruntime | round | at -0 | round(-0) = 0, in jax -0
onnxruntime | rsqrt | subnormal | rsqrt(1e-39) = 3.16e+19, in jax inf
onnxruntime | sign | subnormal | sign(1e-39) = 1, in jax 0
onnxruntime | sign | at -0 | sign(-0) = 0, in jax -0
onnxruntime | sqrt | subnormal | sqrt(1e-39) = 3.16e-20, in jax 0
onnxruntime | atan2 | subnormal | atan2(-1e-39, -1e-39) = -2.36, in jax nan
onnxruntime | div | subnormal | div(-1e-39, -1.4e-45) = 7.14e+05, in jax nan
onnxruntime | eq | subnormal | eq(-1e-42, 1.4e-45) = 0, in jax 1
onnxruntime | ge | subnormal | ge(-1e-42, -0) = 0, in jax 1
onnxruntime | gt | subnormal | gt(-1e-42, -1e-39) = 1, in jax 0
onnxruntime | le | subnormal | le(-1e-42, -1e-39) = 0, in jax 1
onnxruntime | lt | subnormal | lt(-1e-42, -0) = 1, in jax 0
onnxruntime | max | at -0 | max(0, -0) = -0, in jax 0
onnxruntime | min | at -0 | min(-0, 0) = 0, in jax -0
onnxruntime | mul | subnormal | mul(-1.1e-38, -1e+10) = 1.1e-28, in jax 0
onnxruntime | ne | subnormal | ne(-1e-42, 1.4e-45) = 1, in jax 0
onnxruntime | nextafter | at -0 | nextafter(0, -0) = 0, in jax -0
onnxruntime | pow | subnormal | pow(1e-39, 0.5) = 3.16e-20, in jax 2.65e-23
onnxruntime | rem | subnormal | rem(-0.5, -1e-42) = -2.24e-44, in jax nan
onnxruntime | clip | at -0 | clip(-0) = -0, in jax 0
onnxruntime | silu | below -7.83 | silu(-44) = -0, in jax -3.42e-18 | inexact
onnxruntime | gelu | below -3.91 | gelu(-7.82) = -0, in jax -2.06e-14 | inexact
onnxruntime | select_n | at -0 | select_n(-0) = 0, in jax -0
onnxruntime | reduce_window_max (NCHW) | at NaN | reduce_window_max(nan) = 1, in jax nan | inexact
onnxruntime | convert_element_type to bool | subnormal | convert_element_type(1e-39) = 1, in jax 0
"""

DIFFERENCES = tuple(_parse_row(line) for line in _ROWS.strip().splitlines())


def known_differences(
    runtime: str, operations: Collection[str], exact: bool = False
) -> tuple[str, ...]:
    """Returns the known differences of a runtime for the operations of a program."""
    found = {
        (name, each.where): f"{name} {each.where}: {each.example}"
        for each in DIFFERENCES
        for name in each.operation.split(" ")[:1]
        if each.runtime == runtime
        and name in operations
        and each.where not in (SIGNS, TINY)
        and (each.exact or not exact)
    }
    return tuple(found.values())
