"""Where LiteRT's kernels differ from jax: for arguments far from those that nets have.

Measured with LiteRT 2.3 on x86 with AVX-512, where XNNPACK computes; the kernels of other
processors differ less or elsewhere.  A guard around each would slow down every model, so the
report names them instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: What becomes of an operation from which argument on, by TensorFlow's operation in the graph.
KNOWN_DIFFERENCES = {
    "Exp": "exp is infinite from 88.376 on (in jax from 88.723)",
    "Log": "log is infinite from 2.4e38 on",
    "Sigmoid": "logistic is NaN beyond ±4e26",
    "Sin": "sin is off by 2e-5 at 1e7, beyond ±1 from 2e8 on",
    "Cos": "cos is off by 2e-5 at 1e7, beyond ±1 from 2e8 on",
    "Sqrt": "sqrt is 1.5 times as large from 8.5e37 on",
    "Rsqrt": "rsqrt is 1.5 times as large from 8.5e37 on",
}


def differences(functions: Mapping[str, Any]) -> tuple[str, ...]:
    """What is known of the operations of TensorFlow functions, the bodies of loops among them."""
    used: set[str] = set()
    for function in functions.values():
        graph = function.graph.as_graph_def()
        for nodes in (graph.node, *(each.node_def for each in graph.library.function)):
            used.update(_operations(nodes))
    return tuple(text for name, text in KNOWN_DIFFERENCES.items() if name in used)


def _operations(nodes: Iterable[Any]) -> set[str]:
    return {node.op for node in nodes}
