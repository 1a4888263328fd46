"""Runs prompts in a language-model runtime: a separate program, without jax.

    python _runtime_calls.py RUNTIME PATH CALLS.json RESULTS.json

``CALLS.json`` has ``prompts`` (lists of ids), ``texts`` (the same as strings), ``steps``, ``room``,
``stop`` (ids), ``messages`` (a conversation, or none) and ``begin`` (the token that begins a text).
``RESULTS.json`` gets ``prompts``, the new ids of each, or a string if the runtime returns no ids;
and where the runtime has a tokenizer of its own, ``texts``, their ids, and ``conversation``, the
text that it makes of the messages.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def genai(path: str, calls: dict[str, Any]) -> dict[str, Any]:
    """Runs onnxruntime-genai, and its tokenizer, which is not the package tokenizers."""
    runtime: Any = importlib.import_module("onnxruntime_genai")
    model, rows = runtime.Model(path), []
    tokenizer = runtime.Tokenizer(model)
    results: dict[str, Any] = {"texts": [tokenizer.encode(x).tolist() for x in calls["texts"]]}
    if calls["messages"]:
        results["conversation"] = tokenizer.apply_chat_template(json.dumps(calls["messages"]))
    for prompt in calls["prompts"]:
        params = runtime.GeneratorParams(model)
        params.set_search_options(
            max_length=len(prompt) + calls["steps"], do_sample=False, repetition_penalty=1.0
        )
        generator, new = runtime.Generator(model, params), []
        generator.append_tokens(prompt)
        while not generator.is_done() and len(new) < calls["steps"]:
            generator.generate_next_token()
            new.append(int(generator.get_next_tokens()[0]))
        rows.append(new)
    return {"prompts": rows, **results}


def gguf(path: str, calls: dict[str, Any]) -> dict[str, Any]:
    """Runs llama.cpp, in float32 throughout."""
    runtime: Any = importlib.import_module("xllamacpp")
    params = runtime.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = path, calls["room"], 1
    params.warmup, params.fit_params, params.n_gpu_layers = False, False, 0
    params.cache_type_k = params.cache_type_v = runtime.ggml_type.GGML_TYPE_F32
    params.verbosity = 1  # errors alone, which messages show
    server, rows = runtime.Server(params), []
    for prompt in calls["prompts"]:
        asked = {"prompt": prompt, "n_predict": calls["steps"], "temperature": 0.0, "top_k": 1}
        asked |= {"cache_prompt": False, "repeat_penalty": 1.0}
        # Probabilities leave out tokens that are parts of a letter.
        asked |= {"verbose": True, "return_tokens": True}
        answer = server.handle_completions(asked)
        if "choices" not in answer:
            raise RuntimeError(json.dumps(answer)[:500])
        rows.append([int(each) for each in answer["__verbose"]["tokens"]])
    results: dict[str, Any] = {"prompts": rows}
    if calls["messages"]:
        asked = {"messages": calls["messages"], "max_tokens": 1, "verbose": True}
        answer = server.handle_chat_completions(asked)
        if "choices" in answer:
            # Its tokenizer adds the beginning.
            results["conversation"] = answer["__verbose"]["prompt"].removeprefix(calls["begin"])
        elif "exceed_context_size" not in json.dumps(answer):
            raise RuntimeError(json.dumps(answer)[:500])
    return results


def litertlm(path: str, calls: dict[str, Any]) -> dict[str, Any]:
    """Runs LiteRT-LM, whose inputs and outputs are strings."""
    runtime: Any = importlib.import_module("litert_lm")
    runtime.set_min_log_severity(runtime.LogSeverity.ERROR)
    results: dict[str, Any] = {"prompts": []}
    sampler = runtime.SamplerConfig(top_k=1, top_p=1.0, temperature=1.0, seed=0)
    options = {"max_num_tokens": calls["room"], "cache_dir": ":nocache"}
    with runtime.Engine(path, runtime.Backend.CPU(), **options) as engine:
        for text in calls["texts"]:
            session: Any = engine.create_session(
                apply_prompt_template=False,
                sampler_config=sampler,
                max_output_tokens=calls["steps"],
            )
            with session:
                session.run_prefill([text])
                results["prompts"].append(session.run_decode().texts[0])
        if calls["messages"]:
            with engine.create_conversation() as begun:
                results["conversation"] = begun.render_message_to_string(calls["messages"][0])
    return results


def transformers(path: str, calls: dict[str, Any]) -> dict[str, Any]:
    """Runs transformers, on torch."""
    torch: Any = importlib.import_module("torch")
    models: Any = importlib.import_module("transformers")
    model, rows = models.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval(), []
    model.generation_config.max_length = None
    for prompt in calls["prompts"]:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": calls["steps"], "repetition_penalty": 1.0}
        with torch.no_grad():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        rows.append(whole[0, len(prompt) :].tolist())
    return {"prompts": rows}


def main(runtime: str, path: str, calls: str, results: str) -> None:
    answers = globals()[runtime](path, json.loads(Path(calls).read_text(encoding="utf-8")))
    Path(results).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
