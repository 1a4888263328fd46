"""``pax-export run``: calls an export with arrays from files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from pax_export._foundations.errors import ExportPathError, InvalidArgumentError
from pax_export._foundations.files import atomic, own_files
from pax_export._foundations.files.system import unusual_type
from pax_export._foundations.optional import require
from pax_export.cli._command import DONE, Commands, add_command, print_result, split_name

_EXAMPLES = """\
  pax-export run served/1 --input images=images.npy --output logits.npz
  pax-export run served/1 --signature encode --input x=x.npy --input scale=scale.npy
"""


def add(commands: Commands) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = add_command(
        commands, "run", _call_export, "call an export with arrays from files",
        "Calls a signature of an export, and prints the shapes of the outputs. Third-party "
        "SavedModels can be called, too.",
        _EXAMPLES,
        shared=("path", "--trusted", "--json"),
    )  # fmt: skip
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]FILE.npy",
        help="an input; its name may be omitted if there is only one",
    )
    parser.add_argument(
        "--signature", metavar="KEY", help="default: serving_default, or the only one"
    )
    parser.add_argument("--output", metavar="FILE.npz", help="the file to write the outputs to")


def _call_export(options: argparse.Namespace) -> int:
    function, inputs = _load_function(Path(options.path), options.signature, options.trusted)
    arrays = _read_inputs(options.input, inputs)
    outputs = {name: np.asarray(value) for name, value in function(arrays).items()}
    if options.output:
        _save_outputs(Path(options.output), outputs)
    described = {
        name: {"shape": list(value.shape), "dtype": value.dtype.name}
        for name, value in outputs.items()
    }
    lines = (f"{name}: {each['dtype']}{each['shape']}" for name, each in described.items())
    print_result(options, lambda: {"outputs": described, "file": options.output}, "\n".join(lines))
    return DONE


#: TensorFlow executes them itself, with its own arguments.
_NOT_CALLED = ("__saved_model_init_op", "__saved_model_train_op")

Function = Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]]


def _load_function(path: Path, key: str | None, trusted: bool) -> tuple[Function, dict[str, str]]:
    """A signature as a function of arrays by name, and the dtypes of its inputs."""
    from pax_export.export.artifact import saved_models

    if saved_models.is_foreign(path):
        return _of_foreign(path, key, trusted)
    return _of_export(path, key, trusted)


def _of_export(path: Path, key: str | None, trusted: bool) -> tuple[Function, dict[str, str]]:
    from pax_export import export
    from pax_export.export.artifact.structure import collect, rebuild

    model = export.load(path, trusted=trusted)
    signature = model.signatures[_choose_signature(key, model.signatures)]
    info = signature.info

    def call(arrays: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        trees = {name: rebuild(tree, arrays.__getitem__) for name, tree in info.arguments.items()}
        outputs: dict[str, Any] = {}
        args = [trees.pop(name) for name in info.positional]
        collect(info.result, signature(*args, **trees), outputs, "the result")
        return outputs

    return call, {entry.name: entry.dtype for entry in info.inputs}


def _of_foreign(path: Path, key: str | None, trusted: bool) -> tuple[Function, dict[str, str]]:
    from pax_export.export.artifact import loading

    loading.check_saved_model(path, trusted=trusted)
    tf = require("tensorflow", "tensorflow", "run")
    try:
        model = tf.saved_model.load(str(path))
    except Exception as error:  # any exception of TensorFlow about the file
        raise ExportPathError(
            "The SavedModel cannot be loaded.", where=str(path), got=str(error)[:500]
        ) from error
    signatures = {name: model.signatures[name] for name in model.signatures}
    for name in _NOT_CALLED:
        signatures.pop(name, None)
    signature = signatures[_choose_signature(key, signatures)]
    specs = signature.structured_input_signature[1]

    def call(arrays: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        try:
            outputs = signature(**{name: tf.constant(value) for name, value in arrays.items()})
        except (TypeError, ValueError, tf.errors.OpError) as error:
            raise InvalidArgumentError(
                "The SavedModel cannot be called.", where=str(path), got=str(error)[:500]
            ) from error
        return {name: value.numpy() for name, value in outputs.items()}

    return call, {name: spec.dtype.name for name, spec in specs.items()}


def _choose_signature(key: str | None, signatures: Mapping[str, Any]) -> str:
    default = "serving_default"
    if key is None:
        key = default if default in signatures or len(signatures) != 1 else next(iter(signatures))
    if key not in signatures:
        raise InvalidArgumentError(
            "The export does not have this signature.",
            got=key,
            write=" or ".join(f"--signature {each}" for each in signatures),
        )
    return key


def _read_inputs(texts: Sequence[str], expected: Mapping[str, str]) -> dict[str, np.ndarray]:
    files: dict[str, str] = {}
    for text in texts:
        name, file = split_name(text)
        files[name or (next(iter(expected)) if len(expected) == 1 else "")] = file
    if sorted(files) != sorted(expected) or len(files) != len(texts):
        raise InvalidArgumentError(
            "The export takes other inputs.",
            got=", ".join(sorted(texts)) or "none",
            write=" ".join(f"--input {name}=FILE.npy" for name in expected) or "no --input",
        )
    return {name: _load_array(Path(file), expected[name], name) for name, file in files.items()}


def _load_array(file: Path, dtype: str, name: str) -> np.ndarray:
    from pax_export.export.artifact.dimensions import numpy_dtype

    try:
        array = np.load(file, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("an archive of several arrays")
    except (OSError, ValueError, EOFError) as error:
        raise InvalidArgumentError(
            "The file contains no array.", where=name, got=f"{file}: {error}", write="a .npy file"
        ) from error
    wanted = numpy_dtype(dtype)
    # numpy has no name for the small floats, and writes them as bytes.
    if array.dtype.kind == "V" and array.dtype.itemsize == wanted.itemsize:
        return array.view(wanted)
    is_small_float = wanted.kind == "V" or wanted.name == "float16"
    return array.astype(wanted) if is_small_float and array.dtype.kind == "f" else array


def _save_outputs(file: Path, outputs: Mapping[str, np.ndarray]) -> None:
    """Writes the outputs; the small floats, that numpy cannot write, as float32."""
    arrays = {
        name: value.astype(np.float32) if value.dtype.kind == "V" else value
        for name, value in outputs.items()
    }
    path = Path(os.path.realpath(file))
    if _holds_something_else(path):
        raise ExportPathError(
            "The path is not an archive of outputs by pax-export, so it is not replaced.",
            where=str(file),
            got=f"a file that {own_files.read_beginning(path)}",
            write="another path, or remove it yourself",
        )
    try:
        with _stream_to(path) as stream:
            own_files.write_npz(stream, arrays)
    except OSError as error:
        raise ExportPathError(
            "The outputs cannot be written.", where=str(file), got=error
        ) from error


@contextmanager
def _stream_to(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that atomically replaces the old one; writes directly to pipes and devices."""
    if unusual_type(path) or not path.parent.is_dir():
        with path.open("wb") as stream:
            yield stream
    else:
        with atomic.replace_file(path, own_files.recognize_npz) as file, file.open("wb") as stream:
            yield stream


def _holds_something_else(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0 and own_files.recognize_npz(path) is None
