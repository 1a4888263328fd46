"""Saving and loading adapters in PEFT's format."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from pax_export._foundations.errors import (
    InvalidArgumentError,
    MissingWeightsFileError,
    WeightsFileError,
    a_few,
)
from pax_export._foundations.files import atomic
from pax_export._foundations.files.own_files import Belongs, some_names
from pax_export._foundations.files.system import read_small_file
from pax_export.adapters import _layer as layers
from pax_export.adapters import _peft as peft
from pax_export.adapters._lora import LoRA
from pax_export.adapters._net import (
    Changes,
    apply_changes,
    error_path,
    freezing_changes,
    require_adapters,
)
from pax_export.adapters._peft import UNTIED, Reading, own_leaves
from pax_export.core import (
    Module,
    adaptable_arrays,
    join_path,
    named_leaves,
    named_modules,
    next_rng_key,
    require_module,
)
from pax_export.weights import local_path, open_weights, require_values, save_weights

M = TypeVar("M", bound=Module)
_LARGEST_CONFIG = 1 << 24  # bytes


def save(
    net: Module,
    folder: str | os.PathLike[str],
    *,
    name: str = "default",
    rename: Mapping[str, str] | None = None,
) -> None:
    """Saves the adapters of one name to a folder in PEFT's format.

    The folder has ``adapter_model.safetensors`` with PEFT's names
    (``base_model.model.<path>.lora_A.weight``, ``[rank, in]``), and ``adapter_config.json``.
    Other trainable modules, such as a new head, are saved in torch's layout, as PEFT's
    ``modules_to_save``.  Strengths are not saved.

    Adapters of stacked layers (`Scan`, a scanned ``Decoder``) are saved stacked, which PEFT cannot
    read; for PEFT, save a net with a list of layers, ``lm.listed()``.

    Writing is atomic.  An existing folder is replaced only if it contains adapters.

    Args:
        net: the net with adapters.
        folder: the path of the folder.  Missing parents are created.
        name: the name of the adapters.
        rename: paths of modules in the file: ``{"layers.*.query": "model.layers.*.q_proj"}``;
            a pattern is a path or a prefix, and ``*`` matches any part.

    Raises:
        InvalidArgumentError: the net has no adapters, or none of this name.
        InvalidArgumentTypeError: the arrays have no values, for example inside jit.
        ExportPathError: (an OSError) the path is a file, or a folder with other files than
            adapters, or cannot be written.
        MissingPackageError: safetensors is not installed.

    Example:
        >>> import os, tempfile, pax_export as pax
        >>> net = pax.adapters.add(pax.Sequential(pax.Linear(8, 4)), "modules.0", rank=2)
        >>> folder = os.path.join(tempfile.mkdtemp(), "french")
        >>> pax.adapters.save(net, folder)
        >>> sorted(os.listdir(folder))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    found = require_adapters(net, "adapters.save", [name])
    rename = _check_rename(rename, net, "adapters.save")
    arrays: dict[str, np.ndarray] = {}
    saved: dict[str, LoRA] = {}
    for path, layer in found:
        for array, adapter in layers.adapters_of(layer).get(name, {}).items():
            leaves = {join_path(path, leaf_name): leaf for leaf_name, leaf in named_leaves(adapter)}
            require_values(leaves, "adapters.save")
            own = peft.rename_path(join_path(path, array), rename)
            if own in saved:
                raise InvalidArgumentError(
                    "Adapters of several layers cannot be saved as those of one.",
                    where="adapters.save(rename=)",
                    got=f"{path} and another layer as {own!r}",
                    write="rename= with a path for each layer, or the weights of "
                    "adapters.merge(net)",
                )
            saved[own] = adapter
            adapted = adaptable_arrays(layer)[array]
            for suffix, values in peft.to_peft(adapted, adapter).items():
                arrays[peft.full_name(own, suffix)] = values
    whole = []
    for path, module, attribute, leaf in _trained_beside(net):
        require_values({join_path(path, attribute): leaf}, "adapters.save")
        own = peft.rename_path(path, rename)
        whole.append(own)
        arrays[peft.full_name(own, attribute)] = peft.whole_to_torch(module, attribute, leaf)
    config = peft.config_of(saved, list(dict.fromkeys(whole)))
    changed = {peft.rename_path(path, rename) for path in _tied_layers(net)}
    config["ensure_weight_tying"] = not changed.isdisjoint((*saved, *whole))
    with atomic.replace_directory(folder, _recognize_adapters) as temporary:
        save_weights(arrays, temporary / peft.WEIGHTS)
        text = json.dumps(config, indent=2) + "\n"
        (temporary / peft.CONFIG).write_text(text, encoding="utf-8")


def _check_rename(rename: Mapping[str, str] | None, net: Module, where: str) -> Mapping[str, str]:
    """Returns the renaming; empty for None. Each of its paths must be one of the net."""
    checked = rename or {}
    paths = [
        join_path(path, array)
        for path, module in named_modules(net)
        for array in dict.fromkeys(["", *adaptable_arrays(module)])
    ]
    for pattern in checked:
        if not any(peft.pattern_of(path, {pattern: ""}) for path in paths):
            raise InvalidArgumentError(
                "rename= names no module of the net.",
                where=f"{where}(rename=)",
                got=repr(pattern),
                write=f"one of {a_few(paths[1:], 5)}; for a tied head {UNTIED}",
            )
    return checked


