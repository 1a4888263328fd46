"""A SavedModel that TensorFlow did not write itself, read by TensorFlow."""

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export._foundations.wire import Map, Schema
from pax_export.export import load, spec, to_saved_model
from pax_export.export.formats.saved_model.proto import messages as schemas
from pax_export.export.formats.saved_model.proto.objects import checkpoint_key
from tests.closeness import assert_close

tf = pytest.importorskip("tensorflow")

PARAMS = {"w": jnp.arange(1.0, 4.0), "half": jnp.ones((2, 2), jnp.bfloat16), "n": np.int32(3)}


def cube(params, x):
    return {"y": params["w"] * x**3, "most": jnp.argmax(x), "n": params["n"] + 1}


def write(path, **options):
    to_saved_model((PARAMS, cube), path, spec("n, 3"), validate=False, **options)
    return path


@pytest.fixture(scope="module", params=[0, 1, 2])
def by_order(request, tmp_path_factory):
    return request.param, write(
        tmp_path_factory.mktemp("order") / "m", vjp_order=request.param,
        trainable=request.param > 0, operations="xla",
    )  # fmt: skip


def messages(path):
    from tensorflow.core.protobuf import saved_model_pb2

    (graph,) = saved_model_pb2.SavedModel.FromString(
        (path / "saved_model.pb").read_bytes()
    ).meta_graphs
    return graph


@pytest.mark.parametrize("count", [3, 12])
def test_a_variable_costs_one_read_and_no_function(tmp_path, count):
    params = {str(place): jnp.full(3, place) for place in range(count)}
    to_saved_model(
        (params, lambda p, x: x + sum(p.values())), tmp_path / "m", spec("3"), vjp_order=0,
        validate=False, operations="xla",
    )  # fmt: skip
    (function,) = messages(tmp_path / "m").graph_def.library.function
    kinds = [node.op for node in function.node_def]
    assert sorted(kinds) == sorted(
        ["ReadVariableOp"] * count + ["XlaCallModule", "PreventGradient"]
    )


