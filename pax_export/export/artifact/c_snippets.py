"""A call of an export from C, by the library of its runtime."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from pax_export.export.artifact import dimensions
from pax_export.export.artifact.report import ArrayInfo, Report, SignatureInfo

#: Of a dtype its type in C, and the endings of its names in TensorFlow and ONNX.
_TYPES = {
    "float32": ("float", "FLOAT", "FLOAT"),
    "float64": ("double", "DOUBLE", "DOUBLE"),
    "float16": ("uint16_t", "HALF", "FLOAT16"),
    "bfloat16": ("uint16_t", "BFLOAT16", "BFLOAT16"),
    "int8": ("int8_t", "INT8", "INT8"),
    "int16": ("int16_t", "INT16", "INT16"),
    "int32": ("int32_t", "INT32", "INT32"),
    "int64": ("int64_t", "INT64", "INT64"),
    "uint8": ("uint8_t", "UINT8", "UINT8"),
    "uint16": ("uint16_t", "UINT16", "UINT16"),
    "uint32": ("uint32_t", "UINT32", "UINT32"),
    "uint64": ("uint64_t", "UINT64", "UINT64"),
    "bool": ("uint8_t", "BOOL", "BOOL"),
}
DTYPES = tuple(_TYPES)
_PLACEHOLDER = re.compile(r"[^A-Za-z0-9_.-]")

Sizes = Mapping[str, int]
#: The number of an input, itself, its sizes as text, and how many elements it has.
Input = tuple[int, ArrayInfo, str, int]


def of(report: Report, key: str, path: str, sizes: Sizes) -> str:
    """The text of a program; empty where there is none for such an export."""
    info = report.signatures[key]
    known = all(each.dtype in _TYPES for each in (*info.inputs, *info.outputs))
    write = _WRITERS.get(report.target)
    if write is None or not known or not info.inputs:
        return ""
    try:
        return write(report, key, info, path, sizes)
    except ValueError:  # nobody knows sizes that fit
        return ""


_PLAIN = frozenset(b" !#$%&'()*+,-./:;<=>@[]^_`{|}~" + bytes(range(48, 58)))
_LETTERS = frozenset(bytes(range(65, 91)) + bytes(range(97, 123)))


def quoted(text: str) -> str:
    r"""A text as C writes it, whatever is in it.

    Example:
        >>> print(quoted('a "b"?'))
        "a \042b\042\077"
    """
    content = text.encode("utf-8", "backslashreplace")
    plain = _PLAIN | _LETTERS
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in content) + '"'


def _type(entry: ArrayInfo) -> str:
    return _TYPES[entry.dtype][0]


def _numbered(entries: tuple[ArrayInfo, ...], sizes: Sizes) -> list[Input]:
    shapes = [dimensions.shape(each.shape, sizes) for each in entries]
    return [
        (number, each, ", ".join(map(str, shape)), math.prod(shape))
        for number, (each, shape) in enumerate(zip(entries, shapes))
    ]


def _shapes(inputs: list[Input], kind: str) -> str:
    """The arrays of sizes; a number alone has none."""
    return "".join(f"  {kind} shape_{n}[] = {{{text}}};\n" for n, _, text, _ in inputs if text)


def _shape(number: int, text: str) -> str:
    return f"shape_{number}, {text.count(',') + 1}" if text else "NULL, 0"


def _joined(parts: list[str]) -> str:
    return "".join(f"      {part},\n" for part in parts)


def _tensorflow(report: Report, key: str, info: SignatureInfo, path: str, sizes: Sizes) -> str:
    """A session of the C library: it knows placeholders and results by the names in the graph."""
    inputs = _numbered(info.inputs, sizes)
    place = list(report.signatures).index(key)
    call = "StatefulPartitionedCall" + (f"_{place}" if place else "")
    named = [f"{_PLACEHOLDER.sub('_', key)}_{each.name}" for each in info.inputs]
    given = _joined([f"{{TF_GraphOperationByName(graph, {quoted(name)}), 0}}" for name in named])
    outputs = range(len(info.outputs))
    taken = _joined([f"{{TF_GraphOperationByName(graph, {quoted(call)}), {n}}}" for n in outputs])
    tensors = _joined(
        [
            f"TF_AllocateTensor(TF_{_TYPES[each.dtype][1]}, {_shape(n, text)}, "
            f"{count} * sizeof({_type(each)}))"
            for n, each, text, count in inputs
        ]
    )
    results = _results(info, [f"TF_TensorData(results[{n}])" for n in outputs])
    return f"""\
// cc call.c -ltensorflow
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <tensorflow/c/c_api.h>

