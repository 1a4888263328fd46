"""Models through `to_stablehlo` and back through `load`, called by jax."""

import dataclasses
import json
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.lax import linalg

from pax_export import errors
from pax_export.errors import ExportPathError, UntrustedExportError
from pax_export.export import Report, load, renew, spec, to_stablehlo
from pax_export.export.formats.stablehlo import library_calls
from tests.closeness import assert_close, is_close
from tests.export import attacks
from tests.export.models import Counter, Net, affine, affine_params, random, rehash
from tests.refusals import refused

CPU = ("cpu",)


@pytest.fixture(scope="module")
def net():
    return Net()


@pytest.fixture(scope="module")
def path(tmp_path_factory, net):
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
    with pytest.raises(errors.InvalidArgumentTypeError, match="a different dtype"):
        bundle(jnp.ones((2, 3), jnp.int32))
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


FACTOR = jnp.linalg.cholesky(jnp.eye(4) + 1).T
WITHOUT_GUARANTEE = {
    "cholesky_update": (lambda x: linalg.cholesky_update(FACTOR, x[0]), "cuda"),
    "ormqr": (lambda x: linalg.ormqr(x, x[0] / 9, x), "cpu"),
    "symmetric_product": (lambda x: linalg.symmetric_product(x, x), "cuda"),
    "tridiagonal_solve": (lambda x: linalg.tridiagonal_solve(x[0], x[1] + 9, x[2], x), "rocm"),
}


def third_party(function):
    primitive = Primitive("third_party_solve")
    primitive.def_impl(function)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    return primitive.bind


WITHOUT_GUARANTEE["ormqr of a third party"] = (third_party(WITHOUT_GUARANTEE["ormqr"][0]), "cpu")


@pytest.mark.parametrize("name", WITHOUT_GUARANTEE)
def test_calls_without_a_guarantee_are_decomposed(tmp_path, name):
    """Each is needed until jax guarantees the call."""
    if not hasattr(linalg, name.partition(" ")[0]):
        pytest.skip("not in this version of jax")
    function, platform = WITHOUT_GUARANTEE[name]
    with pytest.raises(ValueError, match="custom call"):
        jax.export.export(jax.jit(function), platforms=[platform])(jnp.ones((4, 4)))
    to_stablehlo(function, tmp_path / "b", spec("4, 4"), vjp_order=int(name == "tridiagonal_solve"))
    x = random(4, 4)
    assert_close(load(tmp_path / "b")(x), function(x), rtol=1e-5)


@pytest.mark.parametrize("name", ["eigh", "svd", "lu"])
def test_matrices_of_any_size_are_decomposed_by_the_library_of_the_platform(tmp_path, name):
    function = getattr(linalg, name)
    to_stablehlo(function, tmp_path / "b", spec("n, n"), platforms=("cpu",))
    x = random(3, 3)
    for found, expected in zip(load(tmp_path / "b")(x), function(x), strict=True):
        assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_refused_call_is_named_with_its_line(tmp_path):
    def apply(x):
        return jax.lax.linalg.eig(x)[0].real

    place = "test_to_stablehlo.py"
    with refused(errors.UnsupportedOperationError, "cuhybrid_eig", place):
        to_stablehlo(apply, tmp_path / "b", spec("4, 4"), platforms=("cuda",), validate=False)
    with refused(errors.UnsupportedOperationError, "eig", place) as error:
        to_stablehlo(apply, tmp_path / "b", spec("4, 4"))
    assert error.value.write.endswith("platforms= without 'tpu'")


def test_plain_calls_are_compiled_once(bundle):
    caller = bundle._functions.callers["serving_default"]
    before = caller._cache_size()
    for _ in range(3):
        bundle(random(6, 3))
    assert caller._cache_size() == before + 1


def test_gradients_of_inputs_and_weights(bundle, net):
    x = random(2, 3)
    expected = jax.grad(lambda layer, x: (jnp.tanh(layer(x)) ** 2).sum(), (0, 1))(net.layer, x)
    model, found = jax.grad(lambda model, x: (model(x) ** 2).sum(), (0, 1))(bundle, x)
    assert_close(found, expected[1], rtol=1e-5, atol=1e-6)
    assert_close(model.weights["layer.weight"], expected[0].weight, rtol=1e-5, atol=1e-6)


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
def test_forward_mode_is_refused(bundle, wrap):
    x = random(1, 3)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(wrap(lambda x: bundle(x)), (x,), (x,))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jacfwd(wrap(lambda x: bundle(x).sum()))(x)


