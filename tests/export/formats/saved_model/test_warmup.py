"""The requests that TensorFlow Serving answers before it serves a version."""

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export._foundations.wire import Memory, Message, MessageFields
from pax_export.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export import spec, to_saved_model
from pax_export.export.artifact.formats import WARMUP_REQUESTS
from tests.refusals import refused

tf = pytest.importorskip("tensorflow")
TensorProto = pytest.importorskip("tensorflow.core.framework.tensor_pb2").TensorProto


def requests(folder):
    """The signature and the tensors of each request, as TensorFlow reads them."""
    for record in tf.data.TFRecordDataset(str(folder / WARMUP_REQUESTS)):
        log = MessageFields(Message(Memory(record.numpy())))
        (request,) = (MessageFields(each) for each in MessageFields(*log.messages(6)).messages(1))
        tensors = {}
        for each in map(MessageFields, request.messages(2)):
            content = each.messages(2)[0].content()
            dtype = TensorProto.FromString(content).dtype
            tensors[each.text(1)] = tf.io.parse_tensor(content, dtype)
        yield MessageFields(*request.messages(1)).text(3), tensors


def test_each_signature_gets_a_request_of_each_size(tmp_path):
    methods = {"scale": lambda p, x: p * x, "add": lambda p, x, n: x + n}
    inputs = {"scale": spec("b, 3"), "add": (spec("b, 2"), spec("b, 1", "int32"))}
    to_saved_model(
        (jnp.ones(()), methods["scale"]), tmp_path / "m", inputs, methods=methods, warmup=[1, 8]
    )
    found = [
        (key, {name: (each.dtype.name, each.shape.as_list()) for name, each in tensors.items()})
        for key, tensors in requests(tmp_path / "m")
    ]
    assert found == [
        ("scale", {"x": ("float32", [1, 3])}),
        ("scale", {"x": ("float32", [8, 3])}),
        ("add", {"n": ("int32", [1, 1]), "x": ("float32", [1, 2])}),
        ("add", {"n": ("int32", [8, 1]), "x": ("float32", [8, 2])}),
    ]
    assert WARMUP_REQUESTS in (tmp_path / "m" / "SHA256SUMS").read_text()
    pax.export.load(tmp_path / "m")
    (tmp_path / "m" / WARMUP_REQUESTS).write_bytes(b"")
    with refused(pax.errors.ExportPathError, "hash"):
        pax.export.load(tmp_path / "m")


def test_examples_are_repeated(tmp_path):
    words = np.array([b"1", b"2"], object)
    to_saved_model(
        pax.Linear(1, 2),
        tmp_path / "m",
        spec("b, 1"),
        preprocess=lambda text: tf.strings.to_number(text)[:, None],
        preprocess_inputs=spec("b", "string"),
        examples=[words],
        warmup=[{"b": 3}],
    )
    ((_, tensors),) = requests(tmp_path / "m")
    assert tensors["text"].numpy().tolist() == [b"1", b"2", b"1"]


def test_requests_change_no_state(tmp_path):
    class Counter(pax.StateModule):
        def __init__(self):
            super().__init__()
            self.count = jnp.zeros(())

        def __call__(self, x):
            self.count = self.count + 1
            return x + self.count

    with refused(InvalidArgumentError, "side effects"):
        to_saved_model(Counter(), tmp_path / "m", spec("b"), state="update", warmup=[1])


@pytest.mark.parametrize(
    ("warmup", "kind", "word"),
    [
        ([1], InvalidArgumentError, "b, n"),
        ([{"b": 1}], InvalidArgumentError, "b, n"),
        ([{"b": 9, "n": 1}], InvalidArgumentError, "b <= 8"),
        (8, InvalidArgumentTypeError, "list of sizes"),
        ([True], InvalidArgumentTypeError, "list of sizes"),
        ([0], InvalidArgumentTypeError, "list of sizes"),
        ("18", InvalidArgumentTypeError, "list of sizes"),
    ],
)
def test_sizes_that_no_call_has_are_refused(tmp_path, warmup, kind, word):
    with refused(kind, "warmup") as error:
        to_saved_model(
            lambda x: x + 1, tmp_path / "m", spec("b, n"), constraints=["b <= 8"], warmup=warmup
        )
    assert word in str(error.value)
    assert not list(tmp_path.iterdir())
