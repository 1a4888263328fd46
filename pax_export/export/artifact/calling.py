"""Calls of loaded exports: Python arguments to named arrays, and `LoadedFile`."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export.artifact import dimensions
from pax_export.export.artifact.report import DEFAULT, ArrayInfo, Report, SignatureInfo
from pax_export.export.artifact.structure import collect, fixed_arguments, rebuild


class Arguments:
    def __init__(self, key: str, info: SignatureInfo):
        self.key = key
        self._info = info
        self._dtypes = {entry.name: dimensions.numpy_dtype(entry.dtype) for entry in info.inputs}
        # The input names, if every argument is one array that is given by position.
        trees = [info.arguments[name] for name in info.positional]
        flat = len(trees) == len(info.arguments) and all("leaf" in tree for tree in trees)
        self._flat = tuple(tree["leaf"] for tree in trees) if flat else None
        # Python values that are part of the function need not be given.
        self._fixed = fixed_arguments(info.arguments)

    def named(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a call by the names of the inputs."""
        if self._flat is not None and len(args) == len(self._flat) and not kwargs:
            return dict(zip(self._flat, args))  # the common case, and the fast one
        info = self._info
        values = {**self._fixed, **dict(zip(info.positional, args)), **kwargs}
        if len(args) > len(info.positional) or sorted(values) != sorted(info.arguments):
            raise InvalidArgumentError(
                "The exported model takes other arguments.",
                where=self.key,
                got=f"{len(args)} positional, keywords {sorted(kwargs)}",
                write=f"model({', '.join(info.arguments)})",
            )
        named: dict[str, Any] = {}
        for name, tree in info.arguments.items():
            collect(tree, values[name], named, name)
        return named

    def dtype(self, name: str) -> np.dtype:
        return self._dtypes[name]

    def array(self, name: str, value: Any) -> np.ndarray:
        """The value in the dtype of the input, if that changes no number."""
        dtype = self._dtypes[name]
        if dtype == dimensions.STRING:
            return np.asarray(value, object)
        if not hasattr(value, "dtype"):
            return self._of_python(name, value)
        if value.dtype == dtype:
            return np.asarray(value)
        if is_of_jax(value):
            value = _key_data(value)
            if value.dtype == dtype:
                return np.asarray(value)
        if dimensions.narrows(value.dtype, dtype):
            narrow = np.asarray(value).astype(dtype)
            if dtype.kind not in "iu" or np.array_equal(narrow, value):
                return narrow
        if isinstance(value, np.ndarray) and value.dtype.newbyteorder("=") == dtype:
            return value.astype(dtype)  # the same numbers, in the order of bytes of this machine
        raise self.wrong_dtype(name, value.dtype)

    def _of_python(self, name: str, value: object) -> np.ndarray:
        """Python's numbers in the dtype of the input; integers are not made of fractions."""
        dtype = self._dtypes[name]
        whole = dimensions.is_integer(dtype) or dtype.kind == "b"
        kinds = "biu" if whole else "biufc" if dtype.kind == "c" else "biuf"
        try:
            array = np.asarray(value)
            if not array.size or array.dtype.kind in kinds:
                return np.asarray(value, dtype)  # refuses numbers that the dtype does not hold
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgumentError(
                f"An argument cannot be converted to an array: {error}.",
                where=f"{self.key}: {name}",
                got=reprlib.repr(value),
                write=f"an array of {dimensions.name_of(dtype)}",
            ) from error
        raise self.wrong_dtype(name, f"{array.dtype.name}: {reprlib.repr(value)}")

    def wrong_dtype(self, name: str, dtype: object) -> InvalidArgumentTypeError:
        return InvalidArgumentTypeError(
            "An argument has a different dtype than the exported one.",
            where=f"{self.key}: {name}",
            got=str(dtype),
            write=dimensions.name_of(self._dtypes[name]),
        )

    def check_platform(self, here: str, platforms: Sequence[str], cause: Exception) -> None:
        """Raises if the function was exported for other platforms than the one of this process."""
        if here not in platforms:
            raise InvalidArgumentError(
                "The model was exported for other platforms.",
                where=self.key,
                got=f"a call on {here}",
                write=f"an export with platforms={(*platforms, here)}",
            ) from cause

    def check_dtypes(self, by_name: Mapping[str, str], cause: Exception | None = None) -> None:
        """Refuses dtypes, given by name, that the function was not exported for."""
        for name, dtype in by_name.items():
            if dtype != dimensions.name_of(self._dtypes[name]):
                raise self.wrong_dtype(name, dtype) from cause

    def check_shapes(self, shapes: Mapping[str, tuple], cause: Exception | None = None) -> None:
        """Refuses shapes that the function was not exported for, naming the input."""
        sizes: dict[str, tuple[int, str]] = {}  # known sizes, with the input of each
        for alone in (True, False):  # sizes that are a bare name come first
            for entry in self._info.inputs:
                shape = shapes[entry.name]
                fit = [
                    _fits_in(size, dimension, entry.name, sizes)
                    for size, dimension in zip(shape, entry.shape)
                    if isinstance(dimension, int) or dimension.isidentifier() == alone
                ]
                if len(shape) != len(entry.shape) or not all(fit):
                    raise self._wrong_shape(entry, shape, sizes) from cause
        numbers = {name: size for name, (size, _) in sizes.items()}
        for text in self._info.constraints:
            if dimensions.holds(text, numbers):
                continue
            broken = {name: numbers[name] for name in dimensions.constrained_names(text)}
            source = sizes[next(iter(broken))][1]
            words = ", ".join(f"{name} = {size}" for name, size in broken.items())
            raise InvalidArgumentError(
                "An argument has a size that violates the constraints of the export.",
                where=f"{self.key}: {source}",
                got=f"{list(shapes[source])}, {words}",
                write=text,
            ) from cause

    def _wrong_shape(
        self, entry: ArrayInfo, shape: tuple, sizes: Mapping[str, tuple[int, str]]
    ) -> InvalidArgumentError:
        known = (f"{name} = {size} by {source}" for name, (size, source) in sizes.items())
        zero = [name for name, (size, _) in sizes.items() if size == 0]
        least = f", {' and '.join(zero)} at least 1" if zero else ""
        return InvalidArgumentError(
            "An argument has a different shape than the exported one.",
            where=f"{self.key}: {entry.name}",
            got=f"{list(shape)}" + "".join(f", {text}" for text in known),
            write=f"[{', '.join(map(str, entry.shape))}]{least}",
        )

    def empty_outputs(self, shapes: Mapping[str, tuple]) -> dict[str, np.ndarray] | None:
        """Empty arrays for all outputs if sizes of 0 leave none an element, or None."""
        info = self._info
        sizes = {
            dimension: size
            for entry in info.inputs
            for size, dimension in zip(shapes[entry.name], entry.shape)
            if isinstance(dimension, str) and dimension.isidentifier()
        }
        if info.assigns or 0 not in sizes.values():
            return None
        try:
            input_shapes = [dimensions.shape(each.shape, sizes) for each in info.inputs]
            found = [dimensions.shape(each.shape, sizes) for each in info.outputs]
            fits = all(dimensions.holds(text, sizes) for text in info.constraints)
        except ValueError:  # a size that cannot be solved for
            return None
        if not fits or input_shapes != [tuple(shapes[each.name]) for each in info.inputs]:
            return None
        if any(min(shape, default=1) != 0 for shape in found):
            return None
        return {
            each.name: np.zeros(shape, dimensions.numpy_dtype(each.dtype))
            for each, shape in zip(info.outputs, found)
        }


