"""A format of another package in one file, with public imports alone: one product, as npz."""

import numpy as np

from pax_export.export import LoadedFile
from pax_export.export.formats import Format, export_as

TOY = Format(
    name="toy",
    title="a toy",
    export="tests.export.formats.toy_format:to_toy",
    load="tests.export.formats.toy_format:load",
    run="tests.export.formats.toy_format:run",
    suffix=".toy",
    options={"scale": {"type": float, "help": "of toy: what the bias is multiplied by"}},
    run_imports=("jax", "pax_export"),
)


def to_toy(model, path, inputs, *, scale=1.0, **options):
    def write(place, programs):
        (program,) = programs
        weight, bias = program.weights["weight"], program.weights["bias"]
        with place.open("wb") as file:
            np.savez(file, weight=weight, bias=scale * bias)
        return {"runs_in": "numpy"}

    return export_as(TOY, write, model, path, inputs, **options)


def function(path):
    with np.load(path) as stored:
        weight, bias = stored["weight"], stored["bias"]
    return lambda inputs: {"output": (inputs["x"] @ weight + bias).astype(np.float32)}


def run(path, calls):
    return [function(path)(each["inputs"]) for each in calls]


def load(path, report):
    call = function(path)
    return LoadedFile(report, None, lambda key, inputs: call(inputs))
