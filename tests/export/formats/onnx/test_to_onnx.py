"""Models through `to_onnx`, run by onnxruntime."""

import hashlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from jax import lax

import pax_export as pax
from pax_export import errors
from pax_export.cli import main
from pax_export.export import Report, load, spec, to_onnx
from pax_export.export.artifact import embedded
from pax_export.export.portable.kept import call
from tests.closeness import assert_close
from tests.docs.pages import ROOT
from tests.export.models import Net, affine, affine_params, random
from tests.export.targets import TARGETS
from tests.hard.size import runs


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_models_run_in_onnxruntime_with_any_batch(target, tmp_path):
    target.check(to_onnx, tmp_path / "model.onnx")


@pytest.fixture(scope="module")
def net():
    return Net()


@pytest.fixture(scope="module")
def path(tmp_path_factory, net):
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    to_onnx(net, path, spec("batch, 3"))
    return path


def test_onnxruntime_alone_runs_it(path, net):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(["output"], {"x": random(4, 3)})
    assert_close(found, net(random(4, 3)), rtol=1e-5)
    assert session.get_inputs()[0].shape == ["batch", 3]
    assert session.run(["output"], {"x": np.zeros((0, 3), np.float32)})[0].shape == (0, 4)


def test_weights_are_initializers_with_the_names_of_the_leaves(path, net):
    model = onnx.load(path)
    onnx.checker.check_model(model)
    found = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    np.testing.assert_array_equal(found["layer.weight"], net.layer.weight)
    np.testing.assert_array_equal(found["layer.bias"], net.layer.bias)
    assert [entry.name for entry in model.graph.input] == ["x"]


def test_nested_arguments_come_back(tmp_path, net):
    to_onnx(
        net,
        tmp_path / "net.onnx",
        {"encode": spec("batch, 3")},
        kwargs={"encode": {"scale": spec("")}},
        methods={"encode": "encode"},
        opset=19,
    )
    loaded = load(tmp_path / "net.onnx")
    found, expected = loaded(random(2, 3), scale=2.0), net.encode(random(2, 3), scale=2.0)
    assert_close(found["code"], expected["code"], rtol=1e-5)
    assert_close(found["total"], expected["total"], rtol=1e-5)
    (opset,) = {each.version for each in onnx.load(tmp_path / "net.onnx").opset_import}
    assert (opset, loaded.report.details["opset"]) == (19, 19)


