"""Runs a program of torch with torch and numpy only: a process without jax loads this file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def program_slopes(
    file: str, names: Sequence[str]
) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """A function of a call to slopes of its weighed outputs: of named parameters, then inputs."""
    module = torch.export.load(file).module()
    weights = [dict(module.named_parameters())[name] for name in names]

    def slopes(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        tensors = list(map(_tensor, inputs))
        sources = [*weights, *(x.requires_grad_() for x in tensors if x.is_floating_point())]
        loss = torch.zeros(())
        for leaf in pytree.tree_leaves(module(*tensors)):
            if leaf.requires_grad:
                weight = np.cos(np.arange(leaf.numel())).astype(np.float32).reshape(leaf.shape)
                loss = loss + (leaf.float() * torch.from_numpy(weight)).sum()
        found: Any = [None] * len(sources)
        if loss.requires_grad:
            found = torch.autograd.grad(loss, sources, allow_unused=True)
        return [
            _array(torch.zeros_like(x) if slope is None else slope)
            for x, slope in zip(sources, found)
        ]

    return slopes


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
