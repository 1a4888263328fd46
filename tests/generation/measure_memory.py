"""Measures the memory that exports for runtimes of language models take beyond the net.

python -m tests.generation.measure_memory FOLDER DIM LAYERS FORMAT[:BITS]...

Prints MiB of the float32 weights, and for each format the peak beyond the net, without pages of
files, the processor seconds, and the size of what is written in parts of the weights.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax

import pax_export as pax
from tests.generation.test_tokenizer import byte_level
from tests.memory import peak


def export(lm, path, format):
    if format == "transformers":
        pax.generation.save_pretrained(lm, path, tokenizer=byte_level(), validate=False)
    else:
        options = {"tokenizer": byte_level(), "max_length": 128, "validate": False}
        pax.generation.export(lm, path, format=format, **options)


def net(dim, layers):
    config = pax.nets.DecoderConfig.llama(
        vocab_size=512 + 8 * dim, dim=dim, num_layers=layers, num_heads=4, hidden_dim=4 * dim,
        tied=True,
        max_positions=128,
    )  # fmt: skip
    return pax.nets.Decoder(config)


def quantized(lm, bits):
    return pax.quantize(lm, bits=int(bits), group=32)[0] if bits else lm


def main(folder, dim, layers, formats):
    small, lm = net(128, 1), net(dim, layers)
    jax.block_until_ready(lm)
    made = {"weights": sum(each.nbytes for each in jax.tree.leaves(lm)) / 2**20}
    for name in formats:
        format, _, bits = name.partition(":")
        tiny, own = (quantized(each, bits) for each in (small, lm))
        export(tiny, folder / f"small{bits}.{format}", format)  # what is loaded once
        path, began = folder / f"large{bits}.{format}", time.process_time()
        with peak(made, name, watched=True):
            export(own, path, format)
        files = [path] if path.is_file() else path.rglob("*")
        size = sum(each.stat().st_size for each in files if each.is_file()) / 2**20
        made[name] = [
            round(made[name]),
            round(time.process_time() - began, 1),
            size / made["weights"],
        ]
    print(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4:])
