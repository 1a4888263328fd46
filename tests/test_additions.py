"""One file is one addition: each is written beside the tree, put into its room, and used.

The room finds a file in any folder of its `__path__`, as it finds those that are in the tree.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FORMAT = """
    import numpy as np

    from pax_export.export.formats import Format

    HERE = __name__
    DOUBLES = Format(
        name="doubles", title="doubles", suffix=".npz", run_imports=("jax", "pax_export"),
        export=f"{HERE}:to_doubles", load=f"{HERE}:load", run=f"{HERE}:run",
    )

    def to_doubles(model, path, inputs, **options):
        from pax_export.export.formats import export_as

        return export_as(DOUBLES, write, model, path, inputs, **options)

    def write(place, programs):
        with place.open("wb") as file:
            np.savez(file, **programs[0].weights)

    def run(path, calls):
        with np.load(path) as stored:
            return [{"output": each["inputs"]["x"] @ stored["weight"]} for each in calls]

    def load(path, report):
        return lambda x: run(path, [{"inputs": {"x": x}}])[0]["output"]
"""

OPERATION = """
    import jax.numpy as jnp

    from pax_export.export.portable.decompositions import decomposes

    @decomposes("twice")
    def twice(x, *, by):
        return x * by
"""

READER = """
    import numpy as np

    from pax_export.weights.sources._source import Entry, Source

    KIND = "file of numbers"

    def matches(file):
        return file.begin(8) == b"NUMBERS!"

    def read(file):
        (count,) = file.stream(8).unpack("<I")
        entry = Entry.stored(file, file.where, KIND, (count,), "float32", 12)
        return Source("numbers", file.where, {"w": entry})
"""

LAYER = """
    import jax

    from pax_export.core import Declared, ParameterModule, next_rng_key

    def small(layer):
        return jax.nn.initializers.normal(0.1)

    class Scaled(ParameterModule):
        arrays = {"weight": Declared("kernel", ("in", "out"), init=small)}

        def __init__(self, inputs, outputs):
            super().__init__()
            self.weight = small(self)(next_rng_key(), (inputs, outputs))

        def __call__(self, x):
            return 2 * x @ self.weight
"""

TRANSFORM = """
    import jax

    from pax_export.transforms._lift import LiftedCall

    def again(f):
        def computed_again(*args, **kwargs):
            call, results = LiftedCall(f, args, kwargs), []

            def inside(leaves):
                results.append(call.inside(leaves))
                return results[-1].leaves

            leaves = jax.checkpoint(inside)(dict(enumerate(call.leaves)))
            return call.finish(results[-1], leaves)

        return computed_again
"""

FAMILY = """
    from pax_export.nets.decoder._families import like_llama
    from pax_export.nets.decoder._hf import FAMILIES

    FAMILIES["toy"] = like_llama(
        "Toy", "31 12 20 2 3 1 8 64", 1e-5, False, keys={"rope_theta": 50.0},
        flags={"use_bias": ("output_bias",)}, fields={"rotary_pairing": "neighbors"},
    )
"""

USES = {
    "a layer": ("pax_export.nn", "_scaled.py", LAYER, """
        from pax_export.nn._scaled import Scaled
        layer = Scaled(32, 8)
        assert layer.at("weight").init(jax.random.key(0)).weight.shape == (32, 8)
        assert pax.adapters.lora(layer, 2).adapters["default"].rank == 2
        assert pax.quantize(layer)[0].weight.form.bits == 8
        mesh = pax.sharding.abstract_mesh(model=2)
        table = pax.sharding.table(layer, mesh, pax.sharding.tensor_parallel())
        assert table["weight"].shard_shape == (32, 4)
        assert pax.precision.policy_of(pax.experimental.default_mp_policy(layer)) is not None
        assert pax.inspect(layer)["weight"].declared == "kernel [in, out]"
    """),
    "a transform": ("pax_export.transforms", "_again.py", TRANSFORM, """
        from pax_export.transforms._again import again
        average, x = pax.EMA(np.zeros(2, np.float32), 0.5), np.ones(2, np.float32)
        new, y = pax.module_and_value(again(lambda net, x: net(x)))(average, x)
        assert (y == (average % x)[1]).all()
        program = jax.make_jaxpr(again(lambda net, x: net(x)))(pax.Linear(2, 2), x)
        assert len(program.eqns) == 1  # that of jax.checkpoint
    """),
    "a format": ("pax_export.export.formats", "doubles/__init__.py", FORMAT, """
        layer = pax.Linear(3, 2, with_bias=False, rng_key=np.zeros(2, np.uint32))
        report = pax.export.to_doubles(layer, "m.npz", pax.export.spec("n, 3"))
        assert (report.target, report.validated) == ("doubles", "here")
        assert pax.export.load("m.npz")(np.ones((4, 3), np.float32)).shape == (4, 2)
        from pax_export.cli import main
        assert main(["inspect", "m.npz"]) == 0
    """),
    "an operation": ("pax_export.export.portable.decompositions", "doubling.py", OPERATION, """
        from jax.extend.core import Primitive
        from jax.interpreters import mlir

        twice = Primitive("twice")
        twice.def_abstract_eval(lambda x, by: x)
        mlir.register_lowering(twice, mlir.lower_fun(lambda x, by: x * by, False))
        def model(x):
            return twice.bind(x, by=3.0)
        for write in (pax.export.to_onnx, pax.export.to_tflite):
            report = write(model, write.__name__, pax.export.spec("2, 3"))
            assert report.validated == "here"
        from pax_export.export.tracing.flops import work_of
        work = work_of(jax.make_jaxpr(model)(np.ones((2, 3), np.float32)))
        assert (sum(work.flops.values()), work.uncounted) == (6, set())
    """),
    "a reader": ("pax_export.weights.sources", "_numbers.py", READER, """
        pathlib.Path("w.bin").write_bytes(
            b"NUMBERS!" + np.uint32(3).tobytes() + np.arange(3, dtype=np.float32).tobytes())
        from pax_export.weights.sources import open_source
        with open_source("w.bin") as source:
            assert source.kind == "numbers"
            assert source.entries["w"].read().tolist() == [0, 1, 2]
    """),
    "a family of models": ("pax_export.nets.decoder", "_toy.py", FAMILY, """
        import pax_export.nets.decoder._toy
        config = pax.nets.DecoderConfig.from_hf({"model_type": "toy", "use_bias": True})
        assert (config.output_bias, config.rotary_pairing, config.dim) == (True, "neighbors", 12)
        lm, tokens = pax.nets.Decoder(config), np.array([[3, 1, 4]])
        pax.generation.save_pretrained(lm, "lm", validate=False)
        assert (pax.nets.Decoder.from_pretrained("lm")(tokens) == lm(tokens)).all()
    """),
}  # fmt: skip

FOUND = """
import pathlib, sys
from importlib.machinery import PathFinder
class WithOneFileMore(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        if name == {package!r}:
            spec.submodule_search_locations.append({folder!r})
        return spec
sys.meta_path.insert(0, WithOneFileMore)
import jax
import numpy as np
import pax_export as pax
{use}
"""


@pytest.mark.parametrize("name", USES)
def test_one_file_is_an_addition(tmp_path, name):
    package, file, source, use = USES[name]
    path = tmp_path / "room" / file
    path.parent.mkdir(parents=True)
    path.write_text(textwrap.dedent(source))
    script = FOUND.format(package=package, folder=str(tmp_path / "room"), use=textwrap.dedent(use))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