int main(void) {{
  TF_Status* status = TF_NewStatus();
  TF_Graph* graph = TF_NewGraph();
  const char* tags[] = {{"serve"}};
  TF_Session* session = TF_LoadSessionFromSavedModel(
      TF_NewSessionOptions(), NULL, {quoted(path)}, tags, 1, graph, NULL, status);
  if (TF_GetCode(status) != TF_OK) {{
    fprintf(stderr, "%s\\n", TF_Message(status));
    return 1;
  }}
{_shapes(inputs, "int64_t")}  TF_Output inputs[] = {{
{given}  }};
  TF_Tensor* given[] = {{
{tensors}  }};
  for (int i = 0; i < {len(inputs)}; ++i)  // the numbers of a call stand here
    memset(TF_TensorData(given[i]), 0, TF_TensorByteSize(given[i]));
  TF_Output outputs[] = {{
{taken}  }};
  TF_Tensor* results[{len(info.outputs)}];
  TF_SessionRun(session, NULL, inputs, given, {len(inputs)}, outputs, results, \
{len(info.outputs)}, NULL, 0, NULL, status);
  if (TF_GetCode(status) != TF_OK) {{
    fprintf(stderr, "%s\\n", TF_Message(status));
    return 1;
  }}
{results}  return 0;
}}
"""


def _results(info: SignatureInfo, found: list[str]) -> str:
    """A pointer to the numbers of each output, which an expression finds."""
    return "".join(
        f"  const {_type(each)}* result_{n} = {text};  // {_comment(each)}\n  (void)result_{n};\n"
        for n, (each, text) in enumerate(zip(info.outputs, found))
    )


def _comment(entry: ArrayInfo) -> str:
    text = f"{entry.name}[{', '.join(map(str, entry.shape))}]"
    return "".join(each if each.isalnum() or each in "_[], *+-" else "_" for each in text)


def _litert(report: Report, key: str, info: SignatureInfo, path: str, sizes: Sizes) -> str:
    inputs = _numbered(info.inputs, sizes)
    open_ones = [row for row in inputs if any(isinstance(size, str) for size in row[1].shape)]
    resized = "".join(
        f"  if (TfLiteSignatureRunnerResizeInputTensor(runner, {quoted(each.name)}, "
        f"{_shape(n, text)}) != kTfLiteOk)\n    return 1;\n"
        for n, each, text, _ in open_ones
    )
    given = "".join(
        f"  TfLiteTensor* input_{n} = TfLiteSignatureRunnerGetInputTensor(runner, "
        f"{quoted(each.name)});\n"
        f"  memset(TfLiteTensorData(input_{n}), 0, TfLiteTensorByteSize(input_{n}));\n"
        for n, each, _, _ in inputs
    )
    get = "TfLiteTensorData(\n      TfLiteSignatureRunnerGetOutputTensor"
    results = _results(info, [f"{get}(runner, {quoted(each.name)}))" for each in info.outputs])
    return f"""\
// cc call.c -ltensorflowlite_c
#include <stdint.h>
#include <string.h>
#include <tensorflow/lite/c/c_api.h>
#include <tensorflow/lite/c/c_api_experimental.h>

int main(void) {{
  TfLiteModel* model = TfLiteModelCreateFromFile({quoted(path)});
  if (model == NULL) return 1;
  TfLiteInterpreter* interpreter = TfLiteInterpreterCreate(model, NULL);
  if (interpreter == NULL) return 1;
  TfLiteSignatureRunner* runner =
      TfLiteInterpreterGetSignatureRunner(interpreter, {quoted(key)});
  if (runner == NULL) return 1;
{_shapes(open_ones, "int")}{resized}\
  if (TfLiteSignatureRunnerAllocateTensors(runner) != kTfLiteOk) return 1;
{given}  if (TfLiteSignatureRunnerInvoke(runner) != kTfLiteOk) return 1;
{results}  return 0;
}}
"""


def _onnxruntime(report: Report, key: str, info: SignatureInfo, path: str, sizes: Sizes) -> str:
    inputs = _numbered(info.inputs, sizes)
    data = "".join(f"  static {_type(each)} data_{n}[{count}];\n" for n, each, _, count in inputs)
    given = "".join(
        f"  check(ort->CreateTensorWithDataAsOrtValue(memory, data_{n}, sizeof data_{n}, "
        f"{_shape(n, text)},\n"
        f"      ONNX_TENSOR_ELEMENT_DATA_TYPE_{_TYPES[each.dtype][2]}, &given[{n}]));\n"
        for n, each, text, _ in inputs
    )
    results = "".join(
        f"  {_type(each)}* result_{n};  // {_comment(each)}\n"
        f"  check(ort->GetTensorMutableData(results[{n}], (void**)&result_{n}));\n"
        for n, each in enumerate(info.outputs)
    )
    names = ", ".join(quoted(each.name) for each in info.inputs)
    taken = ", ".join(quoted(each.name) for each in info.outputs)
    count = len(info.outputs)
    return f"""\
// cc call.c -lonnxruntime
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <onnxruntime_c_api.h>

static const OrtApi* ort;

static void check(OrtStatus* status) {{
  if (status == NULL) return;
  fprintf(stderr, "%s\\n", ort->GetErrorMessage(status));
  exit(1);
}}

int main(void) {{
  ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  if (ort == NULL) return 1;  // the library is older than the header
  OrtEnv* env;
  OrtSessionOptions* options;
  OrtSession* session;
  OrtMemoryInfo* memory;
  check(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "model", &env));
  check(ort->CreateSessionOptions(&options));
  check(ort->CreateSession(env, {quoted(path)}, options, &session));
  check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  // The numbers of a call.  An input that the model does not read is none of the file's.
{data}{_shapes(inputs, "int64_t")}  OrtValue* given[{len(inputs)}];
{given}  const char* names[] = {{{names}}};
  const char* taken[] = {{{taken}}};
  OrtValue* results[{count}] = {{NULL}};
  check(ort->Run(session, NULL, names, (const OrtValue* const*)given, {len(inputs)}, \
taken, {count}, results));
{results}  return 0;
}}
"""


_WRITERS: dict[str, Callable[[Report, str, SignatureInfo, str, Sizes], str]] = {
    "saved_model": _tensorflow,
    "tflite": _litert,
    "onnx": _onnxruntime,
}
