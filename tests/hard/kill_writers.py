"""Kills every writer at random moments, and looks at what is left.

python -m tests.hard.kill_writers DIRECTORY KILLS

Run in a process of its own, which imports everything and does nothing with it: each life of a
writer begins in a fork, and costs no import.  A life saves again and again, in turn what is
called one and two; it is killed, and what lies at the place must be one of them, whole.  After
the next save nothing else may be left, neither beside it nor where the system keeps temporary
files.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from itertools import count
from pathlib import Path

import numpy as np

from tests.forks import done, in_fork

#: What is imported once, for all forks.
PACKAGES = (
    *("tensorflow", "orbax.checkpoint", "safetensors.numpy", "ai_edge_litert.interpreter"),
    *("pax_export.export", "pax_export.export.orbax", "pax_export.checkpoint"),
    *("pax_export.adapters", "pax_export.generation", "gguf", "tokenizers"),
)
VALUES = {"one": 1.0, "two": 2.0}
SIZE = 300
#: What stands beside the saves and must stay as it is.
BYSTANDER = b"a user's\n"


def main(folder, kills):
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    for package in PACKAGES:
        importlib.import_module(package)

    warnings.filterwarnings("ignore", message=".*fork")
    figures = {}
    for writer in (
        *(Weights, SavedModel, StableHlo, Tflite, Orbax, Checkpoint),
        *(Adapters, Pretrained, Gguf),
    ):
        start = time.perf_counter()
        figures[writer.__name__] = seen = trial(writer(), folder / writer.__name__, kills)
        seen["seconds"] = round(time.perf_counter() - start, 1)
        seen["temporary"] = sorted(os.listdir(temporary))
    print(json.dumps(figures))


def trial(writer, folder, kills):
    """Kills one writer so many times; gives how often it left something, and what in the end."""
    folder.mkdir()
    path = folder / "model"
    (folder / "data.csv").write_bytes(BYSTANDER)
    whole = {}
    for name in VALUES:
        start = time.perf_counter()
        done(in_fork(lambda name=name: writer.save(path, name)))
        whole[name] = writer.content(path)
        span = time.perf_counter() - start
    draw, seen = random.Random(writer.suffix), {"kills": kills, "leftovers": 0, "changed": 0}
    there = "two"
    for _ in range(math.ceil(writer.lives * kills)):
        child = in_fork(lambda last=there: work(writer, path, last))
        time.sleep(draw.uniform(0.2, 1.8) * span)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "a save failed"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        before, there = there, writer.which(path, whole)
        seen["changed"] += before != there
        seen["leftovers"] += bool(set(os.listdir(folder)) - {"model", "model.html", "data.csv"})
        assert (folder / "data.csv").read_bytes() == BYSTANDER
    for file in Path(tempfile.gettempdir()).glob("*.py"):
        os.utime(file, (0, 0))  # what TensorFlow leaves goes after a minute
    done(in_fork(lambda: writer.save(path, "one")))
    done(in_fork(lambda: writer.check(path, "one")))
    return seen | {"left": sorted(os.listdir(folder))}


def work(writer, path, last):
    """Saves again and again, in turn; what lies there already comes second."""
    names = sorted(VALUES, key=lambda name: name == last)
    for turn in count():
        writer.save(path, names[turn % 2])


def params(name):
    return {"w": np.full((SIZE, SIZE), VALUES[name], np.float32)}


def product(params, x):
    return x @ params["w"]


class Writer:
    """One way to write; none of its methods but `save` and `check` may begin to use jax."""

    suffix = ""
    lives = 0.5  # of the number of kills: an export takes long

    def save(self, path, name):
        from pax_export import export

        model = params(name), product
        inputs = export.spec(f"2, {SIZE}")
        getattr(export, self.suffix)(model, path, inputs, validate=False, overwrite=True)

    def check(self, path, name):
        from pax_export import export

        result = export.load(path)(np.ones((2, SIZE), np.float32))
        assert (np.asarray(result) == SIZE * VALUES[name]).all()

    def content(self, path):
        """The hashes of all files, without the report, which counts seconds."""
        return {
            str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(path.rglob("*"))
            if file.is_file() and file.name not in ("pax_export.json", "SHA256SUMS")
        }

    def which(self, path, whole):
        """The name of what lies there, whole."""
        from pax_export.export import Report

        Report.read(path)
        (name,) = (name for name, files in whole.items() if files == self.content(path))
        return name


class SavedModel(Writer):
    suffix = "to_saved_model"


class StableHlo(Writer):
    suffix = "to_stablehlo"

    def which(self, path, whole):
        from tests.export.models import rehash

        sums = (path / "SHA256SUMS").read_text()
        assert (rehash(path) / "SHA256SUMS").read_text() == sums
        return super().which(path, whole)


class Tflite(Writer):
    suffix = "to_tflite"

    def content(self, path):
        with zipfile.ZipFile(path) as report:
            end = min(entry.header_offset for entry in report.infolist())
        return hashlib.sha256(path.read_bytes()[:end]).hexdigest()


class Weights(Writer):
    suffix = "save_weights"
    lives = 1.0

    def save(self, path, name):
        import pax_export as pax

        pax.save_weights(params(name), path)

    def check(self, path, name):
        import pax_export as pax

        assert (pax.load_weights(params("two"), path)["w"] == VALUES[name]).all()

    def content(self, path):
        return path.read_bytes()

    def which(self, path, whole):
        (name,) = (name for name, data in whole.items() if data == self.content(path))
        return name


class Orbax(Writer):
    """TensorFlow itself writes, and makes Python files of functions of its own meanwhile."""

    suffix = "ExportManager"

    def save(self, path, name):
        import tensorflow as tf

        from pax_export.export import orbax

        module = orbax.JaxModule(params(name), product, input_polymorphic_shape="b, ...")
        specs = [tf.TensorSpec([None, SIZE], tf.float32, name="x")]
        orbax.ExportManager(module, [orbax.ServingConfig("serving_default", specs)]).save(path)

    def check(self, path, name):
        import tensorflow as tf

        signature = tf.saved_model.load(str(path)).signatures["serving_default"]
        (result,) = signature(x=tf.ones((2, SIZE))).values()
        assert (result.numpy() == SIZE * VALUES[name]).all()

    def content(self, path):
        """The variables; TensorFlow's graph has names with counters of the process."""
        return {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(path.glob("variables/*.data-*"))
        }

    def which(self, path, whole):
        (name,) = (name for name, files in whole.items() if files == self.content(path))
        done(in_fork(lambda: self.check(path, name)))  # the graph is there, and of these variables
        return name