def test_weights_can_be_read_and_replaced(bundle, path, net):
    stored = safetensors.numpy.load_file(path / "weights.safetensors")
    np.testing.assert_array_equal(stored["layer.weight"], net.layer.weight)
    zero = bundle.replace_weights({"layer.weight": jnp.zeros((3, 4)), "layer.bias": jnp.ones(4)})
    assert_close(zero(random(2, 3)), np.tanh(np.ones((2, 4))), rtol=1e-6)
    assert_close(bundle(random(2, 3)), net(random(2, 3)), rtol=1e-6)
    with pytest.raises(errors.InvalidArgumentError, match="not have this weight"):
        bundle.replace_weights({"weight": jnp.zeros((3, 4))})
    with pytest.raises(errors.InvalidArgumentError, match=r"fix: float32\[3, 4\]"):
        bundle.replace_weights({"layer.weight": jnp.zeros((4, 3))})
    with refused(errors.InvalidArgumentError, where="layer.bias", got="list[4]"):
        bundle.replace_weights({"layer.bias": [0.0] * 4})
    with pytest.raises(AttributeError):
        bundle.replace_weights(3)


def test_it_is_a_pytree_and_can_be_pickled(bundle):
    assert [leaf.shape for leaf in jax.tree.leaves(bundle)] == [(3, 4), (4,)]
    again = pickle.loads(pickle.dumps(bundle))
    assert jax.tree.structure(again) == jax.tree.structure(bundle)
    assert_close(again(random(2, 3)), bundle(random(2, 3)), rtol=1e-6)


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
    with pytest.raises(errors.StateChangeError, match="purecall"):
        bundle(jnp.zeros(1))
    with pytest.raises(errors.StateChangeError, match="where: steps"):
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
@pytest.mark.parametrize("how", ["corrupt", "truncated", "missing"])
def test_damaged_files_are_named(damaged, file, how):
    content = (damaged / file).read_bytes()
    if how == "missing":
        (damaged / file).unlink()
    elif how == "truncated":
        (damaged / file).write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        changed = bytes([content[middle] ^ 1])
        (damaged / file).write_bytes(content[:middle] + changed + content[middle + 1 :])
    with pytest.raises(errors.ExportPathError) as caught:
        load(damaged)
    assert file in f"{caught.value.where} {caught.value.got}"


def test_foreign_folders_and_missing_hashes(damaged, tmp_path):
    (damaged / "SHA256SUMS").unlink()
    with pytest.raises(errors.ExportPathError, match="hashes of this bundle cannot be read"):
        load(damaged)
    (damaged / "pax_export.json").write_text("{}")
    with pytest.raises(errors.ExportPathError, match="cannot be read"):
        load(damaged)
    with pytest.raises(errors.ExportPathError, match="not an export of pax_export"):
        load(tmp_path / "nothing")


def test_bytes_that_this_jax_cannot_read_are_made_again(damaged, net):
    """The bytes of another jax fail; the portable modules beside them do not."""
    (damaged / "serving_default.jax_export").write_bytes(b"from the future")
    rehash(damaged)
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
    rehash(damaged)
    with pytest.raises(errors.ExportPathError, match="This jax does not read this file"):
        load(damaged)
    with pytest.raises(errors.ExportPathError, match="no portable modules"):
        renew(damaged)


def test_validation_compares_with_the_model(tmp_path, net, monkeypatch):
    from pax_export.export.formats.stablehlo import files as stablehlo

    write = stablehlo.write_weights
    monkeypatch.setattr(
        stablehlo,
        "write_weights",
        lambda directory, weights: write(directory, {k: v + 1 for k, v in weights.items()}),
    )
    with pytest.raises(errors.ValidationError, match="differ"):
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
        ({"vjp_order": -1}, "vjp_order must be"),
        ({"vjp_order": True}, "vjp_order must be"),
        ({"weights": "inside"}, "unknown value"),
        ({"weights": "constants", "state": "update"}, "cannot take new state"),
        ({"platforms": "abacus"}, "platforms: expected"),
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
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

    with mlir.make_ir_context():
        module = ir.Module.parse(PYTHON.replace("NAME", name))
        return stablehlo.serialize_portable_artifact(module, "1.10.0")


