"""The module: its arguments, its properties, and the words of its errors."""

import jax
import jax.numpy as jnp
import pytest
import tensorflow as tf

from pax_export.errors import UnsupportedDtypeError
from pax_export.export.orbax import ExportManager, JaxModule, ServingConfig
from tests.closeness import assert_close
from tests.export.orbax.models import KEY, X, call, linear, module, params, x_spec
from tests.refusals import refused

TWO = {"one": linear, "two": lambda p, x: 2 * linear(p, x)}
SHAPES = {"one": "b, ...", "two": None}


@pytest.mark.parametrize("shapes", [SHAPES, None])
def test_a_mapping_of_functions_keeps_its_keys(shapes):
    made = JaxModule(params(), TWO, input_polymorphic_shape=shapes)
    assert made.input_polymorphic_shape_map == (shapes or {"one": None, "two": None})
    for key in TWO:
        assert_close(call(made, key=key), TWO[key](params(), X))


def test_arguments_can_be_read():
    given = params()
    made = module(
        params=given, name="net", jax2tf_kwargs={"native_serialization_platforms": ["cpu"]}
    )
    assert made.name == "net"
    assert made.model_params is given
    assert made.apply_fn_map == {KEY: linear}
    assert made.input_polymorphic_shape_map == {KEY: "b, ..."}
    assert made.jax2tf_kwargs_map == {KEY: {"native_serialization_platforms": ["cpu"]}}
    assert made.export_module() is made
    assert not made.with_gradient


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        (None, set()),
        (False, set()),
        (True, {"deep.k:0", "deep.l:0", "steps:0", "w:0"}),  # the integer as well
        ({"deep": True, "steps": False, "w": False}, {"deep.k:0", "deep.l:0"}),
        (
            {"deep": {"k": False, "l": True}, "steps": True, "w": True},
            {"deep.l:0", "steps:0", "w:0"},
        ),
    ],
)
def test_trainable_is_a_bool_or_begins_the_pytree(trainable, expected):
    given = {
        "deep": {"k": jnp.ones(1), "l": jnp.ones(2)},
        "steps": jnp.zeros((), jnp.int32),
        "w": jnp.ones(3),
    }
    made = JaxModule(given, lambda params, x: x, trainable=trainable)
    assert {variable.name for variable in made.trainable_variables} == expected
    assert made.with_gradient == bool(expected)


def test_gradients_beside_integers_that_are_called_trainable(tmp_path):
    given = {"w": jnp.arange(6.0).reshape(3, 2), "steps": jnp.int32(3)}

    def apply(params, x):
        return {"y": x @ params["w"] * params["steps"]}

    made = JaxModule(given, apply, trainable=True, input_polymorphic_shape="b, ...")
    manager = ExportManager(made, [ServingConfig("s", [x_spec()])])
    manager.save(tmp_path / "1")
    for function, variables in (
        (made.methods[KEY], made.trainable_variables),
        (manager.load(tmp_path / "1"), None),
    ):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(tf.constant(X))["y"])
        variables = tape.watched_variables() if variables is None else variables
        assert {each.name for each in variables} == {"w:0", "steps:0"}
        found = dict(zip([v.name for v in variables], tape.gradient(loss, variables)))
        assert found["steps:0"] is None
        assert_close(found["w:0"], jax.grad(lambda w: (X @ w * 3).sum())(given["w"]))


def test_trainable_of_another_structure_is_refused():
    with refused(ValueError) as caught:
        JaxModule(params(), linear, trainable={"w": True})
    assert caught.value.__notes__ == ["The prefix is `trainable`."]