def _fits_in(
    size: int, dimension: int | str, source: str, sizes: dict[str, tuple[int, str]]
) -> bool:
    """Returns whether a size fits a dimension; solves for one unknown name in it."""
    if isinstance(dimension, int):
        return size == dimension
    known = {name: number for name, (number, _) in sizes.items()}
    unknown = [name for name in dimensions.names(dimension) if name not in known]
    if len(unknown) > 1:
        return True  # the runtime's to check
    if unknown:
        found = dimensions.solve_for(dimension, size, unknown[0], known)
        if found is None:
            return True
        sizes[unknown[0]] = found, source
        return found > 0
    return dimensions.value(dimension, known) == size


def is_of_jax(value: object) -> bool:
    """Returns whether this is a jax array; False if jax has not been imported."""
    jax: Any = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def _key_data(value: Any) -> Any:
    """Returns the numbers of a typed random key of jax, and other arrays as they are."""
    jax: Any = sys.modules["jax"]
    is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def default_of(signatures: Mapping[str, Any]) -> Any:
    """The signature that a call of the model means: the default, or the only one."""
    if DEFAULT in signatures:
        return signatures[DEFAULT]
    if len(signatures) == 1:
        return next(iter(signatures.values()))
    if not signatures:
        raise InvalidArgumentError("The export has no signatures to call.")
    raise InvalidArgumentError(
        "This export has several signatures, and none is the default.",
        got=", ".join(signatures),
        write=f"model.signatures[{next(iter(signatures))!r}](...)",
    )