def hostile(path, name, in_gradient):
    exported = jax.export.export(jax.jit(lambda x: x + 1), platforms=("cpu",))(jnp.ones(2))
    program = dataclasses.replace(
        exported.vjp() if in_gradient else exported, mlir_module_serialized=calling(name)
    )
    if in_gradient:
        program = dataclasses.replace(exported, _get_vjp=lambda _, gradient=program: gradient)
    to_stablehlo(program, path, None, validate=False, vjp_order=int(in_gradient))
    return path


@pytest.mark.parametrize(
    ("name", "in_gradient"),
    [("xla_ffi_python_cpu_callback", False), ("xla_python_gpu_callback", True)],
)
def test_a_bundle_that_calls_python_is_refused_before_it_ends_the_process(
    tmp_path, name, in_gradient
):
    with refused(
        ExportPathError, got=name, where=str(tmp_path / "b" / "serving_default.jax_export")
    ):
        load(hostile(tmp_path / "b", name, in_gradient))


@pytest.mark.parametrize(
    ("name", "in_gradient"),
    [("memset", False), ("system", True), ("of_a_library_callback", False)],
)
def test_a_bundle_that_calls_what_nobody_knows_is_to_be_trusted(tmp_path, name, in_gradient):
    path = hostile(tmp_path / "b", name, in_gradient)
    with refused(
        UntrustedExportError,
        where=f"{path}: serving_default",
        got=f"calls of {name}",
        write="trusted=True, if you trust its source and allow these operations",
    ):
        load(path)
    load(path, trusted=True)


def test_a_bundle_that_waits_for_ever(tmp_path):
    with pytest.raises(UntrustedExportError, match="calls of infeed"):
        load(attacks.bundle(tmp_path / "b", attacks.WAITING.replace("4x4", "256x256")))


@pytest.mark.parametrize("trusted", [False, True])
def test_a_call_of_lapack_with_too_small_results_is_refused(tmp_path, trusted):
    """It ended the process with a damaged heap; nobody wants that, trusted or not."""
    path = attacks.bundle(tmp_path / "b", attacks.TOO_SMALL)
    with refused(
        ExportPathError,
        got="lapack_sgeqrf_ffi: <256x256xf32> -> <1x1xf32>, <1xf32>; the routine has mn -> mn, k",
    ):
        load(path, trusted=trusted)


def test_results_of_lapack_are_as_large_as_it_needs_where_sizes_are_symbolic(tmp_path):
    """The program says 1; the sizes of the operands are taken."""
    loaded = load(attacks.bundle(tmp_path / "b", attacks.SYMBOLIC, symbolic=True))
    assert loaded(np.ones((7, 7), np.float32)).shape == (7, 7)


def test_the_program_that_stands_in_for_the_bytes_of_jax_is_looked_at_too(tmp_path):
    honest = {}, lambda _, x: 2 * x
    to_stablehlo(honest, tmp_path / "b", spec("256, 256"), validate=False)
    (tmp_path / "b" / "serving_default.jax_export").write_bytes(b"of another jax")
    (tmp_path / "b" / "serving_default.mlirbc").write_bytes(attacks.module(attacks.TOO_SMALL))
    rehash(tmp_path / "b")
    with pytest.raises(ExportPathError, match="arrays of other sizes than it takes") as caught:
        load(tmp_path / "b")
    assert caught.value.where.endswith("serving_default.mlirbc")


