"""Factorizations by TensorFlow's kernels.

`Cholesky`, `Lu`, `MatrixTriangularSolve` and `SelfAdjointEigV2` fail for matrices of which jax
returns NaN or infinity, and with them all matrices of a batch: those are decomposed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pax_export.export.formats.saved_model.operations.graph import NodeBuilder, Output, rule
from pax_export.export.portable.sizes import is_number


def _has_kernel(equation: Any) -> bool:
    x = equation.invars[0].aval
    real = x.dtype in (np.float32, np.float64)
    return real and not equation.params["pivoting"] and all(map(is_number, x.shape[-2:]))


@rule("qr", when=_has_kernel)
def qr(builder: NodeBuilder, x: Output, *, full_matrices: bool, **_: object) -> list[Output]:
    return builder("Qr", x, full_matrices=bool(full_matrices))
