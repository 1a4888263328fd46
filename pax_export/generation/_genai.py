"""``"genai"``: a folder for onnxruntime-genai, which transformers.js reads, too."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pax_export import export as exporters
from pax_export._foundations.errors import InvalidArgumentError, MissingPackageError
from pax_export._foundations.optional import find
from pax_export._foundations.types import Array, PyTree
from pax_export.export.artifact import embedded
from pax_export.export.formats.onnx.graph import HEAD_CHANNELS
from pax_export.export.formats.onnx.web import browser, npm
from pax_export.export.formats.onnx.web.export import copy_packages, write_page
from pax_export.export.portable.kept import call
from pax_export.generation._job import (
    Job,
    Runtime,
    generation_file,
    json_file,
    tokenizer_files,
)
from pax_export.generation._proof import check_results
from pax_export.nets import (
    Decoder,
    LayerKind,
    PlacedReading,
    hf_config,
    read_placed,
)

#: Where transformers.js looks for it.
_MODEL = "onnx/model.onnx"
#: onnxruntime-genai's name for model types with one cache array per layer, as all of ours are;
#: that for Phi-3 fills its cache anew after 4,096 tokens.
_AS_LLAMA = ("gpt2", "phi3", "smollm3", "granite", "olmo2", "starcoder2")
_KINDS = {"gemma3": "gemma3_text", **dict.fromkeys(_AS_LLAMA, "llama")}


def _read_logits(
    lm: Decoder,
    input_ids: Array,
    attention_mask: Array,
    past_key_values: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Logits of each token, and keys and values with those of the tokens behind the past."""
    ids, mask = input_ids.astype(jnp.int32), attention_mask.astype(jnp.int32)
    stores = [each["key"] for each in past_key_values], [each["value"] for each in past_key_values]
    with jax.enable_x64(False):
        # Rows may be padded on the left: the first token that is meant is at position 0.
        indices = jnp.where(mask > 0, jnp.cumsum(mask, 1) - 1, -1)
        positions = jnp.maximum(indices[:, mask.shape[1] - ids.shape[1] :], 0)
        reading = FusedReading if is_fused(lm) else PlacedReading
        logits, keys, values = read_placed(
            lm, ids, stores, lambda config: reading(config, positions, indices, _append)
        )
    present = [{"key": key, "value": value} for key, value in zip(keys, values)]
    return {"logits": logits.astype(jnp.float32), "present": present}


def _append(store: Array, new: Array) -> jax.Array:
    return jnp.concatenate([store, new.astype(store.dtype)], 2)


def _check(job: Job) -> None:
    find("onnx", "onnx", 'generation.export(format="genai")')
    if job.lm.embed.weight.dtype.name not in ("float32", "float16"):
        raise InvalidArgumentError(
            "onnxruntime-genai keeps keys and values as float32 or float16.",
            where=f"{job.where}: lm",
            got=f"weights of {job.lm.embed.weight.dtype.name}",
            write="Decoder.from_pretrained(..., dtype=jnp.float32), or jax.tree.map(lambda x: "
            "x.astype(jnp.float32), lm)",
        )


def _write(job: Job, path: Path) -> exporters.Report:
    lm, config = job.listed(), job.lm.config
    spec = exporters.spec
    (path / _MODEL).parent.mkdir()
    # Ids are int64, as in other exporters; all other arrays keep their dtype. transformers.js makes
    # an empty cache from the names of its axes, of which it knows `batch_size` only.
    with jax.enable_x64(True):
        cache = ("batch_size", config.num_kv_heads, "total - length", config.head_size)
        store = spec(cache, lm.embed.weight.dtype.name)
        inputs = (
            spec(("batch_size", "length"), "int64"),
            spec(("batch_size", "total"), "int64"),
            [{"key": store, "value": store} for _ in range(config.num_layers)],
        )
        report = exporters.to_onnx(
            lm, path / _MODEL, {"serving_default": inputs},
            methods={"serving_default": _read_logits}, validate=False, card=False, outputs="model",
            accuracy_level=job.accuracy_level, constraints=("total >= length",),
        )  # fmt: skip
    embedded.remove_report(path / _MODEL)
    files = {
        "genai_config.json": json_file(_genai_config(job)),
        "config.json": json_file(_config(job)),
        "generation_config.json": generation_file(job),
        **_tokenizer_files(job),
    }
    for name, content in files.items():
        (path / name).write_bytes(content)
    return replace(report, model=type(job.lm).__name__)