def tensorflow_keyword(name: str) -> str:
    """Returns the keyword that TensorFlow makes of a name, and by which it sorts arguments.

    Example:
        >>> sorted(["x.a", "x2"], key=tensorflow_keyword)
        ['x2', 'x.a']
    """
    word = name.replace(".", "_").replace("-", "_")
    return word if word[0].isalpha() else f"arg_{word}"


#: Calls the function with this key on named arrays; gives the outputs by name.
Run = Callable[[str, dict[str, np.ndarray]], Mapping[str, np.ndarray]]


class LoadedFile:
    """A loaded TFLite or ONNX model, called like the model that was exported.

    Folders for browsers hold ONNX models, too.
    It runs in LiteRT or onnxruntime, on the CPU, and so neither under `jax.jit`
    nor under `jax.grad`.  Outputs are jax arrays if an argument is one, and
    numpy arrays otherwise.

    Threads may call it at once: onnxruntime makes such calls side by side, LiteRT
    one after the other.

    Args:
        report: of the export.
        runtime: what users may ask for more than calls; None for nothing.
        run: calls a signature: its key and numpy arrays by input name give arrays by output
            name.  A format of another package makes a `LoadedFile` of its own by it.

    Attributes:
        report: what the export is.
        signatures: by key, functions like the model itself.
        runtime: LiteRT's `Interpreter`, or onnxruntime's `InferenceSession`, of a folder
            one for each signature.  The former is for one thread, and for no call of the
            model meanwhile.

    Example:
        >>> import tempfile, pax_export as pax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = folder + "/linear.tflite"
        ...     report = pax.export.to_tflite(pax.Linear(3, 2), path, pax.export.spec("1, 3"))
        ...     model = pax.export.load(path)
        >>> model
        LoadedFile(Linear: serving_default)
        >>> model.signatures["serving_default"]([[1, 2, 3]]).shape
        (1, 2)
    """

    def __init__(self, report: Report, runtime: object, run: Run):
        self.report = report
        self.runtime = runtime
        self.signatures = {
            key: FileSignature(key, info, run) for key, info in report.signatures.items()
        }

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the default signature, or the only one.

        Raises:
            InvalidArgumentError: the arguments have another structure, dtype or
                shape than the exported ones.
        """
        return default_of(self.signatures)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"LoadedFile({self.report.model}: {', '.join(self.signatures)})"


class FileSignature:
    """One function of a `LoadedFile`."""

    def __init__(self, key: str, info: SignatureInfo, run: Run):
        self.key = key
        self.info = info
        self._run = run
        self._arguments = Arguments(key, info)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the exported function; see `LoadedFile`."""
        named = self._arguments.named(args, kwargs)
        in_jax = any(map(is_of_jax, named.values()))
        arrays = {name: self._arguments.array(name, value) for name, value in named.items()}
        shapes = {name: value.shape for name, value in arrays.items()}
        empty = any(0 in shape for shape in shapes.values())
        outputs = self._arguments.empty_outputs(shapes) if empty else None
        if outputs is None:
            # These runtimes read beyond what they are given, or give nonsense, if a size is wrong.
            self._arguments.check_shapes(shapes)
            outputs = self._run(self.key, arrays)
        convert = sys.modules["jax"].numpy.asarray if in_jax else np.asarray
        return rebuild(self.info.result, lambda name: convert(outputs[name]))
