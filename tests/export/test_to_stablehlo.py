"""Models through `to_stablehlo` and back through `load`, called by jax."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from pax_export import _errors
from pax_export._errors import ExportPathError
from pax_export._files import checksums
from pax_export.export import Report, load, renew, spec, to_stablehlo
from tests.closeness import assert_close, is_close
from tests.export.models import Counter, Net, affine, affine_params, random

CPU = ("cpu",)


@pytest.fixture(scope="module")
def net():
    return Net()


@pytest.fixture(scope="module")
def path(tmp_path_factory, net):
    """One bundle for the tests that only read: gradients of second order, a symbolic batch."""
    path = tmp_path_factory.mktemp("bundle") / "net"
    to_stablehlo(net, path, spec("batch, 3"), vjp_order=2)
    return path


@pytest.fixture(scope="module")
def bundle(path):
    return load(path)


def test_the_loaded_bundle_computes_what_the_model_does(bundle, net):
    for batch in (1, 4):
        x = random(batch, 3)
        assert_close(bundle(x), net(x), rtol=1e-6)
    assert isinstance(bundle(random(1, 3)), jax.Array)
    assert bundle.report.largest_error["serving_default: output"] < 1e-6


def test_it_works_under_jit_and_traces_once(bundle, net):
    traces = []

    @jax.jit
    def call(x):
        traces.append(x)
        return bundle(x)

    for _ in range(2):
        assert_close(call(random(2, 3)), net(random(2, 3)), rtol=1e-6)
    assert len(traces) == 1


def test_plain_calls_are_compiled_once(bundle):
    caller = bundle._functions.callers["serving_default"]
    before = caller._cache_size()
    for _ in range(3):
        bundle(random(6, 3))
    assert caller._cache_size() == before + 1


def test_gradients_of_inputs_and_weights(bundle, net):
    x = random(2, 3)

    def loss(model, x):
        return (model(x) ** 2).sum()

    expected = jax.grad(lambda layer, x: (jnp.tanh(layer(x)) ** 2).sum(), (0, 1))(net.layer, x)
    model, found = jax.grad(loss, (0, 1))(bundle, x)
    assert_close(found, expected[1], rtol=1e-5, atol=1e-6)
    assert_close(model.weights["layer.weight"], expected[0].weight, rtol=1e-5, atol=1e-6)


def test_second_order_gradients(bundle, net):
    x = random(2, 3)

    def hessian(model):
        return jax.jacrev(jax.grad(lambda x: (model(x) ** 2).sum()))(x)

    assert_close(hessian(bundle), hessian(net), rtol=1e-4, atol=1e-6)


def test_vmap_of_calls_gradients_and_weights(bundle, net):
    xs = random(4, 2, 3)
    assert_close(jax.vmap(bundle)(xs), jax.vmap(net)(xs), rtol=1e-6)
    both = jax.vmap(jax.vmap(lambda x: bundle(x[None])[0]))(xs)
    assert_close(both, jax.vmap(net)(xs), rtol=1e-6)

    def gradient(model):
        return jax.vmap(jax.grad(lambda x: (model(x) ** 2).sum()))(xs)

    assert_close(gradient(bundle), gradient(net), rtol=1e-5, atol=1e-6)
    of_batch = jax.grad(lambda xs: (jax.vmap(bundle)(xs) ** 2).sum())(xs)
    assert_close(of_batch, gradient(net), rtol=1e-5, atol=1e-6)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), bundle)
    ensemble = jax.vmap(lambda model: model(xs[0]))(several)
    assert_close(ensemble[0], net(xs[0]), rtol=1e-6)
    assert not is_close(ensemble[0], ensemble[1])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_forward_mode_is_refused_in_our_words(bundle, wrap):
    x = random(1, 3)
    with pytest.raises(_errors.NotDifferentiableError, match="no forward-mode derivatives"):
        jax.jvp(wrap(lambda x: bundle(x)), (x,), (x,))
    with pytest.raises(TypeError, match="jax.jacrev"):
        jax.jacfwd(wrap(lambda x: bundle(x).sum()))(x)


def test_a_gradient_beyond_the_order_is_refused(tmp_path, net):
    to_stablehlo(net, tmp_path / "net", spec("2, 3"), platforms=CPU, validate=False)
    bundle = load(tmp_path / "net")
    with pytest.raises(_errors.NotDifferentiableError) as caught:
        jax.grad(lambda x: bundle(x).sum())(random(2, 3))
    assert "exported with no gradient" in str(caught.value)
    assert caught.value.write == "to_stablehlo(..., vjp_order=1)"


def test_weights_can_be_read_and_replaced(bundle, path, net):
    stored = safetensors.numpy.load_file(path / "weights.safetensors")
    np.testing.assert_array_equal(stored["layer.weight"], net.layer.weight)
    zero = bundle.replace_weights({"layer.weight": jnp.zeros((3, 4)), "layer.bias": jnp.ones(4)})
    assert_close(zero(random(2, 3)), np.tanh(np.ones((2, 4))), rtol=1e-6)
    assert_close(bundle(random(2, 3)), net(random(2, 3)), rtol=1e-6)
    with pytest.raises(_errors.InvalidArgumentError, match="no such weight"):
        bundle.replace_weights({"weight": jnp.zeros((3, 4))})
    with pytest.raises(_errors.InvalidArgumentError, match=r"write: float32\[3, 4\]"):
        bundle.replace_weights({"layer.weight": jnp.zeros((4, 3))})


def test_it_is_a_pytree_and_can_be_pickled(bundle):
    assert [leaf.shape for leaf in jax.tree.leaves(bundle)] == [(3, 4), (4,)]
    again = pickle.loads(pickle.dumps(bundle))
    assert jax.tree.structure(again) == jax.tree.structure(bundle)
    assert_close(again(random(2, 3)), bundle(random(2, 3)), rtol=1e-6)


def test_several_methods_nested_outputs_and_keywords(tmp_path, net):
    to_stablehlo(
        net,
        tmp_path / "net",
        {"serving_default": spec("batch, 3"), "encode": spec("batch, 3")},
        kwargs={"encode": {"scale": spec("")}},
        methods={"serving_default": "__call__", "encode": "encode"},
        platforms=CPU,
    )
    bundle = load(tmp_path / "net")
    x = random(2, 3)
    found = bundle.signatures["encode"](x, scale=2.0)
    expected = net.encode(x, scale=2.0)
    assert sorted(found) == ["code", "total"]
    assert_close(found["code"], expected["code"], rtol=1e-6)
    assert_close(found["total"], expected["total"], rtol=1e-6)
    assert sorted(bundle.exported) == ["encode", "serving_default"]


def test_closed_over_arrays_are_weights_and_ties_are_kept(tmp_path):
    table = jnp.asarray(random(20, 20))
    params = {"a": table, "b": table}
    extra = random(20, 20)
    model = (params, lambda p, x: x @ p["a"] @ p["b"].T @ extra)
    to_stablehlo(model, tmp_path / "m", spec("n, 20"), platforms=CPU)
    bundle = load(tmp_path / "m")
    assert list(bundle.weights) == ["a", "constants.0"]
    assert bundle.report.variables[0].leaves == ("['a']", "['b']")


def test_weights_as_constants(tmp_path, net):
    to_stablehlo(net, tmp_path / "net", spec("batch, 3"), weights="constants", platforms=CPU)
    bundle = load(tmp_path / "net")
    assert not bundle.weights
    assert not (tmp_path / "net" / "weights.safetensors").exists()
    assert_close(bundle(random(2, 3)), net(random(2, 3)), rtol=1e-6)


def test_state_is_handed_on_and_never_lost(tmp_path):
    to_stablehlo(Counter(), tmp_path / "c", spec("n"), state="update", platforms=CPU)
    bundle = load(tmp_path / "c")
    after, one = bundle.purecall(jnp.zeros(1))
    _, two = after.purecall(jnp.zeros(1))
    assert (float(one[0]), float(two[0])) == (1.0, 2.0)
    assert int(bundle.weights["steps"]) == 0
    with pytest.raises(_errors.StateChangeError, match="purecall"):
        bundle(jnp.zeros(1))
    with pytest.raises(_errors.StateChangeError, match="where: steps"):
        to_stablehlo(Counter(), tmp_path / "d", spec("n"))


def test_integer_outputs_beside_gradients(tmp_path):
    def classify(params, x):
        logits = affine(params, x)
        return {"logits": logits, "class": jnp.argmax(logits, -1)}

    model = (affine_params(), classify)
    to_stablehlo(model, tmp_path / "m", spec("n, 3"), vjp_order=1, platforms=CPU)
    bundle = load(tmp_path / "m")
    found = jax.grad(lambda x: bundle(x)["logits"].sum())(random(2, 3))
    expected = np.broadcast_to(affine_params()["w"].sum(1), (2, 3))
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert bundle(random(2, 3))["class"].dtype == jnp.int32


def test_wrong_arguments_name_the_input(bundle):
    with pytest.raises(_errors.InvalidArgumentError, match=r"serving_default: x"):
        bundle(random(2, 4))
    with pytest.raises(_errors.InvalidArgumentTypeError, match="another dtype"):
        bundle(jnp.ones((2, 3), jnp.int32))
    with pytest.raises(_errors.InvalidArgumentError, match="other arguments"):
        bundle(random(2, 3), random(2, 3))


# What lies in the folder.


def test_portable_stablehlo_is_of_the_oldest_version(path):
    report = Report.read(path)
    assert (report.target, report.stablehlo) == ("stablehlo", "0.9.0")
    assert b"StableHLO_v0.9.0" in (path / "serving_default.mlirbc").read_bytes()
    assert "stablehlo.dot_general" in (path / "serving_default.mlir").read_text()
    assert (path / "serving_default.vjp2.mlirbc").exists()


def test_jax_alone_reads_its_part(path, net):
    data = bytearray((path / "serving_default.jax_export").read_bytes())
    exported = jax.export.deserialize(data)
    weights = safetensors.numpy.load_file(path / "weights.safetensors")
    found = exported.call(weights, {"x": random(2, 3)})
    assert_close(found["output"]["output"], net(random(2, 3)), rtol=1e-6)


def test_no_path_of_this_machine_is_in_it(path):
    for file in path.iterdir():
        assert not re.search(rb"/(home|root|tmp|usr|work)/", file.read_bytes()), file


@pytest.fixture
def damaged(path, tmp_path):
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    "file",
    ["serving_default.jax_export", "serving_default.mlirbc", "weights.safetensors",
     "pax_export.json"],
)  # fmt: skip
@pytest.mark.parametrize("how", ["corrupt", "cut short", "missing"])
def test_damaged_files_are_named(damaged, file, how):
    content = (damaged / file).read_bytes()
    if how == "missing":
        (damaged / file).unlink()
    elif how == "cut short":
        (damaged / file).write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        changed = bytes([content[middle] ^ 1])
        (damaged / file).write_bytes(content[:middle] + changed + content[middle + 1 :])
    with pytest.raises(_errors.ExportPathError) as caught:
        load(damaged)
    assert file in f"{caught.value.where} {caught.value.got}"


def test_foreign_folders_and_missing_hashes(damaged, tmp_path):
    (damaged / "SHA256SUMS").unlink()
    with pytest.raises(_errors.ExportPathError, match="hashes of this bundle cannot be read"):
        load(damaged)
    (damaged / "pax_export.json").write_text("{}")
    with pytest.raises(_errors.ExportPathError, match="cannot be read"):
        load(damaged)
    with pytest.raises(_errors.ExportPathError, match="no export of pax_export"):
        load(tmp_path / "nothing")


def test_bytes_that_this_jax_cannot_read_are_made_again(damaged, net):
    """The bytes of another jax fail; the portable modules beside them do not."""
    (damaged / "serving_default.jax_export").write_bytes(b"from the future")
    checksums.write(damaged)
    bundle = load(damaged)
    x = random(2, 3)
    assert_close(bundle(x), net(x), rtol=1e-6)
    second = jax.jacrev(jax.grad(lambda x: bundle(x).sum()))(x)
    assert_close(second, jax.jacrev(jax.grad(lambda x: net(x).sum()))(x), rtol=1e-4, atol=1e-6)
    renew(damaged)
    data = bytearray((damaged / "serving_default.jax_export").read_bytes())
    assert jax.export.deserialize(data).has_vjp()
    assert_close(load(damaged)(x), net(x), rtol=1e-6)


def test_without_portable_modules_it_says_what_is_missing(damaged):
    (damaged / "serving_default.jax_export").write_bytes(b"from the future")
    report = json.loads((damaged / "pax_export.json").read_text())
    report["details"]["functions"]["serving_default"]["kept"] = []
    (damaged / "pax_export.json").write_text(json.dumps(report))
    checksums.write(damaged)
    with pytest.raises(_errors.ExportPathError, match="This jax does not read this file"):
        load(damaged)
    with pytest.raises(_errors.ExportPathError, match="no portable modules"):
        renew(damaged)


def test_it_is_whole_or_not_there(tmp_path, net, monkeypatch):
    from pax_export.export.formats.stablehlo import files as stablehlo

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(stablehlo, "write_weights", fail)
    with pytest.raises(OSError, match="disk full"):
        to_stablehlo(net, tmp_path / "net", spec("2, 3"), platforms=CPU)
    assert not list(tmp_path.iterdir())


def test_validation_compares_with_the_model(tmp_path, net, monkeypatch):
    from pax_export.export.formats.stablehlo import files as stablehlo

    write = stablehlo.write_weights
    monkeypatch.setattr(
        stablehlo,
        "write_weights",
        lambda directory, weights: write(directory, {k: v + 1 for k, v in weights.items()}),
    )
    with pytest.raises(_errors.ValidationError, match="differ"):
        to_stablehlo(net, tmp_path / "net", spec("2, 3"), platforms=CPU)
    assert not list(tmp_path.iterdir())


def test_validation_in_a_fresh_process(tmp_path):
    model = (affine_params(), affine)
    report = to_stablehlo(
        model, tmp_path / "m", spec("n, 3"), vjp_order=1, platforms=CPU, validate="process"
    )
    assert report.validated == "process"
    assert "serving_default: gradient:w" in report.largest_error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vjp_order": -1}, "vjp_order counts"),
        ({"vjp_order": True}, "vjp_order counts"),
        ({"weights": "inside"}, "weights has a value that means nothing"),
        ({"weights": "constants", "state": "update"}, "cannot take new state"),
        ({"platforms": "abacus"}, "platforms to lower for"),
        ({"inputs": None}, "inputs of this model must be described"),
    ],
)
def test_wrong_options(tmp_path, net, options, message):
    inputs = options.pop("inputs", spec("2, 3"))
    with pytest.raises(ValueError, match=message):
        to_stablehlo(net, tmp_path / "net", inputs, **options)
    assert not list(tmp_path.iterdir())


# --- what calls Python -------------------------------------------------------------------

PYTHON = """
module @jit_f {
  func.func public @main(%arg0: tensor<2xf32>) -> tensor<2xf32> {
    %0 = stablehlo.custom_call @NAME(%arg0) {api_version = 4 : i32,
        backend_config = {index = 7 : ui64}} : (tensor<2xf32>) -> tensor<2xf32>
    return %0 : tensor<2xf32>
  }
}
"""


def calling(name):
    """A module that calls something outside of it."""
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo
    from jax.interpreters import mlir

    with mlir.make_ir_context():
        module = ir.Module.parse(PYTHON.replace("NAME", name))
        return stablehlo.serialize_portable_artifact(module, "1.10.0")


def hostile(path, name, in_gradient=False):
    exported = jax.export.export(jax.jit(lambda x: x + 1), platforms=("cpu",))(jnp.ones(2))
    if in_gradient:
        gradient = dataclasses.replace(exported.vjp(), mlir_module_serialized=calling(name))
        made = dataclasses.replace(exported, _get_vjp=lambda _: gradient)
    else:
        made = dataclasses.replace(exported, mlir_module_serialized=calling(name))
    to_stablehlo(made, path, None, validate=False, vjp_order=int(in_gradient))
    return path


@pytest.mark.parametrize("name", ["xla_ffi_python_cpu_callback", "xla_python_gpu_callback"])
@pytest.mark.parametrize("in_gradient", [False, True])
def test_a_bundle_that_calls_python_is_refused_before_it_ends_the_process(
    tmp_path, name, in_gradient
):
    with pytest.raises(ExportPathError) as caught:
        load(hostile(tmp_path / "b", name, in_gradient))
    assert caught.value.what == (
        "A function of this bundle calls Python functions of the process that wrote it."
    )
    assert caught.value.got == name
    assert caught.value.where == str(tmp_path / "b" / "serving_default.jax_export")


def test_a_bundle_that_calls_a_library_is_read(tmp_path):
    load(hostile(tmp_path / "b", "of_a_library_callback"))
