"""Message schemas of SavedModels and checkpoints: the fields that are written.

The names and numbers are those of TensorFlow's ``.proto`` files, which never change their meaning.
"""

from __future__ import annotations

from pax_export._foundations.wire import Map, Schema

#: The release of TensorFlow that has these messages, and its version of graphs.
TENSORFLOW, GRAPH_VERSION = "2.21.0", 2474
#: Members of `DataType`: float32 and dtypes that numpy lacks.
FLOAT, STRING, RESOURCE, VARIANT = 1, 7, 20, 21
#: `SaverDef.CheckpointFormatVersion.V2`
SAVER_VERSION = 2

SHAPE = Schema(dim=(2, Schema(size=1)), unknown_rank=3)
_VERSIONS = Schema(producer=1, min_consumer=2)

# Attributes and nodes
TENSOR = Schema(dtype=1, tensor_shape=(2, SHAPE), tensor_content=4, string_val=8)
_FUNCTION = Schema(name=1)
_LIST = Schema(s=2, i=3, f=4, b=5, type=6, shape=(7, SHAPE), func=(9, _FUNCTION))
ATTRIBUTE = Schema(
    alternatives=True,
    list=(1, _LIST), s=2, i=3, f=(4, "<f"), b=5, type=6, shape=(7, SHAPE), tensor=(8, TENSOR),
    func=(10, _FUNCTION),
)  # fmt: skip
_NODE = Schema(name=1, op=2, input=3, attr=(5, Map(ATTRIBUTE)))

# Functions
_HANDLE = Schema(dtype=1, shape=(2, SHAPE))
_ARGUMENT = Schema(name=1, type=3, handle_data=(7, _HANDLE))
_OPERATION = Schema(
    name=1, input_arg=(2, _ARGUMENT), output_arg=(3, _ARGUMENT), is_stateful=17, control_output=20
)
_FUNCTION_DEF = Schema(
    signature=(1, _OPERATION), node_def=(3, _NODE), ret=(4, Map()), control_ret=(6, Map()),
    arg_attr=(7, Map(Schema(attr=(1, Map(ATTRIBUTE))))),
)  # fmt: skip
_GRADIENT = Schema(gradient_func=1, registered_op_type=2)
_LIBRARY = Schema(function=(1, _FUNCTION_DEF), registered_gradients=(3, _GRADIENT))
GRAPH = Schema(node=(1, _NODE), library=(2, _LIBRARY), versions=(4, _VERSIONS))

# Objects
_CHILD = Schema(node_id=1, local_name=2)
_VARIABLE = Schema(dtype=1, shape=(2, SHAPE), trainable=3, name=6)
_BARE_FUNCTION = Schema(
    concrete_function_name=1, argument_keywords=2, allowed_positional_arguments=3
)
_OBJECT = Schema(
    children=(1, _CHILD),
    user_object=(4, Schema(identifier=1, version=(2, _VERSIONS))),
    variable=(7, _VARIABLE),
    bare_concrete_function=(8, _BARE_FUNCTION),
    resource=(10, Schema()),
    captured_tensor=(12, Schema(name=1, concrete_function=2)),
)
_VALUE = Schema(
    alternatives=True,
    none_value=(1, Schema()),
    tensor_spec_value=(33, Schema(name=1, shape=(2, SHAPE), dtype=3)),
)
_VALUES = Schema(values=(1, _VALUE))
_VALUE.add(list_value=(51, _VALUES), tuple_value=(52, _VALUES))
_VALUE.add(dict_value=(53, Schema(fields=(1, Map(_VALUE)))))
_CONCRETE = Schema(
    bound_inputs=2, canonicalized_input_signature=(3, _VALUE), output_signature=(4, _VALUE)
)
_OBJECTS = Schema(nodes=(1, _OBJECT), concrete_functions=(2, Map(_CONCRETE)))

# The file saved_model.pb
_META = Schema(tags=4, tensorflow_version=5, stripped_default_attrs=7)
_SAVER = Schema(filename_tensor_name=1, save_tensor_name=2, restore_op_name=3, version=7)
_TENSOR_INFO = Map(Schema(name=1, dtype=2, tensor_shape=(3, SHAPE)))
_SIGNATURE = Schema(inputs=(1, _TENSOR_INFO), outputs=(2, _TENSOR_INFO), method_name=3)
_META_GRAPH = Schema(
    meta_info_def=(1, _META), graph_def=(2, GRAPH), saver_def=(3, _SAVER),
    signature_def=(5, Map(_SIGNATURE)), object_graph_def=(7, _OBJECTS),
)  # fmt: skip
SAVED_MODEL = Schema(saved_model_schema_version=1, meta_graphs=(2, _META_GRAPH))

# Checkpoints
_SAVED = Schema(name=1, full_name=2, checkpoint_key=3)
_TRACKED = Schema(
    children=(1, _CHILD), attributes=(2, _SAVED), has_checkpoint_values=(5, Schema(value=1))
)
TRACKED_OBJECTS = Schema(nodes=(1, _TRACKED))
BUNDLE_HEADER = Schema(num_shards=1, version=(3, _VERSIONS))
BUNDLE_ENTRY = Schema(dtype=1, shape=(2, SHAPE), offset=4, size=5, crc32c=(6, "<I"))