def test_closed_over_arrays_and_ties_are_stored_once(tmp_path):
    table, extra = jnp.asarray(random(20, 20)), random(20, 20)
    model = ({"a": table, "b": table}, lambda p, x: x @ p["a"] @ p["b"].T @ extra)
    to_onnx(model, tmp_path / "m.onnx", spec("n, 20"))
    names = {each.name for each in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert {"a", "constants.0"} <= names
    assert "b" not in names


def test_the_report_lies_in_the_metadata(path):
    report = Report.read(path)
    assert (report.target, report.details["opset"]) == ("onnx", 21)
    assert "Net as an ONNX model" in str(report)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert "pax_export.json" in session.get_modelmeta().custom_metadata_map


def test_bits_need_no_operator_of_a_newer_opset(tmp_path):
    bits = jax.lax.bitcast_convert_type
    model = ({}, lambda params, x: bits(x, jnp.float32))
    to_onnx(model, tmp_path / "m.onnx", spec("2", "uint32"), opset=18)
    x = np.array([0x3F800000, 0xC0490FDB], np.uint32)
    np.testing.assert_array_equal(load(tmp_path / "m.onnx")(x), x.view(np.float32))


def test_opsets_without_what_models_need_are_refused(tmp_path):
    model = (affine_params(), affine)
    with pytest.raises(errors.UnsupportedOperationError, match="opset 18 and newer") as caught:
        to_onnx(model, tmp_path / "m.onnx", spec("n, 3"), opset=17)
    assert (caught.value.got, caught.value.write) == ("opset=17", "opset=18")
    newest = onnx.defs.onnx_opset_version()
    with pytest.raises(errors.UnsupportedOperationError) as caught:
        to_onnx(model, tmp_path / "m.onnx", spec("n, 3"), opset=newest + 1)
    assert caught.value.write == f"opset={newest}"


def test_an_output_may_be_called_like_an_input_or_be_it(tmp_path):
    model = ({}, lambda params, x, y: {"x": x + 1, "y": y, "again": y, "x_output": x * 2})
    report = to_onnx(model, tmp_path / "m.onnx", (spec("n"), spec("n")), validate="process")
    assert (report.validated, max(report.largest_error.values())) == ("process", 0)
    x, y = np.arange(3, dtype=np.float32), np.ones(3, np.float32)
    found = load(tmp_path / "m.onnx")(x, y)
    expected = {"x": x + 1, "y": y, "again": y, "x_output": x * 2}
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert [entry.name for entry in graph.input] == ["x", "y"]
    names = {entry.name for entry in graph.output}
    assert names == {"x_output", "x_output_2", "y_output", "again"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_small_numbers_go_in_and_out(dtype, tmp_path):
    weights = {"w": jnp.asarray(np.arange(6).reshape(3, 2) - 2, dtype)}
    model = (weights, lambda params, x: (x.astype("float32") @ params["w"].astype("float32"), x))
    for way in (True, *["process"] * (dtype == "bfloat16")):
        to_onnx(model, tmp_path / "m.onnx", spec("n, 3", dtype), validate=way, overwrite=True)
    x = jnp.asarray(np.arange(6).reshape(2, 3), dtype)
    product, same = load(tmp_path / "m.onnx")(x)
    assert same.dtype == x.dtype
    assert_close(product, model[1](weights, x)[0], rtol=1e-2)


def test_complex_inputs_and_outputs_are_refused(tmp_path):
    model = ({}, lambda params, x: {"z": jax.lax.complex(x, x)})
    with pytest.raises(errors.UnsupportedDtypeError, match="not support complex") as caught:
        to_onnx(model, tmp_path / "m.onnx", spec("n"))
    assert caught.value.where == "output z"


def test_refusals(tmp_path, net):
    model = (affine_params(), affine)
    with pytest.raises(errors.InvalidArgumentTypeError, match="opset"):
        to_onnx(model, tmp_path / "m.onnx", spec("2, 3"), opset="21")
    with pytest.raises(errors.InvalidArgumentError, match="holds one function"):
        both = {"a": spec("2, 3"), "b": spec("2, 3")}
        to_onnx(net, tmp_path / "m.onnx", both, methods={"a": "__call__", "b": "__call__"})
    (tmp_path / "there.onnx").write_bytes(b"old")
    with pytest.raises(errors.ExportPathError, match="not an export of pax_export"):
        load(tmp_path / "there.onnx")


def test_damaged_files(tmp_path, path):
    content, damaged = path.read_bytes(), tmp_path / "damaged.onnx"
    report = json.loads(embedded.read(path))  # as before hashes were written
    digest = report["details"].pop("sha256")
    (model,) = (
        content[:size]
        for size in range(len(content) - 1, 0, -1)
        if hashlib.sha256(content[:size]).hexdigest() == digest
    )
    damaged.write_bytes(model.replace(b"MatMul", b"NatNul").replace(b"Gemm", b"Genn"))
    embedded.append_field(damaged, json.dumps(report))
    with pytest.raises(errors.ExportPathError, match="cannot be loaded"):
        load(damaged)


def test_every_flipped_byte_is_found(tmp_path, path):
    content = path.read_bytes()
    for at in range(0, len(content), runs(short=7, long=1)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        (tmp_path / "changed.onnx").write_bytes(changed)
        with pytest.raises(errors.ExportPathError):
            load(tmp_path / "changed.onnx")


def test_weights_in_a_file_elsewhere_are_not_read(tmp_path, path):
    """ONNX lets a weight name another file; onnxruntime takes none outside of the folder."""
    import onnx

    (tmp_path / "secret").write_bytes(bytes(1 << 10))
    (tmp_path / "inner").mkdir()
    model = onnx.load(path)
    tensor = next(each for each in model.graph.initializer if each.raw_data)
    count = len(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "../secret"), ("length", str(count))):
        tensor.external_data.add(key=key, value=value)
    report = json.loads(embedded.read(path))
    del report["details"]["sha256"]
    del model.metadata_props[:]
    (tmp_path / "inner" / "m.onnx").write_bytes(model.SerializeToString())
    embedded.append_field(tmp_path / "inner" / "m.onnx", json.dumps(report))
    with pytest.raises(errors.ExportPathError, match="cannot be loaded"):
        load(tmp_path / "inner" / "m.onnx")


def test_the_guide_runs(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "guide" / "targets.md").read_text(encoding="utf-8")
    first = re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)[1]
    block = re.search(r"^```{code-block} python\n(.*?)^```$", page, re.M | re.S)[1]
    monkeypatch.chdir(tmp_path)
    exec(first + block, {})


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "onnx_factories.py").write_text(
        "import jax.numpy as jnp\n"
        "def affine():\n"
        "    return {'w': jnp.ones((3, 4))}, lambda params, x: x @ params['w']\n"
    )
    model = ("onnx_factories:affine", "affine.onnx", "--target", "onnx", "--input", "n, 3")
    assert main(["export", *model, "--opset", "22"]) == 0
    assert "opset=22" in capsys.readouterr().out
    assert main(["export", *model, "--overwrite", "--platform", "cpu"]) == 1
    assert "got: --platform with --target onnx" in capsys.readouterr().err


