"""ONNX files, and folders for browsers with them."""

from pax_export.export.artifact.formats import LEVEL_OPTION, Format

ONNX = Format(
    name="onnx",
    title="an ONNX model",
    export="pax_export.export.formats.onnx.export:to_onnx",
    load="pax_export.export.formats.onnx.export:load",
    run="pax_export.export.formats.onnx.run:run",
    runtime=("onnxruntime", "onnx"),
    others="pax_export.export.formats.onnx.runtimes",
    snippet=(
        "onnxruntime",
        "import onnxruntime",
        "model = onnxruntime.InferenceSession({path!r})\n"
        "taken = {{entry.name: inputs[entry.name] for entry in model.get_inputs()}}\n"
        "outputs = model.run(None, taken)\n",
    ),
    check="pax_export.export.artifact.loading:check_file",
    suffix=".onnx",
    not_in_numpy=("bfloat16", "float8_e4m3fn", "float8_e5m2"),
    options={
        "opset": {"type": int, "metavar": "N", "help": "of onnx: the version of its operators"},
        "accuracy_level": LEVEL_OPTION,
        "external_data": {
            "action": "store_const",
            "const": True,
            "help": "of onnx: write the weights to a separate file, as beyond 2 GiB",
        },
    },
)
WEB = Format(
    name="web",
    title="a folder for browsers",
    export="pax_export.export.formats.onnx.web.export:to_web",
    load="pax_export.export.formats.onnx.web.export:load",
    run="pax_export.export.formats.onnx.web.browser:run",
    check="pax_export.export.formats.onnx.web.export:check",
    javascript="pax_export.export.formats.onnx.web:javascript_call",
    run_imports=("pax_export",),
    files=(
        *("*.onnx", "*.onnx.*.data", "*.js", "model.d.ts", "index.html", "page.css"),
        *("package.json", "onnxruntime-web/*"),
    ),
)