def _tokenizer_files(job: Job) -> dict[str, bytes]:
    """Returns the tokenizer's files, with the template where transformers.js looks for it."""
    files = tokenizer_files(job)
    if job.tokenizer is not None and job.tokenizer.chat_template:
        template = _write_whitespace(job.tokenizer.chat_template)
        config = json.loads(files["tokenizer_config.json"])
        config.setdefault("chat_template", template)
        files["tokenizer_config.json"] = json_file(config)
        if "chat_template.jinja" in files:
            files["chat_template.jinja"] = template.encode()
    return files


def _write_whitespace(template: str) -> str:
    """A template that needs no `trim_blocks` and `lstrip_blocks`, which the runtime lacks."""
    bare = re.sub(r"^[ \t]+(?=\{[%#](?!\+))", "", template, flags=re.MULTILINE)
    return re.sub(
        r"(?<![-+])([%#]\})\n(\n?)", lambda m: m[1] + ("{{ '\\n' }}" if m[2] else ""), bare
    )


def _genai_config(job: Job) -> dict[str, Any]:
    config, defaults = job.lm.config, job.lm.config.generation
    stop = list(job.stop)
    names = {f"past_{each}_names": f"past_key_values.%d.{each}" for each in ("key", "value")}
    outputs = {f"present_{each}_names": f"present.%d.{each}" for each in ("key", "value")}
    ids = job.ids | {"eos_token_id": (stop[0] if len(stop) == 1 else stop) or None}
    pad = job.pad if job.pad is not None else (stop or [0])[0]
    return {
        "model": {
            **{name: value for name, value in ids.items() if value is not None},
            "pad_token_id": pad,
            "context_length": job.room,
            "type": _KINDS.get(config.family, config.family),
            "vocab_size": config.vocab_size,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": _MODEL,
                "head_size": config.head_size,
                "hidden_size": config.dim,
                "num_attention_heads": config.num_heads,
                "num_hidden_layers": config.num_layers,
                "num_key_value_heads": config.num_kv_heads,
                "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **names},
                "outputs": {"logits": "logits", **outputs},
            },
        },
        "search": {
            "max_length": job.room,
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            # Kernels write new keys and values into the buffer, which has all places at once.
            "past_present_share_buffer": is_fused(job.lm),
            "do_sample": defaults.do_sample,
            "temperature": defaults.temperature or 1.0,
            "top_k": defaults.top_k if defaults.do_sample else 1,
            "top_p": defaults.top_p,
            "repetition_penalty": defaults.repetition_penalty,
        },
    }


def _config(job: Job) -> dict[str, Any]:
    config = job.lm.config
    try:
        content = hf_config(config, job.where)
    except InvalidArgumentError:  # onnxruntime runs it all the same
        content = {
            "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": config.dim,
            "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_size,
            "max_position_embeddings": config.max_positions,
        }  # fmt: skip
    content |= {name: value for name, value in job.ids.items() if value is not None}
    return content | {"transformers.js_config": {"dtype": "fp32"}}


# --- transformers.js --------------------------------------------------------------------------

_NPM = "@huggingface/transformers"
_PROGRAM = ("node", str(Path(__file__).with_name("transformers_js.mjs")))


def _find_transformers_js() -> None:
    if shutil.which("node") is None or subprocess.run(_PROGRAM, capture_output=True).returncode:
        raise MissingPackageError(
            "transformers.js is not installed.",
            got=f"Node.js finds no {_NPM} from this folder or NODE_PATH",
            write=f"npm install {_NPM}",
        )


TRANSFORMERS_JS = Runtime(
    "transformers.js", "transformers.js", (), "genai", _check, _write, find=_find_transformers_js,
    program=_PROGRAM,
)  # fmt: skip
GENAI = Runtime(
    "genai", "onnxruntime-genai", ("onnxruntime_genai",), "genai", _check, _write, level=4,
    beside=(TRANSFORMERS_JS,),
)  # fmt: skip


# --- A call of a Decoder with the operators that onnxruntime has for attention -------------------

#: The bias of a masked key.
_LOWEST = -1e30


def is_fused(lm: Decoder) -> bool:
    """Whether onnxruntime has kernels for the attention of a net on all of its devices.

    For float16 its kernel on GPUs takes no mask of the prompts' padding.
    """
    return lm.embed.weight.dtype == jnp.float32 and lm.config.head_size % HEAD_CHANNELS == 0


