"""TensorFlow functions before and after a model, exported with it."""

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import InvalidArgumentError, UnsupportedDtypeError, ValidationError
from pax_export.export import load, spec, to_saved_model
from tests.closeness import assert_close
from tests.export.models import Counter, Net, affine, affine_params, random

tf = pytest.importorskip("tensorflow")

WORDS = ["the", "quick", "fox"]
TABLE = random(4, 2)


def embed(params, tokens):
    return params["table"][tokens].sum(axis=1)


def embedding():
    return {"table": jnp.asarray(TABLE)}, embed


def tokenizer(words=WORDS):
    pairs = tf.lookup.KeyValueTensorInitializer(
        words, range(1, len(words) + 1), tf.string, tf.int32
    )
    table = tf.lookup.StaticHashTable(pairs, 0)
    return lambda text: table.lookup(tf.strings.split(text).to_tensor(""))


def label(logits):
    return {"label": tf.gather(["no", "yes"], tf.argmax(logits, -1)), "logits": logits}


def of_words(*texts):
    return np.array([TABLE[[WORDS.index(w) + 1 for w in text.split()]].sum(0) for text in texts])


def test_text_goes_in_and_comes_out(export):
    loaded, report = export(
        embedding(), spec("batch, length", "int32"), validate=True, trainable=True,
        preprocess=tokenizer(), preprocess_inputs=spec("batch", "string"), postprocess=label,
    )  # fmt: skip
    (signature,) = report.signatures.values()
    assert [str(entry) for entry in signature.inputs] == ["text: string[batch]"]
    assert [str(entry) for entry in signature.preprocess] == ["tokens: int32[batch, length]"]
    assert [str(entry) for entry in signature.postprocess] == ["output: float32[batch, 2]"]
    assert [str(entry) for entry in signature.outputs] == [
        "label: string[?]",
        "logits: float32[?, 2]",
    ]
    assert "to the model    tokens: int32[batch, length]" in str(report)
    assert report.largest_error["serving_default: output"] < 1e-6
    expected = of_words("the fox", "quick quick")
    for given in (["the fox", "quick quick"], tf.constant(["the fox", "quick quick"])):
        result = loaded(given)
        assert_close(result["logits"], expected, atol=1e-6)
        names = [[b"no", b"yes"][i] for i in expected.argmax(-1)]
        assert np.asarray(result["label"]).tolist() == names
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(loaded(tf.constant(["the"]))["logits"])
    rows = tf.convert_to_tensor(tape.gradient(loss, loaded.variables["table"]))
    np.testing.assert_array_equal(rows, [[0, 0], [1, 1], [0, 0], [0, 0]])


def test_a_vocabulary_file_is_an_asset_and_a_variable_is_kept(tmp_path):
    class Tokenize(tf.Module):
        def __init__(self, file):
            super().__init__()
            read = tf.lookup.TextFileInitializer(file, tf.string, 0, tf.int64, 1, delimiter=" ")
            self.table = tf.lookup.StaticHashTable(read, 0)
            self.shift = tf.Variable(1)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
        def __call__(self, text):
            found = self.table.lookup(tf.strings.split(text).to_tensor(""))
            return {"tokens": tf.cast(found, tf.int32) + self.shift}

    file = tmp_path / "words.txt"
    file.write_text("the 0\nquick 1\nfox 2\n")
    to_saved_model(
        embedding(), tmp_path / "a", spec("batch, length", "int32"),
        preprocess=Tokenize(str(file)),
    )  # fmt: skip
    file.unlink()
    assert_close(load(tmp_path / "a")(["the fox"]), of_words("the fox"), atol=1e-6)
    assert str(tmp_path).encode() not in (tmp_path / "a" / "saved_model.pb").read_bytes()
    assert (tmp_path / "a" / "assets" / "words.txt").is_file()


