"""Where onnxruntime's kernels of operators differ from jax, unless an export is `exact`."""

from __future__ import annotations

from collections.abc import Collection

_DIFFERENCES = {
    "MaxPool": "NaN among other numbers may be passed over",
    "Gelu": "about -1e-20 and nearer to 0 is 0",
    "Sigmoid": "at least 1e-8",
}


def differences(operators: Collection[str]) -> tuple[str, ...]:
    """What is to be known of the operators in a file."""
    return tuple(f"{name}: {text}" for name, text in _DIFFERENCES.items() if name in operators)
