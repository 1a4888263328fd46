"""``"litertlm"``: one file for LiteRT-LM, with the tokenizer and the chat template."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pax_export import export as exporters
from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.files import atomic
from pax_export._foundations.optional import find, require
from pax_export._foundations.types import Array
from pax_export._foundations.wire import Schema
from pax_export.export.artifact import embedded
from pax_export.generation._job import Job, Runtime
from pax_export.nets import Decoder, PlacedReading, read_placed

_PURPOSE = 'generation.export(format="litertlm")'
_BLOCK, _HEAD = 16 * 1024, 32
_VERSION = (1, 5, 0)
_TFLITE, _METADATA, _TOKENIZER = 3, 5, 6  # kinds of sections
_STRING = 9  # the kind of a value that is a text
_MARK = "pax_export"
#: The keys of each layer, and the values.
Stores = tuple[list[Array], list[Array]]
#: How many tokens of a prompt one call reads.
_PREFILLS = (8, 64, 512)


def _call_decoder(lm: Decoder, tokens: Array, input_pos: Array, stores: Stores, last: bool) -> Any:
    """Runs one call; padding after the valid tokens has positions that do not increase."""
    room, count = stores[0][0].shape[2], tokens.shape[1]
    positions = jnp.arange(room, dtype=jnp.int32)[None]
    begin = input_pos[0]
    steps = jnp.arange(count, dtype=jnp.int32)
    meant = jnp.sum(jnp.cumprod((input_pos == begin + steps).astype(jnp.int32)))
    source = jnp.arange(room, dtype=jnp.int32) - begin
    is_new = ((source >= 0) & (source < meant))[None, None, :, None]
    source = jnp.clip(source, 0, count - 1)

    def put(store: jax.Array, new: jax.Array) -> Any:
        new = new.astype(store.dtype)
        if count == 1:
            return jax.lax.dynamic_update_slice(store, new, (0, 0, begin, 0))
        return jnp.where(is_new, jnp.take(new, source, axis=2), store)

    return read_placed(
        lm, tokens, stores,
        lambda config: PlacedReading(config, input_pos[None], positions, put), last,
    )  # fmt: skip


def _method(layers: int, with_logits: bool) -> Any:
    names = [f"kv_cache_{kind}_{i}" for kind in "kv" for i in range(layers)]

    def call(lm: Decoder, tokens: Array, input_pos: Array, **caches: Array) -> dict[str, Any]:
        arrays = [caches[name] for name in names]
        stores = arrays[:layers], arrays[layers:]
        logits, keys, values = _call_decoder(lm, tokens, input_pos, stores, with_logits)
        outputs: dict[str, Any] = dict(zip(names, (*keys, *values)))
        return outputs | {"logits": logits.astype(jnp.float32)} if with_logits else outputs

    return call


def _check(job: Job) -> None:
    find("flatbuffers", "litertlm", _PURPOSE)
    if job.lm.embed.weight.dtype.name != "float32":
        raise InvalidArgumentError(
            "LiteRT-LM keeps keys and values as float32.",
            where=f"{job.where}: lm",
            got=f"weights of {job.lm.embed.weight.dtype.name}",
            write="Decoder.from_pretrained(..., dtype=jnp.float32)",
        )
    if not job.stop:
        raise InvalidArgumentError(
            "LiteRT-LM ends texts at a token, and neither the model nor its tokenizer has one.",
            where=f"{job.where}: tokenizer",
            got="no eos_token",
            write='a folder with a tokenizer_config.json that has {"eos_token": "..."}',
        )


def _write(job: Job, path: Path) -> dict[str, Any]:
    lm, config, spec = job.listed(), job.lm.config, exporters.spec
    store = spec((1, config.num_kv_heads, job.room, config.head_size), "float32")
    caches = {f"kv_cache_{kind}_{i}": store for kind in "kv" for i in range(config.num_layers)}
    sizes = {"decode": 1}
    # LiteRT-LM reads all tokens but the last by a prefill.
    sizes |= {f"prefill_{n}": n for n in _PREFILLS if n < job.room} or {"prefill_1": 1}
    inputs = {key: (spec((1, n), "int32"), spec((n,), "int32")) for key, n in sizes.items()}
    methods = {key: _method(config.num_layers, key == "decode") for key in sizes}
    with atomic.scratch() as folder:
        model = folder / "model.tflite"
        report = exporters.to_tflite(
            lm, model, inputs, kwargs=dict.fromkeys(sizes, caches), methods=methods,
            validate=False, card=False, outputs="model", accuracy_level=job.accuracy_level,
        )  # fmt: skip
        embedded.remove_report(model)
        _write_container(job, path, model)
    found: dict[str, Any] = {"signatures": sorted(sizes)}
    if "quantized" in report.details:
        found["quantized"] = report.details["quantized"]
    return found


# --- the container ----------------------------------------------------------------------------


def _write_container(job: Job, path: Path, model: Path) -> None:
    content = job.required_tokenizer.json()
    packed = struct.pack("<Q", len(content)) + zlib.compress(content, 9)
    sections: list[tuple[int, str, Any]] = [
        (_METADATA, "", _metadata(job)),
        (_TOKENIZER, "", packed),
        (_TFLITE, "tf_lite_prefill_decode", model),
    ]
    listed = []
    with path.open("wb") as out:
        for kind, role, section in sections:
            out.seek(-(-max(out.tell(), _BLOCK) // _BLOCK) * _BLOCK)
            begin = out.tell()
            if isinstance(section, Path):
                with section.open("rb") as file:
                    while piece := file.read(1 << 24):
                        out.write(piece)
            else:
                out.write(section)
            listed.append((kind, role, begin, out.tell()))
        head = _write_header(listed)
        out.seek(0)
        out.write(struct.pack("<8s4IQ", b"LITERTLM", *_VERSION, 0, _HEAD + len(head)) + head)


def _write_header(sections: list[tuple[int, str, int, int]]) -> bytes:
    flatbuffers: Any = require("flatbuffers", "litertlm", _PURPOSE)
    builder = flatbuffers.Builder(1024)

    def table(fields: list[tuple[int, str, Any]]) -> int:
        builder.StartObject(max((number for number, *_ in fields), default=-1) + 1)
        for number, kind, value in fields:
            getattr(builder, f"Prepend{kind}Slot")(number, value, 0)
        return builder.EndObject()

    def vector(offsets: list[int]) -> int:
        builder.StartVector(4, len(offsets), 4)
        for each in reversed(offsets):
            builder.PrependUOffsetTRelative(each)
        return builder.EndVector()

    def pair(key: str, text: str) -> int:
        name, value = builder.CreateString(key), builder.CreateString(text)
        value = table([(0, "UOffsetTRelative", value)])
        fields = [(0, "UOffsetTRelative", name), (1, "Uint8", _STRING)]
        return table([*fields, (2, "UOffsetTRelative", value)])

    objects = []
    for kind, role, begin, end in sections:
        items = vector([pair("model_type", role)] if role else [])
        rest = [(1, "Uint64", begin), (2, "Uint64", end), (3, "Uint8", kind)]
        objects.append(table([(0, "UOffsetTRelative", items), *rest]))
    system = table([(0, "UOffsetTRelative", vector([pair("author", _MARK)]))])
    listed = table([(0, "UOffsetTRelative", vector(objects))])
    builder.Finish(table([(0, "UOffsetTRelative", system), (1, "UOffsetTRelative", listed)]))
    return bytes(builder.Output())


#: TokenUnion and LlmMetadata of LiteRT-LM.
_TOKEN = Schema(ids=(1, Schema(ids=1)))
_LLM_METADATA = Schema(
    start=(1, _TOKEN), stop=(2, _TOKEN), max_tokens=5, kind=(6, Schema(generic=(1, Schema()))),
    template=7,
)  # fmt: skip


def _metadata(job: Job) -> bytes:
    """LlmMetadata: the tokens that begin and end a text, and the chat template."""
    begin = {"start": {"ids": {"ids": [job.begin or 0]}}} if job.begins else {}
    stop = [{"ids": {"ids": [each]}} for each in job.stop]
    return _LLM_METADATA.encode(
        {
            **begin,
            "stop": stop,
            "max_tokens": job.room,
            "kind": {"generic": {}},
            "template": _template(job),
        }
    )


#: LiteRT-LM hands a template the content of messages as a list of parts, not as a text.
_TEXTS_OF_PARTS = """\
{%- set own = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message.content is defined and message.content is not string and message.content -%}
{%- set text = message.content | map(attribute="text") | join -%}
{%- set own.messages = own.messages + [dict(message, content=text)] -%}
{%- else -%}
{%- set own.messages = own.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = own.messages %}
"""


def _template(job: Job) -> str:
    """The chat template, for which texts and special tokens are set as transformers sets them.

    The token that begins each text is put before it by LiteRT-LM, so that the template has none.
    """
    if not job.required_tokenizer.chat_template:
        return ""
    tokens = job.required_tokenizer.special_tokens | ({"bos_token": ""} if job.begins else {})
    named = "".join(
        f"{{%- set {name} = {json.dumps(token, ensure_ascii=False)} -%}}\n"
        for name, token in tokens.items()
        if name.isidentifier()
    )
    return named + _TEXTS_OF_PARTS + job.required_tokenizer.chat_template


LITERTLM = Runtime(
    "litertlm", "LiteRT-LM", ("litert_lm",), "litertlm", _check, _write, _MARK.encode(),
    ".litertlm", reads_texts=True, begins_texts=True, level=4,
)  # fmt: skip