class FusedReading(PlacedReading):
    """A call with whole operators for rotary embedding and attention, which appends to stores."""

    def angles(self, kind: LayerKind) -> Any:
        """Returns the place of each token in two tables of cosines and sines, and these."""
        found = super().angles(kind)
        if found is not None and ("angles", kind) not in self._kept:
            tables = [each.reshape((-1, each.shape[-1])) for each in found]
            rows = jnp.arange(tables[0].shape[0]).reshape(self.positions.shape)
            self._kept["angles", kind] = rows, *tables
        return self._kept.get(("angles", kind))

    def projected(self, attention: PyTree, x: Array, kind: LayerKind) -> tuple:
        heads, angles = attention.project(x), self.angles(kind)
        query, key, value = (each.reshape((*each.shape[:2], -1)) for each in heads)
        if angles is not None:
            neighbors = self.config.rotary_pairing == "neighbors"
            query, key = (
                call("rotary", each, *angles, heads=count, neighbors=neighbors)
                for each, count in ((query, self.config.num_heads), (key, self.config.num_kv_heads))
            )
        return query, key, value

    def attend_layer(
        self, attention: PyTree, x: Array, kind: LayerKind, pair: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        config = self.config
        scale = config.head_size**-0.5 if attention.scale is None else attention.scale
        heads, *pair = call(
            "cached_attention", *self.projected(attention, x, kind), *pair, self._mask(kind),
            heads=config.num_heads, kv_heads=config.num_kv_heads, scale=scale,
            softcap=attention.softcap or 0.0,
        )  # fmt: skip
        return heads.reshape((*heads.shape[:2], config.num_heads, -1)), pair

    def _mask(self, kind: LayerKind) -> jax.Array:
        if ("mask", kind.window) not in self._kept:
            mask, bias = self.seen(kind)
            bias = jnp.float32(0.0) if bias is None else bias
            self._kept["mask", kind.window] = jnp.where(mask, bias, jnp.float32(_LOWEST))
        return self._kept["mask", kind.window]


# --- ``"web"``: a folder for browsers, with a page to chat on ------------------------------------

_PACKAGES = {
    "onnxruntime-web": npm.ONNXRUNTIME,
    "tokenizers": npm.TOKENIZERS,
    "jinja": npm.JINJA,
}
_PURPOSE = 'generation.export(format="web")'


def _file(name: str) -> str:
    return Path(__file__).with_name("chat_page").joinpath(name).read_text(encoding="utf-8")


def _find_chromium() -> None:
    npm.check(_PACKAGES.values(), _PURPOSE)
    browser.check(_PURPOSE)


def _write_page(job: Job, path: Path) -> exporters.Report | Mapping[str, Any]:
    report = GENAI.write(job, path)
    tokenizer = job.required_tokenizer
    about = {"template": tokenizer.chat_template, "specialTokens": tokenizer.special_tokens}
    data = [each.relative_to(path).as_posix() for each in sorted(path.glob("onnx/*.data"))]
    module = _file("model.js").replace(" = {};\n", f" = {json.dumps(about)};\n", 1)
    module = module.replace("DATA", json.dumps(data), 1)
    title = type(job.lm).__name__
    write_page(path, title, module, _file("model.d.ts"), page_js=_file("page.js"))
    copy_packages(path, _PACKAGES)
    return report


def _run_in_browser(
    job: Job, path: Path, calls: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    with browser.opened(path, _file("answer.js"), seconds=seconds) as ask:
        for text in calls["texts"]:
            ids = job.required_tokenizer.encode(text)
            own = [ids, job.required_tokenizer.decode(ids, skip_special_tokens=True)]
            check_results(job, "tokenizer", WEB.title, own, ask({"text": text}))
        asked = ({"prompt": each, "steps": calls["steps"]} for each in calls["prompts"])
        answers = {"prompts": [ask(each) for each in asked]}
        if calls["messages"]:
            answers["conversation"] = ask({"messages": calls["messages"]})
        return answers


WEB = Runtime(
    "web", "onnxruntime-web in Chromium", (), "onnx", GENAI.check, _write_page, find=_find_chromium,
    run=_run_in_browser,
    level=1,  # WebAssembly multiplies integers of 8 bits seven times slower than float32
)  # fmt: skip
