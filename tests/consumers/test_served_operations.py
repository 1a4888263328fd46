"""Every operation that this TensorFlow registers has been judged: allowed in a SavedModel or not.

No export is needed, and no jax: the lists are read from their file.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

tf = pytest.importorskip("tensorflow")

FILE = Path(__file__).parents[2] / "pax_export/export/artifact/allowed_operations.py"


def lists():
    spec = importlib.util.spec_from_file_location("allowed_operations", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def registered():
    """The definitions of all operations by name, not only of those in `tf.raw_ops`."""
    from tensorflow.core.framework.op_def_pb2 import OpList
    from tensorflow.python.client import pywrap_tf_session as session

    found = OpList.FromString(bytes(session.TF_GetBuffer(session.TF_GetAllOpList())))
    return {each.name: each for each in found.op}


def with_cpu_kernel():
    from tensorflow.python.framework.kernels import get_all_registered_kernels

    kernels = get_all_registered_kernels().kernel
    return {each.op for each in kernels if each.device_type in ("CPU", "DEFAULT")}


@pytest.fixture(scope="module")
def operations():
    return lists()


@pytest.fixture(scope="module")
def definitions():
    return registered()


def test_each_is_judged(operations, definitions):
    judged = operations.KNOWN | operations.REFUSED.keys()
    open_ = {
        name
        for name in with_cpu_kernel() & definitions.keys()
        if not name.startswith("_") and not definitions[name].is_stateful
    }
    assert sorted(open_ - judged) == []


def test_none_is_judged_twice(operations):
    closer = operations.MODULES, operations.BY_ATTRIBUTE, operations.TABLE_FILES
    judged = [operations.ALLOWED, operations.REFUSED, *closer, operations.CHECKPOINTS]
    assert len(set().union(*judged)) == sum(map(len, judged))


def test_none_with_the_name_of_a_file_is_allowed(operations, definitions):
    """By what their definitions call it; what else names a file is in the lists with its reason."""
    words = "file", "path", "directory", "address", "url", "host", "port", "target"
    harmless = {
        "ShardedFilename", "ShardedFilespec",  # they make text
        "SymbolicGradient", "SdcaOptimizer", "SdcaOptimizerV2", "NegTrain",
    }  # fmt: skip
    for name in operations.ALLOWED & definitions.keys() - harmless:
        definition = definitions[name]
        texts = [
            each.name for each in definition.input_arg if each.type == tf.string.as_datatype_enum
        ]
        texts += [each.name for each in definition.attr if each.type == "string"]
        assert not [text for text in texts if any(word in text.split("_") for word in words)], name


def test_listed_operations_exist(operations, definitions):
    """Of the newest TensorFlow; an older one lacks some."""
    if tuple(map(int, tf.__version__.split(".")[:2])) < (2, 21):
        pytest.skip("an older TensorFlow has fewer")
    gone = {"TfLiteSubgraphExecute"}
    assert (operations.KNOWN | operations.REFUSED.keys()) - definitions.keys() == gone


@pytest.mark.parametrize(
    "name",
    ["CalibrationStatisticsSaver", "DumpTensor", "RpcServer", "RpcClient", "WriteFile", "ReadFile",
     "QueueDequeueV2", "CollectiveReduceV2", "PyFunc", "_Send", "XlaLaunch"],
)  # fmt: skip
def test_what_does_harm_is_in_no_list_of_allowed_ones(operations, name):
    assert name not in operations.KNOWN
