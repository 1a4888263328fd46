"""Plants faults in exports of the models of the suite, and sees whether each one is named.

    python -m tests.models.faults [--formats saved_model,onnx,tflite] [--count 20]

For each format so many faults that a test of the export finds, one of each kind in a model; a
line for each says which operation was hit, and which one the error named.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pax_export as pax
from pax_export.core import labelled
from pax_export.errors import ValidationError
from tests.export.planted import KINDS, PLANTERS, Fault, Planter, is_named
from tests.export.targets import TARGETS
from tests.models.formats import Subject
from tests.models.registry import all_models

WRITERS = {
    "saved_model": (pax.export.to_saved_model, "", {"platforms": ("cpu",), "vjp_order": 0}),
    "onnx": (pax.export.to_onnx, ".onnx", {}),
    "tflite": (pax.export.to_tflite, ".tflite", {}),
}
#: Of each field some that jax compiles soon.
BATTERY = (
    "mixed_precision resnet graph_attention bert unet mobilenet vit real_nvp point_net wavenet "
    "mlp_mixer schnet super_resolution linear_attention gpt convnext deeplab"
).split()


def subjects() -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    """Models with their inputs: those of the exporter's tests, and some of the battery."""
    for target in TARGETS:
        yield target.name, labelled(target.build()), target.inputs, {}
    known = all_models()
    for name in BATTERY:
        if name in known:
            try:
                subject = Subject(known[name])
            except ModuleNotFoundError as missing:
                print(f"{name}: {missing}", flush=True)
                continue
            yield name, subject.given, subject.inputs, {"constraints": subject.constraints}


def tried(form: str, count: int) -> tuple[int, int]:
    """How many faults were named, of how many that a test found."""
    write, suffix, options = WRITERS[form]
    named = found = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"model{suffix}")
        for name, model, inputs, more in subjects():
            if found >= count:
                break
            given = {"overwrite": True, **options, **more}
            planter = Planter()
            try:
                with PLANTERS[form](planter):
                    write(model, path, inputs, validate=False, **given)
            except pax.errors.PaxError:
                continue  # the format has no such model
            for fault in _one_of_each(planter.found):
                if found >= count:
                    break
                begin = time.perf_counter()
                planter = Planter(fault)
                try:
                    with PLANTERS[form](planter):
                        write(model, path, inputs, **given)
                except ValidationError as error:
                    right = error.parting is not None and is_named(
                        error.parting, planter.sources[0]
                    )
                    found, named = found + 1, named + right
                    said = "named" if right else f"NOT NAMED, {planter.sources[0]}"
                    print(
                        f"{form} {name} {fault.kind} {fault.operation}: {said}: {error.parting}"
                        f" ({time.perf_counter() - begin:.0f} s)",
                        flush=True,
                    )
    return named, found


def _one_of_each(faults: Sequence[Fault]) -> Iterator[Fault]:
    """One of each kind, from the middle of a model."""
    for kind in KINDS:
        alike = [fault for fault in faults if fault.kind == kind]
        yield from itertools.islice(alike, len(alike) // 2, len(alike) // 2 + 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default=",".join(WRITERS), help="some of %(default)s")
    parser.add_argument("--count", type=int, default=20)
    given = parser.parse_args(argv)
    results = {form: tried(form, given.count) for form in given.formats.split(",")}
    for form, (named, found) in results.items():
        print(f"{form}: {named} of {found} named")
    return 0 if all(named == found for named, found in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