def test_two_models_of_one_process_keep_their_vocabularies_apart(tmp_path):
    def export(name, words):
        (tmp_path / "words.txt").write_text(words)
        read = tf.lookup.TextFileInitializer(
            str(tmp_path / "words.txt"), tf.string, 0, tf.int64, 1, delimiter=" "
        )
        table = tf.lookup.StaticHashTable(read, 0)
        to_saved_model(
            embedding(), tmp_path / name, spec("batch, 1", "int32"), validate=False,
            preprocess=lambda text: tf.cast(table.lookup(text), tf.int32)[:, None],
            preprocess_inputs=spec("batch", "string"),
        )  # fmt: skip

    export("one", "the 1\n")
    export("two", "the 2\n")
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert_close(one(["the"]), TABLE[[1]])
    assert_close(two(["the"]), TABLE[[2]])


def test_a_layer_that_is_not_built_yet_is_saved_with_its_weights(export):
    dense = tf.keras.layers.Dense(3)
    loaded, report = export(
        Net(), spec("batch, 3"), preprocess=dense, preprocess_inputs=spec("batch, 5"), validate=True
    )
    x = random(2, 5)
    assert_close(loaded(x), Net()(dense(x).numpy()), atol=1e-5)
    assert [variable.name for variable in report.variables] == ["layer.weight", "layer.bias"]


def test_each_method_has_processors_of_its_own(export):
    def read(text, factor):
        return {"x": tf.strings.to_number(text), "scale": factor}

    net = Net()
    loaded, report = export(
        net,
        {"serving_default": spec("batch, 3"), "encode": spec("batch, 3"), "raw": spec("batch, 3")},
        kwargs={"encode": {"scale": spec("")}},
        methods={"serving_default": "__call__", "encode": "encode", "raw": "__call__"},
        preprocess={"encode": read},
        preprocess_inputs={"encode": (spec("batch, 3", "string"), tf.TensorSpec([], tf.float32))},
        postprocess={"serving_default": lambda y: -y},
        examples={"encode": [([["1", "2", "3"]], 2.0), {"text": [["1.5", "0", "1"]], "factor": 1}]},
        validate=True,
    )  # fmt: skip
    x = random(2, 3)
    assert_close(loaded(x), -net(x), atol=1e-6)
    assert_close(loaded.signatures["raw"](x), net(x), atol=1e-6)
    encoded = loaded.signatures["encode"]([["1", "2", "3"]], 2.0)
    assert_close(encoded["total"], [6.0])
    assert [entry.name for entry in report.signatures["encode"].inputs] == ["text", "factor"]
    assert report.signatures["raw"].preprocess is None


def test_text_that_a_preprocessor_cannot_read_needs_examples(tmp_path):
    with pytest.raises(ValidationError, match=r"(?s)cannot be called.*fix: examples="):
        to_saved_model(
            (affine_params(), affine), tmp_path / "model", spec("n, 3"),
            preprocess=tf.strings.to_number, preprocess_inputs=spec("n, 3", "string"),
        )  # fmt: skip


def test_examples_take_the_place_of_random_numbers(tmp_path, monkeypatch):
    from pax_export.export.formats.saved_model import export

    seen = []
    validate = export.validated

    def noted(format, place, cases, *args, **options):
        seen.extend(cases)
        return validate(format, place, seen, *args, **options)

    monkeypatch.setattr(export, "validated", noted)
    example = random(7, 3)
    to_saved_model((affine_params(), affine), tmp_path / "model", spec("n, 3"), examples=[example])
    # One call, its gradient, and the call in a session.
    assert [bool(case.cotangents) for case in seen] == [False, True, False]
    for case in seen:
        np.testing.assert_array_equal(case.inputs["x"], example)


def test_state_is_updated_once_for_each_call(export):
    loaded, report = export(
        Counter(), spec("n"), state="update", postprocess=lambda y: (y, {"twice": 2 * y}),
        validate=True,
    )  # fmt: skip
    results = [loaded([0.0]) for _ in range(2)]
    assert [float(one[0]) for one, _ in results] == [1.0, 2.0]
    assert [float(two["twice"][0]) for _, two in results] == [2.0, 4.0]
    assert [entry.name for entry in report.signatures["serving_default"].outputs] == [
        "output.0", "output.1.twice",
    ]  # fmt: skip


