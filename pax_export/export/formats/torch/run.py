"""Runs an exported program with torch and numpy only.

A fresh process that can import neither jax nor this package loads this file by its path.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# torch is not among the packages of the tests.
from __future__ import annotations

import importlib
import json
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

Arrays = dict[str, np.ndarray]
#: An entry of the archive: how the arguments and outputs of each method are nested, with names.
METHODS = "pax_export_methods.json"


def from_numpy(array: ArrayLike) -> Any:
    """A tensor of an array, also of dtypes that numpy itself lacks."""
    torch = importlib.import_module("torch")
    copied = np.array(array, order="C", copy=True)
    if copied.dtype.kind in "biufc" and copied.dtype.isbuiltin == 1:
        return torch.from_numpy(copied)
    name, bits = copied.dtype.name, np.dtype(f"uint{8 * copied.dtype.itemsize}")
    if name in ("int4", "uint4", "int2", "uint2"):
        return torch.from_numpy(copied.astype(np.int8))
    whole = torch.from_numpy(copied.reshape(-1).view(bits).astype(f"int{8 * bits.itemsize}"))
    return whole.view(getattr(torch, name)).reshape(copied.shape)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The array of a tensor."""
    torch = importlib.import_module("torch")
    tensor = tensor.detach().cpu().contiguous().resolve_neg().resolve_conj()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        kind = getattr(importlib.import_module("ml_dtypes"), name)
        bits = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return tensor.view(bits).numpy().view(kind)
    return tensor.numpy()


def load(file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The exported programs of a file by signature, and how their arguments are nested."""
    archive = archives().load_pt2(file)
    methods = json.loads(archive.extra_files[METHODS])
    programs = {key: archive.exported_programs[each["program"]] for key, each in methods.items()}
    return programs, methods


def archives() -> Any:
    """The module of torch that writes and reads several programs in one file; it is not public."""
    return importlib.import_module("torch.export.pt2_archive._package")


def call(
    method: torch.nn.Module | Callable[..., Any],
    signature: Mapping[str, Any],
    inputs: Arrays,
    cotangents: Arrays | None = None,
    module: torch.nn.Module | None = None,
) -> Arrays:
    """Calls a method of named arrays; with cotangents, gradients are among the results.

    They are those of inputs and of the parameters of `module`, or of the method if it is a module.
    """
    torch = importlib.import_module("torch")
    tensors = {name: from_numpy(value) for name, value in inputs.items()}
    floating = {name: each for name, each in tensors.items() if each.is_floating_point()}
    for each in floating.values() if cotangents else ():
        each.requires_grad_(True)
    arguments = [rebuild(tree, tensors.__getitem__) for tree in signature["arguments"].values()]
    with torch.set_grad_enabled(bool(cotangents)):
        outputs = collect(signature["result"], method(*arguments))
    results = {name: to_numpy(value) for name, value in outputs.items()}
    if not cotangents:
        return results
    owner: Any = module or method
    named = owner.named_parameters()
    weights = {name: each for name, each in named if each.requires_grad}
    sources = {**floating, **weights}
    targets = {name: outputs[name] for name in cotangents if outputs[name].requires_grad}
    found: Any = [None] * len(sources)
    if targets and sources:
        grad_outputs = [from_numpy(cotangents[name]) for name in targets]
        found = torch.autograd.grad(
            list(targets.values()), list(sources.values()), grad_outputs, allow_unused=True
        )
    for (name, source), value in zip(sources.items(), found):
        gradient = torch.zeros_like(source) if value is None else value
        results[f"gradient:{name}"] = to_numpy(gradient)
    return results


def run(file: str, cases: Iterable[Mapping[str, Any]]) -> list[Arrays]:
    programs, methods = load(file)
    modules = {key: program.module() for key, program in programs.items()}
    return run_methods(modules, methods, cases)


def run_methods(
    methods: Mapping[str, Any],
    signatures: Mapping[str, Any],
    cases: Iterable[Mapping[str, Any]],
    module: torch.nn.Module | None = None,
) -> list[Arrays]:
    """Makes calls of methods: modules, or functions of one module."""
    keys = ((each["signature"], each) for each in cases)
    return [_try(methods[key], signatures[key], case, module) for key, case in keys]


def _try(
    method: torch.nn.Module | Callable[..., Any],
    signature: Mapping[str, Any],
    case: Mapping[str, Any],
    module: torch.nn.Module | None,
) -> Arrays:
    """Makes one call; what it assigns is among the results, and is undone."""
    owner: Any = module or method
    arrays = {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
    state = {name: arrays[name] for name in signature["changes"]}
    before = {name: each.detach().clone() for name, each in state.items()}
    results = call(method, signature, case["inputs"], case.get("cotangents"), module)
    for name, array in state.items():
        results[f"state:{name}"] = to_numpy(array.clone())
        array.detach().copy_(before[name])
    return results


def rebuild(structure: Mapping[str, Any], leaf: Callable[[str], Any]) -> Any:
    ((kind, content),) = structure.items()
    if kind == "leaf":
        return leaf(content)
    if kind == "dict":
        return {key: rebuild(child, leaf) for key, child in content}
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](rebuild(child, leaf) for child in content)
    return content["value"] if kind == "static" and "value" in content else None


def collect(
    structure: Mapping[str, Any], value: Any, item: Callable[[Any, Any], Any] = operator.getitem
) -> dict[str, Any]:
    """The parts of a nested value by the names that its structure has for them."""
    ((kind, content),) = structure.items()
    if kind == "leaf":
        return {content: value}
    found: dict[str, Any] = {}
    children = enumerate(content) if kind in ("list", "tuple") else content
    for key, child in children if kind not in ("static", "none") else ():
        found |= collect(child, item(value, key), item)
    return found
