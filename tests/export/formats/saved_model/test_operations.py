"""SavedModels of TensorFlow's own operations, `operations="tensorflow"`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import InvalidArgumentError, UnsupportedOperationError
from pax_export.export import spec, to_saved_model
from pax_export.export.formats.saved_model.operations.graph import RULES
from pax_export.export.formats.saved_model.operations.operators import OPERATORS
from pax_export.export.portable import Rule
from tests.closeness import assert_close

tf = pytest.importorskip("tensorflow")


def _exported(function, path, *inputs, **options):
    given = inputs if len(inputs) > 1 else inputs[0]
    return to_saved_model(function, path, given, operations="tensorflow", **options)


def _operators(path):
    """The names of all operators of a SavedModel."""
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    graph = SavedModel.FromString((path / "saved_model.pb").read_bytes()).meta_graphs[0].graph_def
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    return {node.op for node in nodes}


def test_operators_are_those_of_tensorflow():
    from tensorflow.python.framework import op_def_registry

    def dtype(argument):
        fixed = tf.as_dtype(argument.type).name if argument.type else ""
        kind = argument.type_attr or argument.type_list_attr or fixed
        return f"{argument.number_attr}*{kind}" if argument.number_attr else kind

    for name, operator in OPERATORS.items():
        real = op_def_registry.get(name)
        own = {each.name for each in real.attr}
        assert [each.name for each in real.output_arg] == [each for each, _ in operator.results]
        for kind, argument in zip(operator.operands, real.input_arg, strict=True):
            # A dtype of the table may be fixed where TensorFlow has an attribute for it.
            assert kind == dtype(argument) or (kind not in own and argument.type_attr), name


def _pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def test_net(tmp_path):
    net = pax.Sequential(
        pax.Conv2D(3, 8, 3, stride=2), pax.BatchNorm2D(8), jax.nn.relu, lambda x: x.mean((1, 2)),
        pax.Linear(8, 4), jax.nn.softmax,
    )  # fmt: skip
    report = _exported(net, tmp_path / "m", spec("b, 16, 16, 3"))
    assert not report.differs
    found = _operators(tmp_path / "m")
    assert {"Conv2D", "MatMul", "BiasAdd", "Softmax", "Relu"} <= found
    assert "XlaCallModule" not in found


def test_what_all_turns_of_a_loop_do_is_written_before_it(tmp_path):
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    def run(weight, x):
        return jax.lax.scan(lambda h, row: (jnp.tanh(h @ weight.T + row), row), x[0], x)[0]

    _exported((jnp.eye(3), run), tmp_path / "m", spec("t, b, 3"), vjp_order=0)
    saved = SavedModel.FromString((tmp_path / "m/saved_model.pb").read_bytes())
    bodies = [[n.op for n in f.node_def] for f in saved.meta_graphs[0].graph_def.library.function]
    (turn,) = [each for each in bodies if "Tanh" in each]
    assert "MatMul" in turn
    assert "Transpose" not in turn
    nodes = [n for f in saved.meta_graphs[0].graph_def.library.function for n in f.node_def]
    (loop,) = (each for each in nodes if each.op == "StatelessWhile")
    assert loop.attr["_lower_using_switch_merge"].b  # else each turn is a call


def test_weights_of_recurrent_layers_are_read_as_they_are(tmp_path):
    def step(params, carry, x):
        hidden, cell = carry
        i, f, g, o = jnp.split(x @ params["w"] + hidden @ params["u"] + params["b"], 4, -1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    def run(params, x):
        start = jnp.zeros((2, x.shape[1], 4))
        return jax.lax.scan(lambda carry, row: step(params, carry, row), (*start,), x)[1]

    params = {"w": jnp.ones((3, 16)), "u": jnp.ones((4, 16)), "b": jnp.ones(16)}
    _exported((params, run), tmp_path / "m", spec("5, b, 3"), vjp_order=0)
    assert not {"ConcatV2", "Transpose"} & _operators(tmp_path / "m")


def test_sizes_that_do_not_fit_are_an_error(tmp_path):
    three = [spec("b, 3")] * 3
    _exported(lambda x, y, unread: x + y, tmp_path / "m", *three, constraints=["mod(b, 2) == 0"])
    call = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"]
    some, more = tf.zeros((2, 3)), tf.zeros((4, 3))
    assert call(x=some, y=some, unread=some)
    for x, y, unread, said in [
        (some, more, some, r"y.shape\[0\] is not b"),
        (some, some, more, r"unread.shape\[0\] is not b"),
        (some, some, tf.zeros((2, 7)), "unread|shape"),
        (some[:1], some[:1], some[:1], "not mod"),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=said):
            call(x=x, y=y, unread=unread)


def test_nan_in_pools(tmp_path):
    _exported(_pool, tmp_path / "m", spec("b, h, w, 3"))
    call = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"]
    x = np.ones((1, 4, 4, 3), np.float32)
    x[0, 0, 0, 0] = np.nan
    (found,) = call(tf.constant(x)).values()
    np.testing.assert_array_equal(found, _pool(x))


def test_where_tensorflow_lacks_an_operation_xla_compiles_all(tmp_path):
    def rounded(params, x):
        return jax.lax.reduce_precision(x * params["w"], 5, 3), x

    model = {"w": jnp.ones(3)}, rounded
    report = to_saved_model(model, tmp_path / "m", spec("b, 3"), trainable=True)
    assert "XlaCallModule" in _operators(tmp_path / "m")
    (served,) = (line for line in str(report).splitlines() if "  served  " in line)
    assert "with --xla_cpu_compilation_enabled=true" in served
    assert "the operation reduce_precision" in served and "test_operations.py:" in served
    with pytest.raises(UnsupportedOperationError, match="reduce_precision"):
        _exported(model, tmp_path / "other", spec("b, 3"))


@pytest.mark.parametrize("wrong", [lambda b, x, **_: b("Cos", x), lambda b, x, **_: b("Cos")])
def test_where_a_rule_is_wrong_xla_compiles_all(wrong, tmp_path, monkeypatch):
    monkeypatch.setitem(RULES, "sin", Rule(wrong, None, {}))
    report = to_saved_model(jnp.sin, tmp_path / "m", spec("b, 3"))
    assert "XlaCallModule" in _operators(tmp_path / "m")
    assert "differs" in str(report) or "ValueError" in str(report)
    assert max(report.largest_error.values()) < 1e-6


def test_refusals(tmp_path):
    with pytest.raises(InvalidArgumentError) as refused:
        to_saved_model(lambda x: x, tmp_path / "m", spec("3"), operations="tensorfow")
    assert (refused.value.where, refused.value.got) == ("operations", "'tensorfow'")
    with pytest.raises(InvalidArgumentError) as refused:
        _exported(lambda x: x, tmp_path / "m", spec("3"), platforms="tpu")
    assert refused.value.got == "operations='tensorflow', platforms=('tpu',)"
    small = {"w": jnp.ones(3, jnp.int4)}, lambda params, x: x * params["w"].astype(x.dtype)
    for model, given, where, write in [
        (lambda x: jnp.linalg.eig(x)[0], spec("3, 3"), "test_operations.py:", "to_stablehlo"),
        (lambda x: x.astype("int4"), spec("b, 3"), "test_operations.py:", "or operations='xla'"),
        (small, spec("b, 3"), "", "or operations='xla'"),
    ]:
        with pytest.raises(UnsupportedOperationError, match="TensorFlow cannot express") as error:
            _exported(model, tmp_path / "m", given)
        assert where in str(error.value.where)
        assert write in error.value.write and "e.g. to_saved_model" not in error.value.write
    assert not (tmp_path / "m").exists()


def test_small_floats_are_computed_by_the_kernels_that_there_are(tmp_path):
    kernel = jnp.ones((3, 3, 3, 4), jnp.bfloat16)
    order = ("NHWC", "HWIO", "NHWC")

    def convolved(x):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=order)

    def rounded(params, x):
        return x.astype(jnp.float8_e4m3fn).astype(x.dtype) * params["w"].astype(x.dtype)

    rounding = {"w": jnp.ones(3, jnp.float8_e4m3fn)}, rounded
    for number, (model, given) in enumerate(
        [(convolved, spec("b, 8, 8, 3", "bfloat16")), (rounding, spec("b, 3"))]
    ):
        assert not _exported(model, tmp_path / f"{number}", given).differs
        assert "XlaCallModule" not in _operators(tmp_path / f"{number}")


def test_a_layer_of_keras_is_trained_there(tmp_path):
    net = pax.Sequential(pax.Linear(4, 8), jax.nn.relu, pax.Linear(8, 2))
    _exported(net, tmp_path / "m", spec("b, 4"), trainable=True)
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            (y,) = loaded.signatures["serving_default"](x=x).values()
            loss = tf.reduce_mean(y**2)
        slopes = tape.gradient(loss, loaded.trainable_variables)
        for variable, slope in zip(loaded.trainable_variables, slopes):
            variable.assign_sub(0.1 * slope)
        return loss

    losses = [float(step()) for _ in range(3)]

    def value(net):
        return jnp.mean(net(x) ** 2)

    for found in losses:
        assert_close(found, value(net), rtol=1e-5)
        slopes = jax.grad(value)(net)
        net = jax.tree.map(
            lambda w, slope: w - 0.1 * slope if jnp.issubdtype(w.dtype, jnp.floating) else w,
            net, slopes,
        )  # fmt: skip


def _functions(path):
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    graph = SavedModel.FromString((path / "saved_model.pb").read_bytes()).meta_graphs[0].graph_def
    return len(graph.library.function)


def _ties(params, x):
    return jnp.maximum(x * params["w"], 0) + jax.nn.relu(x) + x.max(-1, keepdims=True)


def _two_slopes(path, x, function):
    """The slope of the sum of a function of the output, and the slope of its sum."""
    loaded, given = tf.saved_model.load(str(path)), tf.constant(x)
    with tf.GradientTape() as second:
        second.watch(given)
        with tf.GradientTape() as first:
            first.watch(given)
            (y,) = loaded.signatures["serving_default"](x=given).values()
            total = tf.reduce_sum(function(y))
        slopes = first.gradient(total, given)
    return slopes, second.gradient(slopes, given)


def test_tensorflow_differentiates_the_graph_itself(tmp_path):
    model = {"w": jnp.ones(3)}, _ties
    _exported(model, tmp_path / "m", spec("b, 3"), trainable=True)
    assert _functions(tmp_path / "m") == 1  # none of gradients
    x = np.array([[0, 0, 1], [2, 2, -1]], np.float32)
    slopes, curved = _two_slopes(tmp_path / "m", x, lambda y: y**3)
    wanted = jax.grad(lambda x: (_ties(model[0], x) ** 3).sum())
    assert_close(slopes, wanted(x), rtol=1e-5)
    assert_close(curved, jax.grad(lambda x: wanted(x).sum())(x), rtol=1e-5)


def _turns(params, x):
    """A loop over rows, from the last one, with a branch."""

    def turn(state, row):
        waved = lambda h: jnp.tanh(h * params["w"] + row)  # noqa: E731
        state = jax.lax.cond(row.sum() > 0, waved, jnp.sin, state)
        return state, state * row

    state, rows = jax.lax.scan(turn, jnp.ones(3), x, reverse=True)
    state = jax.lax.fori_loop(0, 3, lambda _, h: jnp.sin(h) * params["w"], state)
    return state + (rows**2).sum(0)


def test_loops_and_processors_have_derivatives_of_any_order(tmp_path):
    model, twice = ({"w": jnp.full(3, 0.7)}, _turns), lambda y: y * 2.0
    report = _exported(model, tmp_path / "m", spec("t, 3"), trainable=True, postprocess=twice)
    assert report.signatures["serving_default"].differentiated_by == "TensorFlow"
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    x = np.array([[0.1, 0.5, -0.2], [-0.4, -0.3, 0.1], [0.2, 0.3, 0.4]], np.float32)
    wanted = lambda x: twice(_turns(model[0], x)).sum()  # noqa: E731

    def found(x):
        (y,) = loaded.signatures["serving_default"](x=x).values()
        return tf.reduce_sum(y)

    for _ in range(3):
        found, wanted = _slope(found), (lambda x, f=wanted: jax.grad(f)(x).sum())
        assert_close(found(tf.constant(x)), wanted(x), rtol=1e-5)


def _slope(function):
    """The sum of the slopes of a function of one tensor."""

    def slope(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tf.reduce_sum(tape.gradient(y, x))

    return slope


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_slopes_of_indices_out_of_range_are_those_of_jax(mode, tmp_path):
    def taken(params, x):
        return params["w"] * x.at[jnp.array([0, 0, 9, 2])].get(mode=mode)

    model = {"w": jnp.ones(())}, taken
    to_saved_model(
        model, tmp_path / "m", spec("6"), operations="tensorflow", trainable=True, validate=False
    )
    assert _functions(tmp_path / "m") == 1
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    x = tf.constant(np.arange(6, dtype=np.float32))
    with tf.GradientTape() as tape:
        tape.watch(x)
        (y,) = loaded.signatures["serving_default"](x=x).values()
    slopes = jax.grad(lambda x: taken(model[0], x)[:].sum())(x.numpy())
    np.testing.assert_array_equal(tf.convert_to_tensor(tape.gradient(y, x)), slopes)


@jax.custom_vjp
def _rounded(x):
    return jnp.round(x)


_rounded.defvjp(lambda x: (_rounded(x), None), lambda _, slope: (slope,))


def test_custom_derivatives_stay_those_of_the_model(tmp_path):
    model = {"w": jnp.ones(3)}, lambda params, x: _rounded(x * params["w"])
    _exported(model, tmp_path / "m", spec("b, 3"), trainable=True)
    assert _functions(tmp_path / "m") > 1
    assert "XlaCallModule" not in _operators(tmp_path / "m")
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    x = tf.constant([[0.3, 1.7, 2.2]])
    with tf.GradientTape() as tape:
        tape.watch(x)
        (y,) = loaded.signatures["serving_default"](x=x).values()
    np.testing.assert_array_equal(tape.gradient(y, x), np.ones((1, 3)))


@jax.custom_vjp
def _with_clipped_slope(x):
    return x * 2


_with_clipped_slope.defvjp(
    lambda x: (_with_clipped_slope(x), None), lambda _, slope: (jnp.clip(slope, -0.1, 0.1),)
)


def test_a_custom_derivative_that_tensorflow_differentiates(tmp_path):
    params, function = {"w": jnp.ones(3)}, lambda params, x: _with_clipped_slope(x * params["w"])
    _exported((params, function), tmp_path / "m", spec("b, 3"), trainable=True)
    x = np.array([[0.3, 1.7, 2.2]], np.float32)
    slopes, curved = _two_slopes(tmp_path / "m", x, lambda y: 0.05 * y**2)
    first = jax.grad(lambda x: (0.05 * function(params, x) ** 2).sum())
    second = jax.grad(lambda x: first(x).sum())
    assert_close(slopes, first(x))
    assert_close(curved, second(x))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_negative_unsigned_numbers_wrap(tmp_path, dtype):
    _exported(lambda x: -x, tmp_path / "m", spec("b", dtype), validate=False)
    x = np.array([0, 1, 2, np.iinfo(dtype).max], dtype)
    (y,) = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"](x=x).values()
    np.testing.assert_array_equal(y, -x)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_beta_function_of_arrays_that_broadcast(dtype, tmp_path):
    def model(_, x):
        return jax.scipy.special.betainc(x[:, None], x[None, :], jnp.asarray(0.3, x.dtype))

    _exported(({}, model), tmp_path / "m", spec("n", dtype), trainable=False)
    x = np.array([0.5, 1, 2, 3, 7], dtype)
    tolerance = 1e-5 if dtype == "float32" else 2e-3
    assert_close(pax.export.load(tmp_path / "m")(x), model(None, x), tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_next_number_is_one_of_its_dtype(dtype, tmp_path):
    x = jnp.array([-1000, -1, -0.0, 0, 1, 3, jnp.inf], dtype)
    _exported(lambda x: jnp.nextafter(x, -x), tmp_path / "m", spec("n", dtype), validate=False)
    found = pax.export.load(tmp_path / "m")(np.asarray(x))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(jnp.nextafter(x, -x)))


def test_empty_batches_of_convolutions(tmp_path):
    """Of no images, TensorFlow's convolution has the shape of its input."""
    net = pax.Sequential(pax.Conv2D(3, 8, 3), jax.nn.relu, pax.Conv2D(8, 4, 3))
    _exported(net, tmp_path / "m", spec("b, 8, 8, 3"))
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    call = loaded.signatures["serving_default"]
    for count in (0, 2):
        (found,) = call(x=tf.zeros((count, 8, 8, 3))).values()
        assert found.shape == net(jnp.zeros((count, 8, 8, 3))).shape


