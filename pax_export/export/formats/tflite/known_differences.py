"""Where LiteRT's kernels differ from jax: for arguments far from those that nets have.

Measured with LiteRT 2.3 on x86 with AVX-512, where XNNPACK computes; the kernels of other
processors differ less or elsewhere.  A guard around each would slow down every model, so the
report names them instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from pax_export.export.formats.tflite.builder.encode import graphs_of
from pax_export.export.formats.tflite.builder.graph import Graph

#: What becomes of an operation from which argument on, by operator.
KNOWN_DIFFERENCES = {
    "EXP": "exp is infinite from 88.376 on (in jax from 88.723)",
    "LOG": "log is infinite from 2.4e38 on",
    "LOGISTIC": "logistic is NaN beyond ±4e26",
    "SIN": "sin is off by 2e-5 at 1e7, beyond ±1 from 2e8 on",
    "COS": "cos is off by 2e-5 at 1e7, beyond ±1 from 2e8 on",
    "SQRT": "sqrt is 1.5 times as large from 8.5e37 on",
    "MAX_POOL_2D": "max over windows leaves NaN out",
    "RSQRT": "rsqrt is 1.5 times as large from 8.5e37 on",
}


def differences(graphs: Iterable[Graph]) -> tuple[str, ...]:
    """What is known of the operators of graphs, those of the bodies of loops among them."""
    used = {operator.name for graph in graphs_of(graphs) for operator in graph.operators}
    return tuple(text for name, text in KNOWN_DIFFERENCES.items() if name in used)
