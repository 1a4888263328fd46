"""Runs a program of torch with torch and numpy only: a process without jax loads this file."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

_BITS = {1: torch.uint8, 2: torch.int16}


def run(file: str, cases: Iterable[Mapping[str, Any]]) -> list[dict[str, np.ndarray]]:
    """Outputs of each case by number, in torch's order, of inputs in the order of the program."""
    module = torch.export.load(file).module()
    with torch.no_grad():
        return [
            {str(at): _array(y) for at, y in enumerate(pytree.tree_leaves(module(*arguments)))}
            for case in cases
            for arguments in [map(_tensor, case["inputs"].values())]
        ]


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array.copy())
    bits = array.view(f"int{8 * array.dtype.itemsize}")
    return torch.from_numpy(bits.copy()).view(getattr(torch, array.dtype.name))


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if hasattr(np, name):
        return tensor.resolve_conj().numpy()
    kind = getattr(importlib.import_module("ml_dtypes"), name)
    return tensor.view(_BITS[tensor.element_size()]).numpy().view(kind)