CALLS = {
    "results": "lapack_spotrf_ffi(%x) {mhlo.backend_config = {uplo = 76 : ui8}}"
    " : (tensor<256x256xf32>) -> (tensor<256x255xf32>, tensor<i32>)",
    "rank": "lapack_spotrf_ffi(%x) {mhlo.backend_config = {uplo = 76 : ui8}}"
    " : (tensor<256x256xf32>) -> (tensor<65536xf32>, tensor<i32>)",
    "number": "lapack_sgetrf_ffi(%x) {mhlo.backend_config = {}}"
    " : (tensor<256x256xf32>) -> (tensor<256x256xf32>, tensor<i32>)",
    "operands": "lapack_strsm_ffi(%y, %x) {mhlo.backend_config = {side = 76 : ui8}}"
    " : (tensor<4x4xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>",
    "mode": "lapack_sgesdd_ffi(%x) {mhlo.backend_config = {mode = 79 : ui8}}"
    " : (tensor<256x256xf32>) -> (tensor<256x256xf32>, tensor<256xf32>, tensor<256x256xf32>,"
    " tensor<256x256xf32>, tensor<i32>)",
    "text": 'lapack_strsm_ffi(%x, %x) {backend_config = "{side = 76 : ui8}"}'
    " : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>",
    "function": "lapack_sgees_ffi(%x) {mhlo.backend_config = {mode = 86 : ui8, sort = 83 : ui8}}"
    " : (tensor<256x256xf32>) -> (tensor<256x256xf32>, tensor<256x256xf32>, tensor<256xf32>,"
    " tensor<256xf32>, tensor<i32>, tensor<i32>)",
    "of another platform": "cusolver_syevd_ffi(%x) {mhlo.backend_config = {lower = true}}"
    " : (tensor<256x256xf32>) -> (tensor<256x256xf32>, tensor<25xf32>, tensor<i32>)",
    "expanded": "Qr(%x) : (tensor<256x256xf32>) -> (tensor<25x25xf32>, tensor<25xf32>)",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_none_of_its_routine(name):
    count = CALLS[name].rpartition("->")[2].count("tensor")
    program = f"""func.func public @main(%x: tensor<256x256xf32>) -> tensor<256x256xf32> {{
      %y = stablehlo.constant dense<1.0> : tensor<4x4xf32>
      %0{":" + str(count) if count > 1 else ""} = stablehlo.custom_call @{CALLS[name]}
      return %x : tensor<256x256xf32>
    }}"""
    with pytest.raises(library_calls.SizesError):
        library_calls.check_program(attacks.module(program))


@pytest.mark.parametrize("shape", ["4, 4", "n, 4, 4"])
def test_what_jax_makes_of_linear_algebra_is_read(tmp_path, shape):
    linalg = jax.lax.linalg

    def everything(_, x):
        symmetric = x @ x.mT + 5 * jnp.eye(4)
        diagonal = jnp.diagonal(symmetric, axis1=-2, axis2=-1)
        return {
            "cholesky": linalg.cholesky(symmetric),
            "lu": linalg.lu(x)[0],
            "qr": jnp.abs(linalg.qr(x[..., :3], full_matrices=False)[1]),
            "eigh": jnp.linalg.eigvalsh(symmetric),
            "svd": linalg.svd(x, full_matrices=True)[1],
            "eig": jnp.sort(linalg.eig(symmetric)[0].real),
            "schur": linalg.schur(x)[0].shape[-1] * jnp.ones(x.shape[:-2]),
            "hessenberg": jnp.abs(linalg.hessenberg(x)[0]),
            "tridiagonal": linalg.tridiagonal(symmetric)[1],
            "solve": linalg.triangular_solve(symmetric, x, left_side=True),
            "bands": linalg.tridiagonal_solve(0 * diagonal, diagonal, 0 * diagonal, x),
        }

    path = tmp_path / "b"
    to_stablehlo(({}, everything), path, spec(shape), platforms=("cpu",), validate=False)
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    x = x if shape == "4, 4" else np.stack([x, x.T])
    found, expected = load(path)(x), everything({}, x)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, 1e-4, 1e-4)


def test_each_call_that_jax_promises_to_keep_is_known():
    """By jax's own list, where it is still under its name."""
    export = pytest.importorskip("jax._src.export._export")
    kept = set(getattr(export, "_CPU_FFI_KERNELS", ())) | set(
        getattr(export, "_GPU_FFI_KERNELS", ())
    )
    unknown = kept - library_calls.ROUTINES.keys()
    assert unknown <= {"hipsolver_gesdd_ffi"} | {each for each in kept if "csrlsvqr" in each}
