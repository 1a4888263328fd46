"""Exports of models on eight devices, and of models on disk, and how much memory they need.

export XLA_FLAGS=--xla_force_host_platform_device_count=8
python -m tests.export.deferred DIRECTORY MEBIBYTES

Prints the tests by name, then the peaks in MiB beyond what the process held before.
"""

import json
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export.checkpoint import Checkpoints
from pax_export.export import load, spec, to_saved_model, to_stablehlo
from tests.closeness import assert_close
from tests.export.measure_memory import ROWS, model
from tests.memory import peak
from tests.refusals import refused

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
RULES = {"*.weight": P("model", None)}


def make_net():
    pax.seed_rng_key(42)
    return pax.Sequential(pax.Linear(4, 8), jax.nn.relu, pax.Dropout(0.5), pax.Linear(8, 2))


def on_mesh(net):
    return pax.sharding.shard(net, pax.sharding.make_mesh(data=4, model=2), RULES)


def expect(path):
    assert_close(load(path)(X), make_net().eval()(X), rtol=1e-5, atol=1e-6)


def test_a_model_on_eight_devices(folder):
    net = on_mesh(make_net())
    for validate in (True, "variables"):
        report = to_saved_model(
            net, folder / "sharded", spec("n, 4"), validate=validate, trainable=True, overwrite=True
        )
        assert report.validated == ("here" if validate is True else validate)
        expect(folder / "sharded")
    assert "the variables alone, without calls" in str(report)


def test_a_checkpoint_on_disk(folder):
    with Checkpoints(folder / "run") as checkpoints:
        checkpoints.save(1, model=on_mesh(make_net()))
    net = checkpoints.open().on_disk("model", jax.eval_shape(make_net))
    for validate in (True, "variables"):
        to_saved_model(net, folder / "disk", spec("n, 4"), validate=validate, overwrite=True)
        expect(folder / "disk")
    to_stablehlo(net, folder / "bundle", spec("n, 4"))
    expect(folder / "bundle")


def test_a_changed_variable_is_refused(folder, monkeypatch):
    from pax_export.export.formats.saved_model import writer as saved_model

    write = saved_model.write

    def wrong(directory, store, *others):
        correct = store.variables[0].value
        store.variables[0].value = np.zeros_like(correct)
        write(directory, store, *others)
        store.variables[0].value = correct

    monkeypatch.setattr(saved_model, "write", wrong)
    for net in (make_net(), on_mesh(make_net())):
        with refused(pax.errors.ValidationError, "variable", "where: modules.0.weight"):
            to_saved_model(net, folder / "wrong", spec("n, 4"), validate="variables")
        assert not (folder / "wrong").exists()


def test_keys_and_narrow_integers(folder):
    mesh = pax.sharding.make_mesh(data=8)
    params = {
        "key": jax.random.split(jax.random.key(0), 8),
        "table": jnp.arange(-8, 8).astype(jnp.int4),
    }
    params = jax.device_put(params, NamedSharding(mesh, P("data")))

    def function(params, x):
        noise = jax.random.normal(params["key"][3], ())
        return x * params["table"].astype(jnp.float32).sum() + noise

    to_saved_model((params, function), folder / "kinds", spec("n"), state="keep")
    assert np.isfinite(load(folder / "kinds")(X[0])).all()


def on_devices(folder, size):
    by_row = NamedSharding(pax.sharding.make_mesh(data=8), P("data"))
    params, function = model(size, "jax")
    return jax.block_until_ready(jax.device_put(params, by_row)), function


def on_disk(folder, size):
    params, function = model(size, "jax")
    with Checkpoints(folder / "large") as checkpoints:
        checkpoints.save(size, params=params)
    shapes = jax.eval_shape(lambda: params)
    return checkpoints.open().on_disk("params", shapes), function


def main(folder, size):
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            needs = {"monkeypatch"} & set(test.__code__.co_varnames[: test.__code__.co_argcount])
            with pytest.MonkeyPatch.context() as patch:
                test(folder, *([patch] if needs else []))
            print(name)
    peaks = {}
    for make in (on_devices, on_disk):
        for mebibytes in (1, size):  # what is loaded once comes first
            given = make(folder, mebibytes)
            with peak(peaks, make.__name__):
                to_saved_model(
                    given, folder / "saved", spec(f"n, {ROWS}"), validate="variables",
                    overwrite=True,
                )  # fmt: skip
    print(json.dumps(peaks))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(Path(sys.argv[1]), int(sys.argv[2]))
