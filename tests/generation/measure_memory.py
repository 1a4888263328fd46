"""Measures the memory that exports for runtimes of language models take beyond the net.

python -m tests.generation.measure_memory FOLDER DIM LAYERS FORMAT...

Prints MiB of the weights, and for each format the peak beyond, without pages of files, and the
processor seconds.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import jax

import pax_export as pax
from tests.export.measure_memory import mebibytes
from tests.generation.test_tokenizer import byte_level


def export(lm, path, format):
    if format == "transformers":
        pax.generation.save_pretrained(lm, path, tokenizer=byte_level(), validate=False)
    else:
        options = {"tokenizer": byte_level(), "max_length": 128, "validate": False}
        pax.generation.export(lm, path, format=format, **options)


def peak(lm, path, format):
    before, found, done = mebibytes("RssAnon"), 0.0, threading.Event()

    def watch():
        nonlocal found
        while not done.wait(0.005):
            found = max(found, mebibytes("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        export(lm, path, format)
    finally:
        done.set()
        watcher.join()
    return max(found - before, 0.0)


def net(dim, layers):
    config = pax.nets.DecoderConfig.llama(
        vocab_size=512 + 8 * dim, dim=dim, num_layers=layers, num_heads=4, hidden_dim=4 * dim,
        max_positions=128,
    )  # fmt: skip
    return pax.nets.Decoder(config)


def main(folder, dim, layers, formats):
    small, lm = net(16, 1), net(dim, layers)
    jax.block_until_ready(lm)
    made = {"weights": sum(each.nbytes for each in jax.tree.leaves(lm)) / 2**20}
    for format in formats:
        export(small, folder / f"small.{format}", format)  # what is loaded once
        began = time.process_time()
        beyond = round(peak(lm, folder / f"large.{format}", format))
        made[format] = [beyond, round(time.process_time() - began, 1)]
    print(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4:])
