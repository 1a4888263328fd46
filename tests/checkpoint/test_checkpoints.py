"""A directory of checkpoints: what is saved, kept, restored and refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import pax_export as pax
from pax_export import opax
from pax_export.checkpoint import Checkpoints
from tests.checkpoint.models import batch, make_model, make_state, train_step
from tests.core.models import Free
from tests.refusals import refused

KINDS = {
    "epoch": 3,
    "rate": 0.1,
    "name": "digits",
    "done": True,
    "empty": jnp.zeros((0, 3)),
    "no_keys": jax.random.split(jax.random.key(0), 0),
    "keys": jax.random.split(jax.random.key(0, impl="rbg"), (2, 3)),
    "legacy": jax.random.PRNGKey(3),
    "numpy": np.arange(3.0),
    "number": np.float64(2.5),
    "other_order": np.arange(3, dtype=">i4"),
    "strided": np.arange(8, dtype=np.int16)[::2],
    "complex": np.ones(2, complex),
    "bool": jnp.array([True, False]),
    **{
        name: jnp.arange(4).astype(name)
        for name in ("bfloat16", "float8_e4m3fn", "float8_e3m4", "float4_e2m1fn", "int4", "uint4")
    },
}


def assert_same(one, other):
    assert jax.tree_util.tree_structure(one) == jax.tree_util.tree_structure(other)
    for path, x in jax.tree_util.tree_flatten_with_path(one)[0]:
        y = dict(jax.tree_util.tree_flatten_with_path(other)[0])[path]
        assert isinstance(x, jax.Array) == isinstance(y, jax.Array), path
        if not hasattr(x, "dtype"):
            assert type(x) is type(y)
        else:
            assert x.dtype == y.dtype, path
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


def refusal(kind, function, *args, **kwargs):
    with pytest.raises(kind) as refused:
        function(*args, **kwargs)
    return str(refused.value)


@pytest.fixture(scope="module")
def trained():
    """A state of training that is no longer as it was made."""
    pax.seed_rng_key(42)
    return train_step(make_state(), *batch(0))[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory, trained):
    """A run with one checkpoint."""
    with Checkpoints(tmp_path_factory.mktemp("run"), best="loss") as checkpoints:
        checkpoints.save(7, metrics={"loss": jnp.float32(0.5)}, kinds=KINDS, **trained)
        checkpoints.wait()
        yield checkpoints


def test_everything_comes_back(run, trained):
    state = run.restore(kinds=KINDS, **make_state())
    assert state.step == 7
    assert state.metrics == {"loss": 0.5}
    assert state.report.complete
    assert_same(state.pop("kinds"), KINDS)
    assert_same(dict(state), trained)


def test_into_shapes(run, trained):
    model = run.restore(model=jax.eval_shape(make_model))["model"]
    assert_same(model, trained["model"])


def test_an_optimizer_of_opax(tmp_path):
    model = make_model()
    optimizer = opax.adam(1e-2)(model.parameters())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, optimizer=optimizer)
    other = opax.adam(1e-2)(jax.tree_util.tree_map(jnp.ones_like, model.parameters()))
    assert_same(checkpoints.restore(optimizer=other)["optimizer"], optimizer)


def test_orbax_alone_reads_it_by_dotted_names(run, trained):
    names = dict(pax.core.named_leaves(trained["model"]))
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    with ocp.PyTreeCheckpointer() as reader:
        arrays = reader.restore(run.directory / "7" / "model", restore_args=how)
    assert arrays.keys() == names.keys()
    assert "modules.2.ema_mean.averages" in arrays
    np.testing.assert_array_equal(arrays["modules.0.weight"], trained["model"][0].weight)


def test_arrays_may_change_once_they_are_saved(tmp_path):
    array, donated = np.arange(1 << 20), jnp.arange(1 << 20)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, arrays={"numpy": array, "donated": donated})
        array[:] = -1
        jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(donated).block_until_ready()
    arrays = checkpoints.restore(arrays={"numpy": array, "donated": jnp.zeros_like(donated)})
    for saved in arrays["arrays"].values():
        np.testing.assert_array_equal(saved, np.arange(1 << 20))


def test_the_last_ones_and_the_best_stay(tmp_path):
    losses = [0.5, 0.1, float("nan"), 0.3, 0.1, 0.2, 0.4, 0.6]
    with Checkpoints(tmp_path, keep=2, best="loss") as checkpoints:
        for step, loss in enumerate(losses):
            checkpoints.save(step, metrics={"loss": loss}, x=jnp.zeros(1))
            if step == 3:
                checkpoints.open()  # waits
                assert checkpoints.steps == (1, 2, 3)
    assert checkpoints.steps == (4, 6, 7)
    assert (checkpoints.best, checkpoints.latest) == (4, 7)
    assert {path.name for path in tmp_path.iterdir()} == {"4", "6", "7"}
    # Another process, another rule.
    with Checkpoints(tmp_path, keep=1, best="loss", mode="max", asynchronous=False) as checkpoints:
        assert checkpoints.best == 7
        checkpoints.save(8, metrics={"loss": 0.0}, x=jnp.zeros(1))
        assert checkpoints.steps == (7, 8)


def test_a_run_that_goes_back(tmp_path):
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        for step in range(3):
            checkpoints.save(step, x=jnp.full(1, step))
        message = refusal(ValueError, checkpoints.save, 1, x=jnp.zeros(1))
        assert "got: step 1 after 1, 2" in message
        assert "got: step 1 after 1, 2\n  fix: checkpoints.delete(2)" in message
        for step in (2, 1):
            checkpoints.delete(step)
        checkpoints.save(1, x=jnp.full(1, 9))
    assert checkpoints.steps == (0, 1)
    assert checkpoints.restore(x=jnp.zeros(1, int))["x"] == 9
    refusal(FileNotFoundError, checkpoints.delete, 5)


def test_a_reader_leaves_a_writer_alone(tmp_path):
    """What another process is writing now is no leftover."""
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path) as reader:
        assert reader.latest is None
        refusal(FileNotFoundError, reader.restore, x=jnp.zeros(1))
    assert (tmp_path / "3.orbax-checkpoint-tmp").exists()
    with Checkpoints(tmp_path) as writer:
        writer.save(4, x=jnp.zeros(1))
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_another_model(run, trained):
    other = pax.Sequential(pax.Linear(4, 9), jax.nn.relu, pax.LayerNorm(9, -1, True, True))
    message = refusal(KeyError, run.restore, model=other)
    assert message.startswith("The checkpoint does not match the target:\n")
    for line in (
        "  - unknown to the module: model.modules.2.ema_mean.averages",
        "  - unknown to the module: model.modules.4.weight",
        "  - model.modules.0.weight: float32[4,8] in the file, float32[4,9] in the module",
        f"where: {run.directory}/7, which has {', '.join(['kinds', *trained])}",
    ):
        assert line in message
    state = run.restore(model=other, strict=False)
    assert state.report.loaded == ()
    assert_same(state["model"], other)


def test_a_changed_model(run, trained):
    wider = Free(modules=[*make_model().modules, pax.Linear(2, 3)])
    state = run.restore(model=wider, other=jnp.zeros(2), strict=False)
    assert set(state.report.missing) == {"model.modules.5.weight", "model.modules.5.bias", "other"}
    assert state.report.unexpected == ()
    np.testing.assert_array_equal(state["model"].modules[0].weight, trained["model"][0].weight)


def test_kinds_that_differ(run):
    target = {**KINDS, "epoch": "three", "keys": jax.random.split(jax.random.key(0), (2, 3))}
    message = refusal(ValueError, run.restore, kinds=target)
    assert "kinds.epoch: a Python int in the file, a Python str in the module" in message
    assert "kinds.keys: key<rbg>[2,3] in the file, key<threefry2x32>[2,3] in the" in message


def test_64_bits_that_jax_would_narrow(run):
    shapes = dict(KINDS, numpy=jax.ShapeDtypeStruct((3,), np.float64))
    message = refusal(TypeError, run.restore, kinds=shapes)
    assert "where: kinds.numpy" in message
    assert "jax_enable_x64" in message


@pytest.mark.parametrize("step", [-1, 1.5, "1", None, True])
def test_invalid_steps_are_refused(tmp_path, step):
    message = refusal(ValueError, Checkpoints(tmp_path).save, step, x=jnp.zeros(1))
    assert "The step of a checkpoint must be" in message and repr(step) in message


@pytest.mark.parametrize(
    "arguments",
    [{"keep": 0}, {"keep": True}, {"keep": 1.5}, {"best": "x", "mode": "most"}],
)
def test_invalid_rules_are_refused(tmp_path, arguments):
    name, value = list(arguments.items())[-1]
    message = refusal(ValueError, Checkpoints, tmp_path, **arguments)
    assert f"where: {name}" in message and repr(value) in message


def donated():
    array = jnp.zeros(4)
    array.delete()
    return array


LOSS = {"metrics": {"loss": 1}}


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda c: c.save(0, x={"a": jax.ShapeDtypeStruct((2,), np.float32)}, **LOSS),
         ["where: x.a", "got: ShapeDtypeStruct"]),
        (lambda c: c.save(0, x={"a": object()}, **LOSS), ["where: x.a", "got: object"]),
        (lambda c: c.save(0, x={"a": np.array(["text"])}, **LOSS), ["x.a"]),
        (lambda c: c.save(0, x={"a.b": np.zeros(1), "a": {"b": np.zeros(1)}}, **LOSS), ["a.b"]),
        (lambda c: c.save(0, x={"a": donated()}, **LOSS), ["x.a", "deleted"]),
        (lambda c: jax.jit(lambda x: c.save(0, x=x, **LOSS))(np.zeros(1)), ["where: x"]),
        (lambda c: c.save(0, x=np.zeros(1), metrics={"error": 1}),
         ["where: best='loss'", "got: metrics with error"]),
        (lambda c: c.save(0), ["save"]),
        (lambda c: c.save(0, about=np.zeros(1), **LOSS), ["'about'"]),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(call, names, tmp_path):
    with Checkpoints(tmp_path / "run", best="loss") as checkpoints:
        with refused(ValueError, *names):
            call(checkpoints)
    assert not (tmp_path / "run").exists()
    with refused(ValueError, "metric"):
        Checkpoints(tmp_path / "run").best


def test_places_without_checkpoints(tmp_path, run):
    message = refusal(FileNotFoundError, Checkpoints(tmp_path / "none").restore, x=jnp.zeros(1))
    assert "found no such directory" in message
    (tmp_path / "notes.txt").write_text("x")
    message = refusal(FileNotFoundError, Checkpoints(tmp_path).open)
    assert "found notes.txt" in message
    message = refusal(OSError, Checkpoints(tmp_path / "notes.txt").save, 0, x=jnp.zeros(1))
    assert "got: Not a directory" in message
    assert "got: step 8, found 7" in refusal(FileNotFoundError, run.open, 8)


def test_orbax_is_named_when_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "orbax.checkpoint", None)
    message = refusal(ImportError, Checkpoints(tmp_path).save, 0, x=jnp.zeros(1))
    assert 'python -m pip install "orbax-checkpoint>=0.12" (the extra [checkpoint]' in message


def test_a_failed_save_raises_and_the_next_one_works(tmp_path, monkeypatch):
    with Checkpoints(tmp_path / "run", best="loss") as checkpoints:
        checkpoints.save(1, x=jnp.zeros(3), metrics={"loss": 1})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr("pax_export.checkpoint._orbax.start_save", _full)
            message = refusal(OSError, checkpoints.save, 2, x=jnp.zeros(3), metrics={"loss": 0})
        assert "step 2" in message and "got: OSError: No space left on device" in message
        assert checkpoints.best == 1
        checkpoints.save(3, x=jnp.zeros(3), metrics={"loss": 2})
    assert checkpoints.steps == (1, 3)


def test_a_save_that_fails_among_processes_may_mean_a_lost_one(tmp_path, monkeypatch):
    def lost(*_):
        monkeypatch.setattr(jax, "process_count", lambda *_: 2)
        raise RuntimeError("Gloo: connection closed by peer")

    checkpoints = Checkpoints(tmp_path / "run")
    monkeypatch.setattr("pax_export.checkpoint._orbax.start_save", lost)
    message = refusal(OSError, checkpoints.save, 2, x=jnp.zeros(3))
    assert "processes" in message


def _full(*_):
    raise OSError("No space left on device")


def test_leaves_that_stay_on_disk(run, trained):
    checkpoint = run.open()
    assert checkpoint.trees == ("kinds", *trained)
    assert checkpoint.leaves["model.modules.0.weight"] == "float32[4,8]"
    assert checkpoint.leaves["rng"] == "key<threefry2x32>[]"
    stored = checkpoint.on_disk("model", jax.eval_shape(make_model))
    weight = stored[0].weight
    assert (weight.shape, weight.ndim, weight.size, weight.nbytes) == ((4, 8), 2, 32, 128)
    np.testing.assert_array_equal(np.asarray(weight), trained["model"][0].weight)
    assert np.asarray(weight, np.float64).dtype == np.float64
    assert repr(weight) == "StoredArray(model.modules.0.weight: float32[4, 8])"
    key = checkpoint.on_disk("rng", jax.random.key(0))
    assert (jax.random.key_data(key.read()) == jax.random.key_data(trained["rng"])).all()
    with refused(TypeError, "key_data"):
        np.asarray(key)
    assert checkpoint.on_disk("kinds", KINDS)["name"] == "digits"
    assert "model.weight" in refusal(ValueError, checkpoint.on_disk, "model", pax.Linear(4, 8))


def test_a_tree_without_leaves(tmp_path):
    scale = pax.precision.NoOpLossScale()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, loss_scale=scale)
    assert isinstance(checkpoints.restore(loss_scale=scale)["loss_scale"], type(scale))
