"""SavedModels."""

from pax_export.export.artifact.formats import (
    ORDER_OPTION,
    PLATFORM_OPTION,
    WARMUP_REQUESTS,
    Format,
)

SAVED_MODEL = Format(
    name="saved_model",
    title="a SavedModel",
    export="pax_export.export.formats.saved_model.export:to_saved_model",
    load="pax_export.export.formats.saved_model.load:load",
    run="pax_export.export.formats.saved_model.run:run",
    runtime=("tensorflow", "tensorflow"),
    check="pax_export.export.artifact.loading:check_saved_model",
    snippet=(
        "TensorFlow",
        "import tensorflow as tf",
        "model = tf.saved_model.load({path!r})\n"
        "tensors = {{name: tf.constant(value) for name, value in inputs.items()}}\n"
        "outputs = model.signatures[{key!r}](**tensors)\n",
    ),
    option="savedmodel",
    options={
        "trainable": {
            "action": "store_const",
            "const": True,
            "help": "of savedmodel: make parameters trainable variables with gradients",
        },
        "platforms": PLATFORM_OPTION,
        "consumer": {
            "metavar": '"tensorflow>=2.17"',
            "help": "of savedmodel: the oldest TensorFlow that must run it",
        },
        "vjp_order": ORDER_OPTION,
        "operations": {
            "choices": ("tensorflow", "xla"),
            "help": "of savedmodel: TensorFlow's own, which tensorflow_model_server runs as it "
            "starts, or one that XLA compiles; default: TensorFlow's own if that is possible",
        },
        "warmup": {
            "type": int,
            "nargs": "+",
            "metavar": "N",
            "help": "of savedmodel: sizes of requests that TensorFlow Serving answers before it "
            "serves the model",
        },
    },
    loads_without_jax=True,
    has_variables=True,
    files=(
        "saved_model.pb",
        "fingerprint.pb",
        "keras_metadata.pb",
        "variables/checkpoint",
        "variables/variables.index",
        "variables/variables.data-*-of-*",
        "pax_export_retarget.json",
        WARMUP_REQUESTS,
    ),
    plain_path=True,
)