REFUSED = {
    "shapes for one of two": (
        {"apply_fn": TWO, "input_polymorphic_shape": {"one": None}},
        "`input_polymorphic_shape` must",
    ),
    "one shape for two": (
        {"apply_fn": TWO, "input_polymorphic_shape": "b, ..."},
        "`input_polymorphic_shape` must",
    ),
    "options for one of two": (
        {"apply_fn": TWO, "input_polymorphic_shape": SHAPES, "jax2tf_kwargs": {"one": None}},
        "`jax2tf_kwargs` must",
    ),
    "jit for one of two": (
        {"apply_fn": TWO, "input_polymorphic_shape": SHAPES, "jit_compile": {"one": True}},
        "`jit_compile` must",
    ),
    "gradients of nothing": (
        {"jax2tf_kwargs": {"with_gradient": True}},
        "`with_gradient`",
    ),
    "no gradients of something": (
        {"trainable": True, "jax2tf_kwargs": {"with_gradient": False}},
        "`with_gradient`",
    ),
    "an unknown platform": (
        {"jax2tf_kwargs": {"native_serialization_platforms": ["abacus"]}},
        "some of cpu, cuda, rocm and tpu",
    ),
    "no function": ({"apply_fn": 3}, "`apply_fn` must be a function"),
    "no functions": ({"apply_fn": {}}, "`apply_fn` must be a function"),
    "specs without a mesh": (
        {"pspecs": {"w": None, "b": None}},
        "no DTensor mesh",
    ),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_do_not_fit_are_refused(arguments, words):
    with refused(ValueError, words):
        JaxModule(params(), **{"apply_fn": linear, **arguments})


def test_an_unknown_option_is_refused():
    for option in ("fast", "polymorphic_shapes"):
        with pytest.raises(TypeError, match=option):
            module(jax2tf_kwargs={option: True})


def test_without_native_serialization_the_operations_are_those_of_tensorflow(tmp_path):
    def served(**options):
        made = module(jax2tf_kwargs=options | {"enable_xla": False}, trainable=True)
        path = str(tmp_path / f"{len(options)}")
        ExportManager(made, [ServingConfig("serving", [x_spec()])]).save(path)
        model = tf.saved_model.load(path)
        graph = model.signatures["serving"].graph.as_graph_def()
        nodes = [*graph.node, *(x for each in graph.library.function for x in each.node_def)]
        must = any(each.attr["_XlaMustCompile"].b for each in graph.library.function)
        (out,) = model.signatures["serving"](x=tf.constant(X)).values()
        assert_close(out, linear(params(), X))
        with tf.GradientTape() as tape:
            out = tf.reduce_sum(made.methods[KEY](X))
        of_b, of_w = tape.gradient(out, made.trainable_variables)
        assert_close(of_b, [2, 2])
        assert of_w.shape == (3, 2)
        return must, "XlaCallModule" in {each.op for each in nodes}

    assert served() == (True, True)
    assert served(native_serialization=False) == (False, False)


def test_jit_compile_is_that_of_the_functions():
    made = JaxModule(
        params(), TWO, input_polymorphic_shape=SHAPES, jit_compile={"one": True, "two": False}
    )
    functions = [made.methods[key].get_concrete_function(x_spec(2)) for key in TWO]
    compiled = [
        each.function_def.attr["_XlaMustCompile"].b
        for each in functions  # as TensorFlow marks it
    ]
    assert compiled == [True, False]


def test_platforms_are_those_that_were_asked_for():
    def platforms(**options):
        made = module(jax2tf_kwargs=options)
        graph = made.methods[KEY].get_concrete_function(x_spec()).graph.as_graph_def()
        nodes = (node for function in graph.library.function for node in function.node_def)
        (node,) = [node for node in nodes if node.op == "XlaCallModule"]
        return [name.decode() for name in node.attr["platforms"].list.s]

    assert platforms() == ["CPU", "CUDA", "ROCM", "TPU"]
    assert platforms(native_serialization_platforms=("cpu",)) == ["CPU"]


def test_text_is_refused():
    with refused(UnsupportedDtypeError, "strings"):
        module().methods[KEY](tf.constant([["a", "b", "c"]]))


@pytest.mark.parametrize("platforms", ["cpu", ["cpu"], ("cpu",)])
def test_one_platform_and_one_constraint_may_be_texts(platforms):
    options = {"native_serialization_platforms": platforms, "polymorphic_constraints": "b <= 5"}
    made = module(jax2tf_kwargs=options)
    assert_close(call(made), linear(params(), X))