def _trained_beside(net: Module) -> list[tuple[str, Any, str, Any]]:
    """Yields other trainable arrays: module path, module, array name, array."""
    trained = {id(leaf) for _, leaf in named_leaves(net.parameters())}
    found = []
    for path, module in named_modules(net):
        if isinstance(module, LoRA):
            continue
        for name, leaf in own_leaves(module):
            if id(leaf) in trained:
                found.append((path, module, name, leaf))
    return found


def _recognize_adapters(path: Path) -> Belongs | None:
    if not (path / peft.CONFIG).is_file():
        return None
    return (peft.CONFIG, peft.WEIGHTS).__contains__


# --- loading ------------------------------------------------------------------------


def load(
    net: M,
    folder: str | os.PathLike[str],
    *,
    name: str = "default",
    rename: Mapping[str, str] | None = None,
    key: Any = None,
    revision: str | None = None,
) -> M:
    """Loads adapters from a folder into a net.

    Args:
        net: the net they were trained for, with or without adapters of other names.
        folder: a folder written by `save` or PEFT, with LoRA or DoRA in safetensors; or
            ``"organization/name"`` on the Hugging Face Hub.
        name: the name of the loaded adapters.
        rename: from paths of the net to paths of the file, as in `save`.  Several dense layers
            may have the same path in the file: the outputs of a fused layer are split among them,
            in the order of this mapping.
        key: the random key of dropout; drawn from the global stream by default.
        revision: a branch, tag or commit on the Hub.

    Returns:
        The net with the active adapters, with the ranks and scales of the file.

    Raises:
        WeightsMismatchError: (a ValueError and a KeyError) arrays are missing, unexpected, or
            have another shape; the message lists all of them.
        WeightsFileError: (an OSError) the folder has no readable adapters.
        InvalidArgumentError: the net already has adapters with this name, or those of PEFT change
            the embedding of a `Decoder` whose head is tied to it, and not the head.

    Example:
        >>> import os, tempfile, pax_export as pax
        >>> base = pax.Sequential(pax.Linear(8, 4))
        >>> folder = os.path.join(tempfile.mkdtemp(), "french")
        >>> pax.adapters.save(pax.adapters.add(base, "modules.0", rank=2), folder)
        >>> pax.adapters.load(base, folder).modules[0].adapters
        {'default': LoRA(rank=2, alpha=2.0)}
    """
    require_module(net, "adapters.load")
    local_folder = local_path(folder, revision)
    config = _read_config(local_folder)
    reading = Reading(net, _check_rename(rename, net, "adapters.load"), _read_arrays(local_folder))
    reading.has_tied_head = bool(_tied_layers(net))
    reading.require_complete(config, str(local_folder))
    if not config.get("ensure_weight_tying"):
        _require_own_head(net, {*reading.adapters, *reading.trained}, str(local_folder))
    net = reading.with_whole(net)
    changes: Changes = freezing_changes(net)
    there = dict(named_modules(net))
    for path in reading.trained:
        changes[id(there[path])] = layers.unfreeze_own
    for path, layer in there.items():
        adapter: layers.ByArray = {}
        for array, adapted in adaptable_arrays(layer).items():
            found = reading.adapters.get(join_path(path, array))
            if found is None:
                continue
            alpha, rate = peft.alpha_and_rate(
                config, found.own_path, str(local_folder / peft.CONFIG)
            )
            key = next_rng_key() if rate and key is None else key
            own_key, key = jax.random.split(key) if rate else (None, key)
            rslora = bool(config.get("use_rslora"))
            adapter[array] = found.adapter(adapted, alpha, rate, rslora, own_key)
        if adapter:
            changes[id(layer)] = partial(_put_adapter, path=path, name=name, adapter=adapter)
    return apply_changes(net, changes)


def _tied_layers(net: Module) -> list[str]:
    """Returns the paths of embeddings whose weight is also that of a head."""
    return [
        join_path(path, name)
        for path, module in named_modules(net)
        for name in getattr(module, "_pax_tied", ())
    ]


def _require_own_head(net: Module, changed: set[str], where: str) -> None:
    """Refuses to change a head with its embedding, of which PEFT changes the embedding alone."""
    for path in changed.intersection(_tied_layers(net)):
        raise InvalidArgumentError(
            "The adapters change the embedding, and not the head that is tied to it.",
            where=where,
            got=f"{path} of a net whose head has the same weight, without ensure_weight_tying",
            write="adapters.load(lm.untied(), ...), which has a head of its own",
        )


def _put_adapter(layer: Module, *, path: str, name: str, adapter: layers.ByArray) -> Any:
    with error_path(path):
        return layers.put_adapter(layer, name, adapter)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / peft.CONFIG
    if not folder.is_dir() or not file.is_file():
        raise MissingWeightsFileError(
            "The path contains no adapters.",
            where=str(folder),
            got=f"a directory with {some_names(folder)}" if folder.is_dir() else "no directory",
            write=f"the folder that adapters.save was given, with {peft.CONFIG} in it",
        )
    try:
        config = json.loads(read_small_file(file, _LARGEST_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsFileError(
            "The configuration of the adapters cannot be read.",
            where=str(file),
            got=f"{type(error).__name__}: {error}"[:200],
            write="the file as adapters.save or PEFT wrote it",
        ) from error
    peft.check_config(config, str(file))
    return config


def _read_arrays(folder: Path) -> dict[str, np.ndarray]:
    with open_weights(folder / peft.WEIGHTS) as content:
        return {name: content.read(name) for name in content.entries}