def test_tensorflow_saves_only_what_stands_around_a_model(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("saved by TensorFlow")

    monkeypatch.setattr(tf.saved_model, "save", refuse)
    write(tmp_path / "m")
    with pytest.raises(RuntimeError, match="saved by TensorFlow"):
        write(tmp_path / "other", preprocess=lambda x: x, preprocess_inputs=spec("n, 3"))


def gradients(model, order):
    """The first ones, or those of their sum, with respect to x and perhaps w."""
    x, w = tf.constant([[1.0, 2.0, -1.0]]), model.leaves["w"]
    sources = [x, w] if w.trainable else [x]
    with tf.GradientTape() as tape:
        tape.watch(x)
        if order == 1:
            value = model.signatures["serving_default"](x=x)["y"]
        else:
            value = sum(map(tf.reduce_sum, gradients_of(model, x, sources)))
    return tape.gradient(value, sources)


def gradients_of(model, x, sources):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model.signatures["serving_default"](x=x)["y"]
    return tape.gradient(y, sources)


def test_gradients_are_there_up_to_the_order_and_a_reason_beyond(by_order):
    order, path = by_order
    model = tf.saved_model.load(str(path))
    x, w = np.array([[1.0, 2.0, -1.0]], np.float32), np.array([1.0, 2.0, 3.0])
    if order == 0:
        with pytest.raises(LookupError, match=r"holds no gradients; .*vjp_order=1\) keeps them"):
            gradients(model, 1)
    else:
        by_x, by_w = gradients(model, 1)
        assert_close(by_x, 3 * w * x**2, rtol=1e-5)
        assert_close(by_w, x[0] ** 3, rtol=1e-5)
    if order == 1:
        with pytest.raises(LookupError, match=r"no gradients of these; .*vjp_order=2\) keeps them"):
            gradients(model, 2)
    if order == 2:
        by_x, by_w = gradients(model, 2)
        assert_close(by_x, 6 * w * x + 3 * x**2, rtol=1e-5)
        assert_close(by_w, 3 * x[0] ** 2, rtol=1e-5)


def test_gradients_outlive_another_save_by_tensorflow(tmp_path):
    model = tf.saved_model.load(str(write(tmp_path / "m", trainable=True)))
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(model, str(tmp_path / "again"), model.signatures, options)
    again = tf.saved_model.load(str(tmp_path / "again"))
    for order in (1, 2):
        for one, other in zip(gradients(model, order), gradients(again, order)):
            np.testing.assert_array_equal(one, other)


def test_a_session_restores_runs_and_saves(by_order, tmp_path):
    _, path = by_order
    x = np.ones((2, 3), np.float32)
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        graph = tf.compat.v1.saved_model.load(session, ["serve"], str(path))
        signature = graph.signature_def["serving_default"]
        assert signature.inputs["x"].name == "serving_default_x:0"
        assert sorted(each.name for each in signature.outputs.values()) == [
            f"StatefulPartitionedCall:{place}" for place in range(3)
        ]
        y = session.run(signature.outputs["y"].name, {signature.inputs["x"].name: x})
        np.testing.assert_array_equal(y, x * PARAMS["w"])
        saver, copy = graph.saver_def, str(tmp_path / "copy")
        session.run(saver.save_tensor_name, {saver.filename_tensor_name: copy})
    reader = tf.train.load_checkpoint(copy)
    np.testing.assert_array_equal(
        reader.get_tensor("leaves/w/.ATTRIBUTES/VARIABLE_VALUE"), PARAMS["w"]
    )


def test_signatures_have_placeholders_of_their_own(tmp_path):
    methods = {
        "encode": lambda p, text_x: text_x,
        "encode_text": lambda p, x: 2 * x,
        "_größe/1": lambda p, x: 3 * x,
        "StatefulPartitionedCall": lambda p, x: 4 * x,
    }
    inputs = dict.fromkeys(methods, spec("n")) | {"StatefulPartitionedCall": spec("n", name="1")}
    to_saved_model((PARAMS, methods["encode"]), tmp_path / "m", inputs, methods=methods)
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        graph = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "m"))
        for factor, key in enumerate(methods, 1):
            signature = graph.signature_def[key]
            (x,), (y,) = signature.inputs.values(), signature.outputs.values()
            assert session.run(y.name, {x.name: [1.0]}) == [factor]


def test_a_signature_of_one_input_is_called_by_position(tmp_path):
    methods = {"one": lambda p, x: 2 * x, "two": lambda p, x, y: x - y}
    inputs = {"one": spec("n"), "two": (spec("n"), spec("n"))}
    to_saved_model((PARAMS, methods["one"]), tmp_path / "m", inputs, methods=methods)
    signatures = tf.saved_model.load(str(tmp_path / "m")).signatures
    assert signatures["one"](tf.constant([1.0]))["output"].numpy() == [2]
    with pytest.raises(TypeError):  # TensorFlow sorts inputs by name
        signatures["two"](tf.constant([1.0]), tf.constant([1.0]))


def test_many_variables_are_found_by_name(tmp_path):
    params = {str(place): np.full(3, place, np.float32) for place in range(1500)}
    to_saved_model(
        (params, lambda p, x: x + p["5"][0]), tmp_path / "m", spec("n"), validate="variables"
    )
    reader = tf.train.load_checkpoint(str(tmp_path / "m" / "variables" / "variables"))
    assert len(reader.get_variable_to_shape_map()) == 1501
    for place in (0, 7, 999, 1499):
        found = reader.get_tensor(checkpoint_key(str(place)))
        np.testing.assert_array_equal(found, params[str(place)])