class Checkpoint(Writer):
    """Each life saves step after step; the number of a step tells its values."""

    suffix = "checkpoint"
    lives = 1.0

    def save(self, path, name):
        from pax_export.checkpoint import Checkpoints

        with Checkpoints(path, keep=2) as checkpoints:
            step = (checkpoints.latest or 0) + 1
            checkpoints.save(step, params={"w": params("one")["w"] * step})

    def check(self, path, name):
        from pax_export.checkpoint import Checkpoints

        checkpoints = Checkpoints(path)
        assert all(entry.isdecimal() for entry in os.listdir(path)), os.listdir(path)
        assert 1 <= len(checkpoints.steps) <= 2
        for step in checkpoints.steps:
            state = checkpoints.restore(step, params=params("one"))
            assert (state["params"]["w"] == step).all()

    def content(self, path):
        return sorted(int(name) for name in os.listdir(path) if name.isdecimal())

    def which(self, path, whole):
        """All steps are whole; a life goes on from the last one."""
        assert self.content(path)[-1] >= whole["two"][-1]
        done(in_fork(lambda: self._all_whole(path)))
        return str(self.content(path)[-1])

    def _all_whole(self, path):
        from pax_export.checkpoint import Checkpoints

        checkpoints = Checkpoints(path)
        for step in checkpoints.steps:
            state = checkpoints.restore(step, params=params("one"))
            assert (state["params"]["w"] == step).all()


class Adapters(Writer):
    """A folder of PEFT."""

    suffix = "adapters"

    def save(self, path, name):
        import pax_export as pax

        net = pax.adapters.lora(pax.Linear(SIZE, SIZE), 100)
        pax.adapters.save(net.map(lambda x: x * 0 + VALUES[name]), path)

    def check(self, path, name):
        import pax_export as pax

        net = pax.adapters.load(pax.Linear(SIZE, SIZE), path)
        assert (net.adapters["default"].lora_a == VALUES[name]).all()

    def which(self, path, whole):
        (name,) = (name for name, files in whole.items() if files == self.content(path))
        return name


class Pretrained(Adapters):
    """A folder of transformers."""

    suffix = "save_pretrained"

    def decoder(self, name):
        import pax_export as pax

        sizes = {"vocab_size": SIZE, "dim": 64, "num_layers": 2, "num_heads": 2, "hidden_dim": 64}
        lm = pax.nets.Decoder(pax.nets.DecoderConfig.llama(**sizes))
        return lm.map(lambda x: x * 0 + VALUES[name])

    def save(self, path, name):
        from pax_export.generation import save_pretrained

        save_pretrained(self.decoder(name), path, validate=False, overwrite=True)

    def check(self, path, name):
        import pax_export as pax

        lm = pax.nets.Decoder.from_pretrained(path)
        assert (lm.embed.weight == VALUES[name]).all()


class Gguf(Pretrained):
    """A file of llama.cpp."""

    suffix = "gguf"

    def save(self, path, name):
        from pax_export.generation import export
        from tests.generation.test_tokenizer import byte_level

        options = {"tokenizer": byte_level(), "validate": False, "overwrite": True}
        export(self.decoder(name), path, format="gguf", **options)

    def check(self, path, name):
        import pax_export as pax

        assert (pax.nets.Decoder.from_gguf(path).embed.weight == VALUES[name]).all()

    def content(self, path):
        return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
