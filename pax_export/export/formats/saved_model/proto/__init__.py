"""A SavedModel written down message by message.

`tf.saved_model.save` finds out by tracing what is to be saved, and traces more
functions to save and restore it: some 6 ms for each variable.  An export knows
what it holds, so the messages of which a SavedModel consists are filled in
directly, one file here for each of them:

    _functions.py    what is called: a function for each signature and gradient
    _objects.py      what `tf.saved_model.load` gives: variables and signatures
    _graph.py        the same for sessions and servers, which know no objects
    _checkpoint.py   the values of the variables

Functions of TensorFlow around a signature may hold anything; an export with
them is saved by TensorFlow (`writers/saved_model.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pax_export._optional import require
from pax_export.export.formats.saved_model.proto.checkpoint import write_checkpoint
from pax_export.export.formats.saved_model.proto.functions import write_functions
from pax_export.export.formats.saved_model.proto.graph import write_graph
from pax_export.export.formats.saved_model.proto.objects import (
    write_checkpoint_objects,
    write_objects,
)
from pax_export.export.formats.tf_functions import tensorflow
from pax_export.export.lowering.lower import Signature
from pax_export.export.lowering.variables import Store


def write(directory: Path, store: Store, signatures: Sequence[Signature]) -> None:
    """Writes a SavedModel into an empty directory.

    Args:
        directory: where to.
        store: the variables.
        signatures: what is to be called; none has functions of TensorFlow around it.
    """
    tf = tensorflow("to_saved_model")
    messages = require("tensorflow.core.protobuf.saved_model_pb2", "tensorflow", "to_saved_model")
    model = messages.SavedModel(saved_model_schema_version=1)
    graph = model.meta_graphs.add()
    graph.meta_info_def.tags.append("serve")
    graph.meta_info_def.tensorflow_version = tf.version.VERSION
    graph.meta_info_def.tensorflow_git_version = tf.version.GIT_VERSION
    graph.meta_info_def.stripped_default_attrs = True
    library, variables = graph.graph_def.library, store.variables
    functions = {each.key: write_functions(library, each, store) for each in signatures}
    write_graph(graph, variables, functions)
    write_objects(graph.object_graph_def, variables, functions)
    folder = directory / "variables"
    folder.mkdir()
    write_checkpoint(folder, variables, write_checkpoint_objects(variables, graph.object_graph_def))
    (directory / "saved_model.pb").write_bytes(model.SerializeToString(deterministic=True))