def _initializers(path):
    return {
        each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer
    }


def _operators(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def _norms():
    return pax.Sequential(
        pax.Conv2D(3, 8, 3), pax.BatchNorm2D(8, True, True, 0.9), jax.nn.relu
    ).eval()


def test_a_norm_is_folded_and_the_report_names_its_weights(tmp_path):
    net, path = _norms(), tmp_path / "net.onnx"
    report = to_onnx(net, path, spec("batch, 16, 16, 3"))

    assert _operators(path) == ["Transpose", "Conv", "Relu", "Transpose"]
    assert "modules.0.weight" in report.details["folded"]
    assert "  folded      " in str(report)
    assert "modules.0.weight" not in _initializers(path)


def test_products_with_reciprocals_are_quotients(tmp_path):
    """onnxruntime fails at a reciprocal times a sum with 0."""

    def apply(x):
        def step(carry, row):
            return carry, (carry + 0.0) * (1 / (row * row))

        return (0.0 - x) / 1 * (1 / (x * x)), jax.lax.scan(step, -x[0], x)[1]

    to_onnx(apply, tmp_path / "model.onnx", spec("n, 3"))
    operators = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert operators.count("Div") == 2  # the one by 1 as well


def test_attention_has_one_transpose_for_each_array(tmp_path):
    def attend(weights, x):
        q, k, v = (jnp.einsum("bnd,dhk->bnhk", x, each) for each in weights[:3])
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bqhd,hdo->bqo", jnp.einsum("bhqk,bkhd->bqhd", scores, v), weights[3])

    random = np.random.default_rng(0)
    shapes = [(16, 2, 8)] * 3 + [(2, 8, 16)]
    weights = [random.normal(size=shape).astype("f") / 4 for shape in shapes]
    path = tmp_path / "net.onnx"
    to_onnx((weights, attend), path, spec("batch, length, 16"))
    x = random.normal(size=(2, 5, 16)).astype("f")
    assert_close(load(path)(x), attend(weights, x), rtol=1e-4)
    # Queries, keys, values and the result, and the last weight; rows keep their axes in products.
    assert _operators(path).count("Transpose") == 5
    assert not any(-1 in np.atleast_1d(each) for each in _initializers(path).values())


@pytest.mark.parametrize("dtype, size, operators", [
    ("float32", 8, {"RotaryEmbedding", "GroupQueryAttention"}),
    ("float32", 6, {"RotaryEmbedding"}),  # the kernel of attention takes multiples of eight
    ("float16", 8, set()),
])  # fmt: skip
@pytest.mark.parametrize("neighbors", [False, True])
def test_rotary_embedding_and_attention_are_operators_of_onnxruntime(
    dtype, size, operators, neighbors, tmp_path
):
    heads, kv_heads, told = 4, 2, {"scale": 0.3, "softcap": 2.0}

    def apply(_, query, key, value, past_key, past_value, bias):
        length = query.shape[1]
        places = jnp.broadcast_to(jnp.arange(length), query.shape[:2])
        angles = pax.nn.rotary_angles(jnp.arange(length) + 5, pax.nn.rotary_frequencies(4, 100.0))
        angles = [each.astype(dtype) for each in angles]
        query = call("rotary", query, places, *angles, heads=heads, neighbors=neighbors)
        given = query, key, value, past_key, past_value, bias
        return call("cached_attention", *given, heads=heads, kv_heads=kv_heads, **told)

    shapes = ["b, n", "b, n", "b, n", "b, 2, past", "b, 2, past", "b, 1, n, past + n"]
    last = [heads * size, kv_heads * size, kv_heads * size, size, size]
    shapes = [f"{each}, {count}" for each, count in zip(shapes, last)] + shapes[5:]
    to_onnx(({}, apply), tmp_path / "m.onnx", tuple(spec(each, dtype) for each in shapes),
            validate=False)  # fmt: skip
    model = onnx.load(tmp_path / "m.onnx")
    assert {each.op_type for each in model.graph.node if each.domain} == operators
    onnx.checker.check_model(model)

    # Several rows take one token after the first call.
    sizes = (1, 3, heads * size), *[(1, 3, kv_heads * size)] * 2, *[(1, 2, 4, size)] * 2
    query, key, value, past_key, past_value = (random(*each).astype(dtype) for each in sizes)
    seen = np.arange(7) <= np.arange(3)[:, None] + 4
    bias = np.where(seen, random(1, 1, 3, 7), -1e4).astype(dtype)
    given = query, key, value, past_key, past_value, bias
    found, keys, values = load(tmp_path / "m.onnx")(*given)
    turned = pax.nn.Rotary(4, 100.0, "neighbors" if neighbors else "halves")(
        query.reshape(1, 3, heads, size), jnp.arange(3) + 5
    )
    held = [
        np.concatenate([old, new.reshape(1, 3, kv_heads, size).swapaxes(1, 2)], 2)
        for old, new in ((past_key, key), (past_value, value))
    ]
    expected = pax.dot_product_attention(
        turned, *(each.swapaxes(1, 2) for each in held), bias=bias, **told
    )
    rtol = 1e-5 if dtype == "float32" else 5e-3
    assert_close(found, np.asarray(expected).reshape(query.shape), rtol=rtol)
    np.testing.assert_array_equal(keys, held[0])
    np.testing.assert_array_equal(values, held[1])


@pytest.mark.parametrize("shape, axis", [("batch, length, 3", 1), ("length", 0), ("2, length", 1)])
def test_a_fourier_transform_is_along_axis_1(shape, axis, tmp_path):
    path = tmp_path / "net.onnx"
    to_onnx(({}, lambda _, x: jnp.abs(jnp.fft.fft(x, axis=axis))), path, spec(shape))
    graph = onnx.load(path).graph
    (node,) = [each for each in graph.node if each.op_type == "DFT"]
    assert _initializers(path)[node.input[2]] == 1
    x = np.random.default_rng(0).normal(size=(2, 5, 3)[: shape.count(",") + 1]).astype("f")
    assert_close(load(path)(x), np.abs(np.fft.fft(x, axis=axis)), rtol=1e-4)


def test_without_folding_each_leaf_is_in_the_file_as_it_is(tmp_path):
    net, path = _norms(), tmp_path / "net.onnx"
    report = to_onnx(net, path, spec("batch, 16, 16, 3"), fold=False)

    held = _initializers(path)
    for variable in report.variables:
        if variable.name in held:  # it is read
            assert held[variable.name].shape == variable.shape
    assert {"modules.0.weight", "modules.1.scale", "modules.1.ema_var.averages"} <= held.keys()
    assert "folded" not in report.details


def test_exact_exports_keep_nan_where_the_runtime_passes_over_it(tmp_path):
    x = np.ones((1, 2, 4, 4), np.float32)
    x[0, :, 0, 0] = np.nan

    def apply(_, x):
        pooled = lax.reduce_window(x, -np.inf, lax.max, (1, 1, 2, 2), (1,) * 4, "VALID")
        return pooled, jax.nn.sigmoid(x - 100)

    model = {}, apply

    to_onnx(model, tmp_path / "exact.onnx", spec("batch, 2, 4, 4"), exact=True)
    most, gate = load(tmp_path / "exact.onnx")(x)
    assert np.isnan(most[0, :, 0, 0]).all()
    assert gate[0, 1, 1, 1] < 1e-40


def test_a_pass_that_fails_leaves_a_right_file(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no")

    monkeypatch.setattr("pax_export.export.portable.passes.folded", fails)
    with pytest.warns(RuntimeWarning, match="the program as it was traced"):
        report = to_onnx(_norms(), tmp_path / "net.onnx", spec("batch, 16, 16, 3"))
    assert "which may be slow: RuntimeError('no')" in str(report)


def test_a_rule_that_fails_for_the_optimized_program_alone_is_said(tmp_path, monkeypatch):
    from pax_export.export.formats.onnx.graph import RULES
    from pax_export.export.portable import NotInTargetError, Rule

    def fails(*_, **__):
        raise NotInTargetError("planted")

    monkeypatch.setitem(RULES, "softmax", Rule(fails))
    with pytest.warns(RuntimeWarning, match="which may be slow: .*planted"):
        to_onnx(({}, lambda _, x: jax.nn.softmax(x)), tmp_path / "net.onnx", spec("batch, 3"))


def test_an_older_opset_has_the_definition_of_a_function(tmp_path):
    model = ({}, lambda _, x: jax.nn.gelu(x))
    for opset in (18, 21):
        to_onnx(model, tmp_path / "m.onnx", spec("batch, 3"), opset=opset, overwrite=True)
        assert ("Gelu" in _operators(tmp_path / "m.onnx")) == (opset == 21)


TRANSPOSED = {  # stride, padding, dilation, groups
    "same": (2, ((1, 1), (1, 1)), 1, 1),
    "uneven": (2, ((0, 3), (2, 1)), 1, 1),
    "longer": (3, ((1, 4), (2, 2)), 1, 1),
    "dilated": (2, ((2, 2), (1, 4)), 2, 1),
    "grouped": (2, ((1, 2), (1, 2)), 1, 4),
    "padded by more than it reaches": (2, ((3, 3), (3, 3)), 1, 1),
}


@pytest.mark.parametrize("kind", TRANSPOSED)
def test_transposed_convolutions(kind, tmp_path):
    stride, padding, dilation, groups = TRANSPOSED[kind]
    kernel = random(3, 3, 4 // groups, 8)

    def apply(kernel, x):
        return lax.conv_general_dilated(
            x, kernel, (1, 1), padding, (stride, stride), (dilation, dilation),
            ("NHWC", "HWIO", "NHWC"), groups,
        )  # fmt: skip

    to_onnx((kernel, apply), tmp_path / "m.onnx", spec("batch, 5, 6, 4"), validate=False)
    x = random(2, 5, 6, 4)
    assert_close(load(tmp_path / "m.onnx")(x), apply(kernel, x), rtol=1e-5)
    assert ("ConvTranspose" in _operators(tmp_path / "m.onnx")) == ("more" not in kind)


def test_what_is_not_exact_enough_is_refused(tmp_path):
    with jax.enable_x64(True):
        with pytest.raises(errors.UnsupportedOperationError, match="bessel_i0e"):
            to_onnx(lax.bessel_i0e, tmp_path / "m.onnx", spec("n", "float64"))


def test_sizes_are_divided_as_in_python(tmp_path):
    def sizes(x, y):
        n, m = x.shape[0], y.shape[0]
        return x[0] * 0 + jnp.stack([-n // -2, -n // 3, n // -m, (3 - n) % -m, -n % -2, n % -3])

    to_onnx(sizes, tmp_path / "net.onnx", (spec("n", "int32"), spec("m", "int32")))
    loaded = load(tmp_path / "net.onnx")
    for n, m in ((1, 2), (5, 3), (6, 3), (7, 1)):
        given = np.ones(n, np.int32), np.ones(m, np.int32)
        np.testing.assert_array_equal(loaded(*given), sizes(*given))


DOUBLES = {
    **{name: getattr(jnp, name) for name in ("sinh", "cosh", "tan", "arcsin", "arccos", "arctan")},
    **{name: getattr(jnp, name) for name in ("arcsinh", "arccosh", "arctanh", "signbit", "frexp")},
    **{name: getattr(jax.scipy.special, name) for name in ("erf", "erfc", "erfinv")},
    "arctan2": lambda x: jnp.arctan2(x, x[::-1]),
    "copysign": lambda x: jnp.copysign(x, x[::-1]),
    "ldexp": lambda x: jnp.ldexp(x, jnp.arange(-9, x.size - 9)),
    "nextafter": lambda x: jnp.nextafter(x, -x),
    "bits": lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, "uint64"), "float64"),
    "attention": lambda x: jax.nn.dot_product_attention(*[x.reshape(1, -1, 1, 3)] * 3),
    "exp in float32": lambda x: jnp.exp(x.astype("float32")).astype("float64"),
}


@pytest.mark.parametrize("name", DOUBLES)
def test_functions_of_float64(name, tmp_path):
    given = np.array([0.25, 1e-300, 1e-20, 1e-8, 0.1, 0.5, 0.99, 1, 1.5, 2.5, 5, 20, 700, 1e30])
    given = np.append(np.concatenate([given, -given]), [np.inf, np.nan])
    with jax.enable_x64(True):
        to_onnx(DOUBLES[name], tmp_path / "net.onnx", spec("30", "float64"))
        found, expected = load(tmp_path / "net.onnx")(given), DOUBLES[name](given)
    if name not in ("attention", "exp in float32"):  # compared by the export itself
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(one, other, rtol=1e-9, atol=0)


def test_norms_of_open_sizes_have_a_transpose_at_each_end(tmp_path):
    keys = [jax.random.key_data(jax.random.key(seed)) for seed in range(2)]
    net = pax.Sequential(
        pax.Conv2D(3, 6, 3, rng_key=keys[0]), pax.GroupNorm(3, 6),
        lambda x: (x - x.mean((1, 2), keepdims=True)) / (x.var((1, 2), keepdims=True) + 1e-3),
        pax.Conv2D(6, 4, 3, rng_key=keys[1]),
    )  # fmt: skip
    report = to_onnx(net, tmp_path / "net.onnx", spec("b, h, w, 3"))
    assert "kept" not in report.details  # the program as it was traced
    nodes = onnx.load(tmp_path / "net.onnx").graph.node
    assert sum(node.op_type == "Transpose" for node in nodes) == 2
