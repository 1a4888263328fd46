"""Functions of TensorFlow around a model, searched for what they hold."""

import functools

import pytest

from pax_export.export.formats.saved_model.processing import as_function, trackables

tf = pytest.importorskip("tensorflow")


def table():
    pairs = tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2])
    return tf.lookup.StaticHashTable(pairs, -1)


GLOBAL = tf.Variable(3.0)


def test_a_function_is_found_to_hold_what_it_reads():
    words, scale, default, kept = table(), tf.Variable(2.0), tf.Variable(1.0), tf.Variable(0.0)

    class Plain:
        def __init__(self):
            self.words = {"inner": [kept]}

        def __call__(self, x):
            return x + self.words["inner"][0]

    def outer(x, y=default):
        def inner(z):
            return words.lookup(z), GLOBAL

        return inner(x), scale

    def ids(values):
        return {id(value) for value in values}

    expected = ids([words, scale, default, GLOBAL])
    assert ids(trackables(outer)) == expected
    assert ids(trackables(tf.function(outer))) == expected
    assert ids(trackables(functools.partial(outer, y=kept))) == expected | {id(kept)}
    assert ids(trackables(Plain())) == ids(trackables(Plain().__call__)) == {id(kept)}


# AutoGraph's parser uses what Python 3.15 will take away.
@pytest.mark.filterwarnings("ignore:.* got an unexpected keyword argument:DeprecationWarning")
def test_python_control_flow_on_tensors_works():
    def sign(x):
        if x > 0:
            return 1
        return -1

    assert [int(as_function(sign)(tf.constant(x))) for x in (2.0, -2.0)] == [1, -1]
