"""Exports: writing, loading, calling and memory, beside orbax.export."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pax_export as pax
from benchmarks.compare import compare, table

_LENGTH, _DIM = 32, 256
#: The package orbax-checkpoint has the parent package.
_ORBAX = bool(importlib.util.find_spec("orbax") and importlib.util.find_spec("orbax.export"))


def tables() -> Iterator[str]:
    """A Transformer of 36 MiB: written, loaded and called; and the peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        net = _transformer()
        writers = {
            "pax_export": _writer(net, folder, trainable=False),
            "pax_export, trainable": _writer(net, folder, trainable=True),
        }
        if _ORBAX:
            writers["orbax.export"] = _orbax(net, folder, trainable=False)
            writers["orbax.export, trainable"] = _orbax(net, folder, trainable=True)
        else:
            yield "orbax.export is not installed\n"
        rows = compare(writers, rounds=3, least=0.0)
        yield table("export of a Transformer of 36 MiB", rows, "0.5 s, trainable 1.2 s")
        yield from _loaded(net, Path(folder))
    yield from _memory()


def _transformer() -> Any:
    return pax.nets.Transformer(_DIM, 4, 12, 0.0).eval()


def _writer(net: Any, folder: str, *, trainable: bool) -> Callable[[], Any]:
    path = f"{folder}/pax_{trainable}"
    inputs = pax.export.spec(("batch", _LENGTH, _DIM))
    return lambda: pax.export.to_saved_model(
        net, path, inputs, trainable=trainable, validate=False, overwrite=True
    )


def _orbax(net: Any, folder: str, *, trainable: bool) -> Callable[[], Any]:
    import tensorflow as tf
    from orbax.export import ExportManager, JaxModule, ServingConfig

    spec = [tf.TensorSpec((None, _LENGTH, _DIM), tf.float32, name="h")]
    leaves, tree = jax.tree.flatten(net)

    def apply(leaves: list, h: jax.Array) -> dict:
        return {"output": jax.tree.unflatten(tree, leaves)(h)}

    def write() -> None:
        module = JaxModule(
            leaves, apply, trainable=trainable, input_polymorphic_shape=f"b, {_LENGTH}, {_DIM}"
        )
        config = ServingConfig("serving_default", input_signature=spec)
        ExportManager(module, [config]).save(f"{folder}/orbax_{trainable}")

    return write


def _loaded(net: Any, folder: Path) -> Iterator[str]:
    import tensorflow as tf

    paths = {"pax_export": str(folder / "pax_False")}
    if _ORBAX:
        paths["orbax.export"] = str(folder / "orbax_False")
    loaders = {name: lambda path=path: tf.saved_model.load(path) for name, path in paths.items()}
    loaders["pax_export, pax.export.load"] = lambda: pax.export.load(paths["pax_export"])
    yield table("loading it", compare(loaders, rounds=5), "0.2 s")

    h = np.ones((1, _LENGTH, _DIM), np.float32)
    calls = _calls(net, pax.export.load(paths["pax_export"]), h)
    signatures = {name: tf.saved_model.load(path).signatures for name, path in paths.items()}
    calls |= {f"{name}, signature": _signature(each, h) for name, each in signatures.items()}
    yield table("a call at batch 1", compare(calls, rounds=15), "1.06 times jax.jit")

    yield _small(folder)


def _calls(net: Any, loaded: Any, x: np.ndarray) -> dict[str, Callable[[], Any]]:
    """A model through jax.jit, and its export with each kind of array."""
    import tensorflow as tf

    jitted, tensor, of_jax = jax.jit(lambda net, x: net(x)), tf.constant(x), jax.numpy.asarray(x)
    return {
        "jax.jit": lambda: np.asarray(jitted(net, x)),
        "pax.export.load, array of numpy": lambda: loaded(x),
        "pax.export.load, tensor": lambda: loaded(tensor).numpy(),
        "pax.export.load, array of jax": lambda: loaded(of_jax).block_until_ready(),
    }


def _signature(signatures: Any, x: np.ndarray) -> Callable[[], Any]:
    """A call as TensorFlow alone makes it."""
    import tensorflow as tf

    signature, tensor = signatures["serving_default"], tf.constant(x)
    (name,) = signature.structured_input_signature[1]
    return lambda: signature(**{name: tensor})["output"].numpy()


def _small(folder: Path) -> str:
    net = pax.Sequential(pax.Linear(8, 8), jax.nn.relu, pax.Linear(8, 2))
    pax.export.to_saved_model(
        net, folder / "mlp", pax.export.spec("batch, 8"), validate=False, overwrite=True
    )
    loaded, x = pax.export.load(folder / "mlp"), np.ones((1, 8), np.float32)
    calls = _calls(net, loaded, x)
    calls["pax_export, signature"] = _signature(loaded.root.signatures, x)
    return table("a call of a small MLP", compare(calls), "160 µs")


_PEAK = """
import sys, tempfile
import jax, jax.numpy as jnp
import pax_export as pax
megabytes = int(sys.argv[1])

def kilobytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line[:5] == field)

def scale(params, x):
    return x @ params["w"][:, :1]

side = 1024
params = {"w": jnp.ones((side, megabytes * 256), jnp.float32)}
jax.block_until_ready(params)
pax.export.to_saved_model(({"w": jnp.ones((2, 2))}, scale), tempfile.mkdtemp() + "/warm",
                          pax.export.spec("batch, 2"), validate=False)
before = kilobytes("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew, not with that of the parent
pax.export.to_saved_model((params, scale), tempfile.mkdtemp() + "/model",
                          pax.export.spec(("batch", side)), validate=False)
print(kilobytes("VmHWM") - before)
"""


def _memory() -> Iterator[str]:
    """Processes of their own, since a peak is never forgotten."""
    lines = [
        "### peak memory of an export, over the parameters",
        "",
        "| parameters | more |",
        "|---|---|",
    ]
    for megabytes in (64, 256):
        run = [sys.executable, "-c", _PEAK, str(megabytes)]
        kilobytes = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
        lines.append(f"| {megabytes} MiB | {kilobytes / 1024:.0f} MiB |")
    yield "\n".join([*lines, ""])