def test_fields_have_the_numbers_of_tensorflow():
    from tensorflow.core.protobuf import (
        saved_model_pb2,
        tensor_bundle_pb2,
        trackable_object_graph_pb2,
    )

    waiting = [
        (schemas.SAVED_MODEL, saved_model_pb2.SavedModel.DESCRIPTOR),
        (schemas.TRACKED_OBJECTS, trackable_object_graph_pb2.TrackableObjectGraph.DESCRIPTOR),
        (schemas.BUNDLE_HEADER, tensor_bundle_pb2.BundleHeaderProto.DESCRIPTOR),
        (schemas.BUNDLE_ENTRY, tensor_bundle_pb2.BundleEntryProto.DESCRIPTOR),
    ]
    seen = set()
    while waiting:
        schema, descriptor = waiting.pop()
        if schema in seen:
            continue
        seen.add(schema)
        for name, (number, kind) in schema.fields.items():
            field = descriptor.fields_by_name[name]
            assert field.number == number, (descriptor.full_name, name)
            if isinstance(kind, Map):
                waiting.append((kind.entry, field.message_type))
                continue
            assert isinstance(kind, Schema) == (field.message_type is not None), name
            if isinstance(kind, Schema):
                waiting.append((kind, field.message_type))
    assert len(seen) > 40


def arrays_of_numpy():
    whole = np.arange(1.0, 25.0, dtype=np.float32).reshape(4, 6)
    bytewise = np.zeros(4 * 24 + 1, np.uint8)[1:].view(np.float32).reshape(4, 6)
    bytewise[...] = whole
    fixed = whole.copy()
    fixed.flags.writeable = False
    yield from {"whole": whole, "odd": bytewise, "fixed": fixed, "turned": whole.T}.items()
    yield from {"parts": whole[::2, ::3], "none": whole[:0], "one": np.float32(3)}.items()
    for dtype in (bool, np.int8, np.uint16, np.int32, np.float16, np.complex64, jnp.bfloat16):
        yield np.dtype(dtype).name, whole.astype(dtype)


def test_arrays_of_numpy_are_written_as_they_are(tmp_path):
    params = dict(arrays_of_numpy())
    to_saved_model((params, lambda p, x: x + p["one"]), tmp_path / "m", spec("n"))
    variables = load(tmp_path / "m").variables
    for name, value in params.items():
        assert variables[name].dtype.name == value.dtype.name
        np.testing.assert_array_equal(variables[name].numpy(), value)


def test_odd_names_of_signatures_and_inputs(tmp_path):
    methods = {
        "a key/of-mine": lambda p, x: x + p,
        "other": lambda p, x: {"a b": x["b c"] * p, "a_b": x["b_c"]},
    }
    names = ("NoOp", "b c", "b_c")
    inputs = {"a key/of-mine": spec("n"), "other": {name: spec("n") for name in names}}
    to_saved_model((jnp.ones(()), methods["other"]), tmp_path / "m", inputs, methods=methods)
    model = load(tmp_path / "m")
    np.testing.assert_array_equal(model.signatures["a key/of-mine"](np.ones(2)), [2, 2])
    found = model.signatures["other"]({name: [place, place] for place, name in enumerate(names)})
    assert (found["a b"].tolist(), found["a_b"].tolist()) == ([1, 1], [2, 2])


class Scale(pax.Module):
    def __init__(self):
        super().__init__()
        self.factor = jnp.full((), 2.0)

    def __call__(self, x):
        y = self.factor * x
        self.factor = self.factor + 1
        return y


def test_gradients_see_the_state_before_the_call(tmp_path):
    to_saved_model(Scale(), tmp_path / "m", spec("n"), state="update", vjp_order=1)
    model = tf.saved_model.load(str(tmp_path / "m"))
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model.signatures["serving_default"](x=x)["output"]
    np.testing.assert_array_equal(y, [2.0, 4.0])
    np.testing.assert_array_equal(tape.gradient(y, x), [2.0, 2.0])
    assert float(model.leaves["factor"]) == 3.0
