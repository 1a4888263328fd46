"""Exports of every kind, each written by one call; only public names of pax_export are used."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from pax_export.export import (
    renew,
    retarget,
    spec,
    to_onnx,
    to_saved_model,
    to_stablehlo,
    to_tflite,
)
from tests.consumers.models import MODELS
from tests.contract.table import ALWAYS, NEVER, ROWS, Row, call
from tests.export.targets import TARGETS

TENSORFLOW = ("tensorflow",)
BUNDLE = ("safetensors", "flatbuffers")
TFLITE = ("tensorflow", "ai_edge_litert")
ONNX = ("onnx", "onnxruntime")
#: Not a package: the devices of this process.
EIGHT_DEVICES = "eight devices"

#: Rows that stand for the others where all of them would take long.
FEW = ("Linear", "Conv2D", "BatchNorm2D", "LSTM", "Transformer", "Sequential", "GraphModule")


@dataclass(frozen=True)
class Export:
    """One export.

    Attributes:
        kind: what the files are, e.g. ``"tflite"``.
        name: of the export within its kind.
        needs: packages without which it is not made.
        write: writes it to a path, and may give the report.
        suffix: of the path.
    """

    kind: str
    name: str
    needs: tuple[str, ...]
    write: Callable[[Path], Any]
    suffix: str = ""

    def missing(self) -> list[str]:
        """What it needs and does not find here."""
        return [need for need in self.needs if not _is_here(need)]


@contextlib.contextmanager
def without_locations() -> Iterator[None]:
    """What jax.export writes by itself has the lines of all callers in it, those here too."""
    name = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, limit)


def _is_here(need: str) -> bool:
    if need == EIGHT_DEVICES:
        return len(jax.devices()) >= 8
    return importlib.util.find_spec(need) is not None


def exports() -> list[Export]:
    """All of them, in a fixed order; each draws its weights from a seed of its own."""
    found = [
        *_rows_as_saved_models(),
        *_rows_as_bundles(),
        *_rows_as_files(),
        *_models(),
        *_options(),
        *_training(),
        *_processed(),
        *_sharded(),
        *_mended(),
        *_weights(),
        *_on_the_command_line(),
    ]
    if _is_here("tensorflow"):
        from tests.export.same_bytes import through_orbax

        found += [
            Export("orbax", name, TENSORFLOW, write)
            for name, write in through_orbax.EXPORTS.items()
        ]
    else:
        found.append(Export("orbax", "all", TENSORFLOW, lambda path: None))
    return found


# Rows of the contract table.


class InTrainMode(pax.Module):
    """A layer that trains where it is served: `to_saved_model` puts modules in eval mode."""

    def __init__(self, row: Row):
        super().__init__()
        self.layer = row.build()

    def use(self, row: Row, *inputs: Any) -> Any:
        after, output = pax.module_and_value(row.call)(self.layer.train(), *inputs)
        self.layer = after.eval()
        return output


def _methods(row: Row, function: Callable[..., Any]) -> dict[str, Any]:
    """The signature of a row; its parameters name the inputs."""

    def none(model: Any) -> Any:
        return function(model)

    def one(model: Any, x: Any) -> Any:
        return function(model, x)

    def two(model: Any, x: Any, y: Any) -> Any:
        return function(model, x, y)

    return {"serving_default": (none, one, two)[len(row.symbolic)]}


def _of(row: Row, write: Callable[..., Any], **options: Any) -> Callable[[Path], Any]:
    """Writes a row, by its own method where a plain call is one."""

    def run(path: Path) -> Any:
        inputs = tuple([spec(shape, row.dtype) for shape in row.symbolic])
        if row.call is call:
            return write(row.build(), path, inputs, validate=False, **options)
        methods = _methods(row, row.call)
        given = dict.fromkeys(methods, inputs)
        return write(row.build(), path, given, methods=methods, validate=False, **options)

    return run


def _training_row(row: Row, write: Callable[..., Any], **options: Any) -> Callable[[Path], Any]:
    def run(path: Path) -> Any:
        methods = _methods(row, lambda model, *inputs: model.use(row, *inputs))
        given = {key: tuple([spec(shape, row.dtype) for shape in row.symbolic]) for key in methods}
        options.update(methods=methods, state="update", validate=False)
        return write(InTrainMode(row), path, given, **options)

    return run


def _rows_as_saved_models() -> Iterator[Export]:
    for row in ROWS:
        yield Export("saved_model", row.name, TENSORFLOW, _of(row, to_saved_model))
        yield Export(
            "saved_model trainable", row.name, TENSORFLOW,
            _of(row, to_saved_model, trainable=True),
        )  # fmt: skip
        if row.changes_state == ALWAYS:
            write = _of(row, to_saved_model, state="update")
            yield Export("saved_model state", row.name, TENSORFLOW, write)
        if row.changes_state != NEVER:
            write = _training_row(row, to_saved_model)
            yield Export("saved_model state in train mode", row.name, TENSORFLOW, write)
        if row.name in FEW:
            for order in (0, 1, 2):
                yield Export(
                    f"saved_model vjp_order={order}", row.name, TENSORFLOW,
                    _of(row, to_saved_model, trainable=order > 0, vjp_order=order),
                )  # fmt: skip


def _rows_as_bundles() -> Iterator[Export]:
    for row in ROWS:
        yield Export("stablehlo", row.name, BUNDLE, _of(row, to_stablehlo))
        yield Export(
            "stablehlo constants vjp_order=1", row.name, BUNDLE,
            _of(row, to_stablehlo, weights="constants", vjp_order=1),
        )  # fmt: skip
        if row.changes_state == ALWAYS:
            write = _of(row, to_stablehlo, state="update")
            yield Export("stablehlo state", row.name, BUNDLE, write)
        elif row.changes_state != NEVER:
            write = _training_row(row, to_stablehlo)
            yield Export("stablehlo state in train mode", row.name, BUNDLE, write)
        if row.name in FEW:
            write = _of(row, to_stablehlo, vjp_order=2)
            yield Export("stablehlo vjp_order=2", row.name, BUNDLE, write)


def _rows_as_files() -> Iterator[Export]:
    for row in ROWS:
        yield Export("tflite", row.name, TFLITE, _of(row, to_tflite), ".tflite")
        yield Export("onnx", row.name, ONNX, _of(row, to_onnx), ".onnx")
        if row.name in FEW:
            for quantize in ("float16", "dynamic"):
                yield Export(
                    f"tflite {quantize}", row.name, TFLITE,
                    _of(row, to_tflite, quantize=quantize), ".tflite",
                )  # fmt: skip
            write = _of(row, to_onnx, opset=23)
            yield Export("onnx opset=23", row.name, ONNX, write, ".onnx")


# Whole models.

_FORMATS = (
    ("saved_model", to_saved_model, TENSORFLOW, ""),
    ("stablehlo", to_stablehlo, BUNDLE, ""),
    ("tflite", to_tflite, TFLITE, ".tflite"),
    ("onnx", to_onnx, ONNX, ".onnx"),
)


def _models() -> Iterator[Export]:
    for target in TARGETS:
        for kind, to, needs, suffix in _FORMATS:
            # One of them is tested, so that the report says so.
            validate = target.name == "MLP"

            def write(path: Path, to=to, target=target, validate=validate) -> Any:
                return to(target.build(), path, target.inputs, validate=validate)

            yield Export(f"{kind} of a model", target.name, needs, write, suffix)
    for name, (make, shape, options) in MODELS.items():

        def write(path: Path, make=make, shape=shape, options=options) -> Any:
            return to_saved_model(make(), path, spec(shape), **{**options, "validate": False})

        yield Export("saved_model of a served model", name, TENSORFLOW, write)


# What one may ask for.


class TwoMethods(pax.Module):
    """A call, a method with a keyword argument, and one that draws."""

    def __init__(self):
        super().__init__()
        self.layer = pax.Linear(3, 4)
        self.key = jax.random.key(7)

    def __call__(self, x):
        return jnp.tanh(self.layer(x))

    def encode(self, x, *, scale):
        return {"code": self.layer(x) * scale, "total": [x.sum(axis=-1), {"n": x.shape[0] * 1.0}]}

    def draw(self, count):
        return count + jax.random.normal(self.key, (2,))


def _two_methods(to: Callable[..., Any], *more: str, **options: Any) -> Callable[[Path], Any]:
    def write(path: Path) -> Any:
        inputs = {"serving_default": spec("batch, 3"), "encode": spec("batch, 3")}
        inputs.update({key: spec("") for key in more})
        return to(
            TwoMethods(), path, inputs,
            kwargs={"encode": {"scale": spec("")}},
            methods={"serving_default": "__call__", "encode": "encode", **dict(zip(more, more))},
            validate=False, **options,
        )  # fmt: skip

    return write


_DTYPES = (
    "bool", "int4", "uint4", "int8", "uint8", "int16", "int32", "float16", "bfloat16", "float32",
    "float8_e4m3fn", "float8_e5m2", "complex64",
)  # fmt: skip


# Others are refused there.
_DTYPES_OF = {
    "tflite": ("bool", "int8", "uint8", "int16", "int32", "float32", "complex64"),
    "onnx": ("bool", "int8", "uint8", "int32", "float16", "float32"),
}


def _of_dtypes(names: Sequence[str]) -> tuple[Any, Callable[..., Any]]:
    params = {name: jnp.asarray([[1, 0, 1]]).astype(name) for name in names}
    return params, lambda params, x: {name: w[0] for name, w in params.items()} | {"twice": 2 * x}


def _of_tied_and_closed_over() -> tuple[Any, Callable[..., Any]]:
    draws = np.random.default_rng(0)
    table, extra = draws.normal(size=(2, 20, 20)).astype(np.float32)
    tied = jnp.asarray(table)
    params = {"a": tied, "b": tied, "nested": [{"c/d": jnp.ones(20)}, 0.5]}

    def function(params: Any, x: Any) -> Any:
        first = x @ params["a"] @ params["b"].T @ extra
        return first * params["nested"][0]["c/d"] + params["nested"][1]

    return params, function


def _score(params: Any, query: Any, *, documents: Any) -> Any:
    match = documents["embedding"] @ query
    return {"best": jnp.argmax(match), "scores": (match, jax.nn.softmax(match) * params["scale"])}


def _constrained(to: Callable[..., Any], **options: Any) -> Callable[[Path], Any]:
    def write(path: Path) -> Any:
        return to(
            ({"scale": jnp.ones(())}, _score), path, spec("16"),
            kwargs={"documents": {"embedding": spec("count, 16")}},
            constraints=("count >= 2", "count <= 64"), validate=False, **options,
        )  # fmt: skip

    return write


def _made(to: Callable[..., Any], make: Callable[[], Any], *shape: str, **options: Any) -> Any:
    options.setdefault("validate", False)
    return lambda path: to(make(), path, tuple(map(spec, shape)), **options)


def _mlp() -> Any:
    return pax.Sequential(pax.Linear(3, 8), jax.nn.relu, pax.Linear(8, 2))


def _with_frozen_layer() -> Any:
    return pax.Sequential(pax.Linear(3, 8), pax.freeze_parameters(pax.Linear(8, 2)))


def _exported() -> Any:
    """Functions of jax.export, which bring inputs and platforms with them."""
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3"), jnp.float32)
    tanh = jax.export.export(jax.jit(lambda x: {"y": jnp.tanh(x)}), platforms=("cpu",))(x)
    twice = jax.export.export(jax.jit(lambda x: 2 * x), platforms=("cpu",))(x)
    return {"serving_default": tanh, "twice": twice}


def _written_again(path: Path) -> Any:
    with without_locations():
        return to_stablehlo(_exported(), path, validate=False)


def _renewed(path: Path) -> Any:
    to_stablehlo(_mlp(), path, spec("batch, 3"), vjp_order=1, validate=False)
    return renew(path)


def _options() -> Iterator[Export]:
    for kind, to, needs, suffix in _FORMATS:
        if kind != "onnx":  # which holds one function
            more = ("draw",) if kind in ("saved_model", "stablehlo") else ()
            write = _two_methods(to, *more)
            yield Export(f"{kind} options", "two methods", needs, write, suffix)
        tied = _made(to, _of_tied_and_closed_over, "batch, 20")
        yield Export(f"{kind} options", "tied and closed over", needs, tied, suffix)
        yield Export(f"{kind} options", "constraints", needs, _constrained(to), suffix)
        yield Export(f"{kind} options", "fixed", needs, _made(to, _mlp, "2, 3"), suffix)
        names = _DTYPES_OF.get(kind, _DTYPES)
        dtypes = _made(to, functools.partial(_of_dtypes, names), "batch, 3")
        yield Export(f"{kind} options", "dtypes", needs, dtypes, suffix)
    saved = {
        "two methods, trainable": _two_methods(to_saved_model, "draw", trainable=True),
        "some trainable": _made(to_saved_model, _mlp, "batch, 3", trainable=("modules.2",)),
        "one platform": _made(to_saved_model, _mlp, "batch, 3", platforms=("cpu",)),
        "consumer": _made(to_saved_model, _mlp, "batch, 3", consumer="tensorflow>=2.15"),
        "validated": _made(to_saved_model, _mlp, "batch, 3", trainable=True, validate=True),
        "variables": _made(to_saved_model, _mlp, "batch, 3", validate="variables"),
        "frozen": _made(to_saved_model, _with_frozen_layer, "batch, 3", trainable=True),
    }
    for name, write in saved.items():
        yield Export("saved_model options", name, TENSORFLOW, write)
    bundles = {
        "one platform": _made(to_stablehlo, _mlp, "batch, 3", platforms=("cpu",), vjp_order=1),
        "constants": _made(to_stablehlo, _mlp, "batch, 3", weights="constants"),
        "vjp_order=1": _made(to_stablehlo, _mlp, "batch, 3", vjp_order=1),
        "jax.export": _written_again,
        "renewed": _renewed,
    }
    for name, write in bundles.items():
        yield Export("stablehlo options", name, BUNDLE, write)


# Training, processors, devices.


def _learner(path: Path, **options: Any) -> Any:
    import optax

    net = pax.Sequential(
        pax.Linear(8, 6, with_bias=False), pax.BatchNorm1D(6), jnp.tanh, pax.Dropout(0.1),
        pax.Linear(6, 1),
    )  # fmt: skip
    optimizer = pax.optim.from_optax(optax.adam(1e-2))(net.parameters())

    def step(net: Any, optimizer: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            after, found = net.update_parameters(params) % x
            return jnp.mean((found - y) ** 2), after

        (value, net), gradients = jax.value_and_grad(loss, has_aux=True)(net.parameters())
        net, optimizer = pax.optim.apply_gradients(net, optimizer, gradients)
        return net, optimizer, {"loss": value}

    batch = spec("batch, 2, 8")
    return to_saved_model(
        net, path, batch, train_step=step, optimizer=optimizer,
        train_inputs=(batch, spec("batch, 2, 1")), validate=False, **options,
    )  # fmt: skip


def _training() -> Iterator[Export]:
    needs = (*TENSORFLOW, "optax")
    yield Export("saved_model train_step", "adam", needs, _learner)
    yield Export(
        "saved_model train_step", "adam, trainable", needs,
        lambda path: _learner(path, trainable=True),
    )  # fmt: skip


def _mood(path: Path, *, vocabulary: bool = False, **options: Any) -> Any:
    """Text, looked up in a table of values or in one of a file, before; words behind."""
    import tensorflow as tf

    words = ["good", "bad", "film"]
    if vocabulary:
        file = path.parent / "words.txt"
        file.write_text("\n".join(words))
        whole, line = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
        table = tf.lookup.StaticVocabularyTable(
            tf.lookup.TextFileInitializer(str(file), tf.string, whole, tf.int64, line), 1
        )
    else:
        pairs = tf.lookup.KeyValueTensorInitializer(words, [1, 2, 3], tf.string, tf.int64)
        table = tf.lookup.StaticHashTable(pairs, 0)

    def numbers(text: Any) -> Any:
        found = table.lookup(tf.strings.split(text).to_tensor(""))
        return tf.cast(found, tf.int32)

    scores = {"score": jnp.array([0.0, 1.0, -1.0, 0.0])}
    return to_saved_model(
        (scores, lambda params, tokens: params["score"][tokens].sum(axis=1)),
        path, spec("batch, length", "int32"), validate=False,
        preprocess=numbers, preprocess_inputs=spec("batch", "string"),
        postprocess=lambda score: {"score": score, "mood": tf.where(score < 0, "sad", "happy")},
        **options,
    )  # fmt: skip


def _processed() -> Iterator[Export]:
    kind = "saved_model processed"
    yield Export(kind, "table", TENSORFLOW, _mood)
    yield Export(kind, "vocabulary", TENSORFLOW, lambda path: _mood(path, vocabulary=True))
    yield Export(kind, "trainable", TENSORFLOW, lambda path: _mood(path, trainable=True))
    after = _made(to_saved_model, _mlp, "batch, 3", postprocess=lambda y: {"y": y, "twice": 2 * y})
    yield Export(kind, "postprocess only", TENSORFLOW, after)
    before = _made(
        to_saved_model, _mlp, "batch, 3", preprocess=lambda raw: raw / 255.0,
        preprocess_inputs=spec("batch, 3"),
    )  # fmt: skip
    yield Export(kind, "preprocess only", TENSORFLOW, before)


def _sharded() -> Iterator[Export]:
    def on_mesh() -> Any:
        mesh = pax.sharding.make_mesh(jax.devices()[:8], data=4, model=2)
        rules = {"*.weight": jax.sharding.PartitionSpec("model", None)}
        return pax.sharding.shard(pax.Sequential(pax.Linear(4, 8), jax.nn.relu), mesh, rules)

    def bundle(path: Path) -> Any:
        net = on_mesh()
        mesh = jax.tree.leaves(net)[0].sharding.mesh
        by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        x = jax.ShapeDtypeStruct((16, 4), "float32", sharding=by_row)
        with without_locations():  # which stay in what is written for several devices
            return to_stablehlo(net, path, x, vjp_order=1, platforms=("cpu",), validate=False)

    devices = (EIGHT_DEVICES,)
    saved = _made(to_saved_model, on_mesh, "n, 4", trainable=True)
    yield Export("saved_model sharded", "layer", TENSORFLOW + devices, saved)
    yield Export("stablehlo sharded", "layer", BUNDLE + devices, bundle)


# What others wrote; what is no export.

_FOREIGN = "import sys; from tests.consumers.foreign import save; save(sys.argv[1])"


def _retargeted(path: Path) -> Any:
    """What plain jax2tf wrote, mended.

    TensorFlow numbers functions by how many a process has made, and here
    nobody numbers them anew: a process of its own writes the old one.
    """
    old = path.parent / "old"
    command = [sys.executable, "-W", "ignore", "-c", _FOREIGN, str(old)]
    # The report counts the bytes of the old programs, with the paths of sources in them.
    environment = os.environ | {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return retarget(old, "tensorflow>=2.15", out=path, validate=False)


ROOT = Path(__file__).parent.parent.parent.parent


def _mended() -> Iterator[Export]:
    yield Export("retarget", "jax2tf", TENSORFLOW, _retargeted)


def _weights() -> Iterator[Export]:
    for row in ROWS:
        if row.name in FEW:
            yield Export(
                "weights", row.name, ("safetensors",),
                lambda path, row=row: pax.save_weights(row.build(), path), ".safetensors",
            )  # fmt: skip


def make_mlp() -> Any:
    """What the command line exports."""
    pax.seed_rng_key(42)
    return _mlp()


def _commanded(*words: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        from pax_export.cli import main

        model = f"{__name__}:make_mlp"
        if main(["export", model, str(path), "--input", "batch, 3", *words, "--validate", "no"]):
            raise RuntimeError("the command failed")

    return write


def _on_the_command_line() -> Iterator[Export]:
    for kind, _, needs, suffix in _FORMATS:
        target = kind.replace("_", "")
        write = _commanded("--target", target)
        yield Export(f"{kind} by the command line", "MLP", needs, write, suffix)