def test_random_preprocessors_are_validated_on_what_they_gave(export):
    export(
        (affine_params(), affine), spec("n, 3"), validate=True,
        preprocess=lambda x: x + tf.random.uniform(tf.shape(x)), preprocess_inputs=spec("n, 3"),
    )  # fmt: skip


def test_a_wrong_model_behind_a_preprocessor_is_found_out(tmp_path, monkeypatch):
    from pax_export.export.formats.saved_model import writer as saved_model

    write = saved_model.write

    def damaged(directory, store, *others):
        store.variables[0].value = store.variables[0].value + 1
        write(directory, store, *others)
        store.variables[0].value = store.variables[0].value - 1

    monkeypatch.setattr(saved_model, "write", damaged)
    with pytest.raises(ValidationError, match="differs"):
        to_saved_model(
            embedding(), tmp_path / "model", spec("n, k", "int32"), preprocess=tokenizer(),
            preprocess_inputs=spec("n", "string"),
        )  # fmt: skip
    assert not (tmp_path / "model").exists()


text = spec("n", "string")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preprocess": lambda x: x}, "The inputs of the preprocessor are unknown"),
        ({"preprocess_inputs": text}, "requires preprocess"),
        (
            {"preprocess": lambda t: tf.strings.length(t), "preprocess_inputs": text},
            r"got: int32\(None,\)\n  fix: x: float32\[n, 3\]",
        ),
        (
            {"preprocess": lambda t: tf.zeros([2, 4]), "preprocess_inputs": text},
            r"where: serving_default: x\n  got: float32\(2, 4\)",
        ),
        (
            {"preprocess": lambda t: tf.strings.split(t), "preprocess_inputs": text},
            "got: RaggedTensor",
        ),
        (
            {"preprocess": lambda t: (t, t), "preprocess_inputs": text},
            "(?s)values do not match the arguments.*got: 2 values",
        ),
        (
            {"preprocess": lambda t: {"y": t}, "preprocess_inputs": text},
            "(?s)do not match the inputs of the model.*got: dict",
        ),
        ({"postprocess": lambda y: tf.RaggedTensor.from_tensor(y)}, "ragged"),
        ({"postprocess": lambda y: None}, "returns no tensor"),
    ],
)
def test_processors_that_do_not_fit_are_refused_before_writing(tmp_path, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        to_saved_model((affine_params(), affine), tmp_path / "model", spec("n, 3"), **options)
    assert not list(tmp_path.iterdir())


def test_processors_of_unknown_signatures_are_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="must be a dict over signatures"):
        to_saved_model(
            Net(), tmp_path / "model", {"a": spec("n, 3")}, methods={"a": "__call__"},
            postprocess=lambda y: y,
        )  # fmt: skip


def test_a_table_that_nobody_holds_is_refused(tmp_path):
    hidden = []

    class Slots:
        __slots__ = ("table",)

        def __call__(self, text):
            return tf.cast(self.table.lookup(text), tf.float32)[:, None] * tf.ones(3)

    pre = Slots()
    pre.table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a"], [1]), default_value=0
    )
    hidden.append(pre.table)
    with pytest.raises(InvalidArgumentError, match="(?s)cannot be found.*a tf.Module with"):
        to_saved_model(
            (affine_params(), affine), tmp_path / "model", spec("n, 3"), preprocess=pre,
            preprocess_inputs=text,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_model_itself_takes_no_text(tmp_path):
    with pytest.raises(UnsupportedDtypeError, match="(?s)where: x.*preprocess="):
        to_saved_model((affine_params(), affine), tmp_path / "model", text)
    assert pax.export.spec("n", str).dtype == pax.export.spec("n", np.dtype("S3")).dtype == "string"