def test_processors(tmp_path):
    report = _exported(
        pax.Linear(8, 4), tmp_path / "m", spec("b, 8"),
        preprocess=lambda x: tf.cast(x, tf.float32) / 255.0,
        preprocess_inputs=spec("b, 8", "uint8"), postprocess=lambda y: tf.argmax(y, -1),
    )  # fmt: skip
    assert "served      in tensorflow_model_server as it starts\n" in str(report)
    assert "XlaCallModule" not in _operators(tmp_path / "m")


class _Everything(pax.Module):
    """State, shared and complex weights, a random key."""

    def __init__(self):
        super().__init__()
        self.dense = pax.Linear(4, 4)
        self.turn = jnp.exp(1j * jnp.arange(4.0))
        self.count = jnp.zeros((), "int32")

    def __call__(self, x, key):
        self.count = self.count + 1
        noise = jax.random.normal(jax.random.wrap_key_data(key), (4,))
        return self.dense(self.dense(x)) + (x * self.turn).real + noise * self.count

    def encode(self, x):
        return self.dense(x)


def test_state_shared_and_complex_weights_and_keys_in_one_file(tmp_path):
    x, key = spec("b, 4"), spec("2", "uint32")
    report = to_saved_model(
        _Everything(), tmp_path / "m", {"a": (x, key), "b": x},
        methods={"a": "__call__", "b": "encode"}, state="update", operations="tensorflow",
        trainable=True,
    )  # fmt: skip
    assert "XlaCallModule" not in _operators(tmp_path / "m")
    assert report.signatures["a"].differentiated_by == "jax"  # complex numbers
    assert report.signatures["b"].differentiated_by == "TensorFlow"
    assert report.signatures["a"].assigns == ("count",)
    assert sum(each.name.endswith("weight") for each in report.variables) == 1
