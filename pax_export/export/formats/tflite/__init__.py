"""TFLite files."""

from pax_export.export.artifact.formats import LEVEL_OPTION, Format

TFLITE = Format(
    name="tflite",
    title="a TFLite model",
    export="pax_export.export.formats.tflite.export:to_tflite",
    load="pax_export.export.formats.tflite.export:load",
    run="pax_export.export.formats.tflite.run:run",
    runtime=("ai_edge_litert", "tflite"),
    check="pax_export.export.artifact.loading:check_file",
    suffix=".tflite",
    snippet=(
        "LiteRT",
        "from ai_edge_litert.interpreter import Interpreter",
        "model = Interpreter(model_path={path!r})\n"
        "outputs = model.get_signature_runner({key!r})(**inputs)\n",
    ),
    options={
        "quantize": {
            "choices": ("float16", "dynamic"),
            "help": "of tflite: weights with fewer bits",
        },
        "accuracy_level": LEVEL_OPTION,
    },
)
