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


def slopes(file: str, cases: Iterable[Mapping[str, Any]]) -> list[dict[str, np.ndarray]]:
    """Slopes of the weighed outputs of each case, by the names of parameters and float inputs."""
    module = torch.export.load(file).module()
    weights = {name: each for name, each in module.named_parameters() if each.requires_grad}
    return [_slopes(module, weights, case["inputs"]) for case in cases]


def _slopes(
    module: Any, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    tensors = {name: _tensor(array) for name, array in inputs.items()}
    floats = {n: x.requires_grad_() for n, x in tensors.items() if x.is_floating_point()}
    loss = torch.zeros(())
    for leaf in pytree.tree_leaves(module(*tensors.values())):
        if leaf.is_floating_point() and leaf.requires_grad:
            weight = np.cos(np.arange(leaf.numel())).astype(np.float32).reshape(leaf.shape)
            loss = loss + (leaf.float() * torch.from_numpy(weight)).sum()
    sources = {**weights, **floats}
    found: Any = [None] * len(sources)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(sources.values()), allow_unused=True)
    return {
        name: _array(torch.zeros_like(x) if slope is None else slope)
        for (name, x), slope in zip(sources.items(), found)
    }


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
