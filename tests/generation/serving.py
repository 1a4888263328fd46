"""How a server drives an exported language model: prefill, then decode again and again.

numpy is all that it needs, beside what runs the export.
"""

from __future__ import annotations

import numpy as np


def empty_cache(info, batch, room):
    """Zeros for the inputs of a signature that are of the cache, as the report describes them."""
    sizes = {"batch": batch, "room": room}
    return {
        entry.name.removeprefix("cache."): np.zeros(
            [sizes.get(size, size) for size in entry.shape], entry.dtype
        )
        for entry in info.inputs
        if entry.name.startswith("cache.")
    }


def in_chunks(prefill, tokens, lengths, cache, chunk):
    """Reads prompts so many tokens at a time; gives the logits after each row, and the cache."""
    lengths, last = np.asarray(lengths), None
    for start in range(0, tokens.shape[1], chunk):
        part = tokens[:, start : start + chunk]
        here = np.clip(lengths - start, 0, part.shape[1]).astype(np.int32)
        made = prefill(part, here, cache)
        logits, cache = np.asarray(made["logits"]), made["cache"]
        last = logits if last is None else np.where(here[:, None] > 0, logits, last)
    return last, cache


def greedy_texts(served, tokens, lengths, count, room=None, chunk=None):
    """What prefill and decode of a loaded export say, ``[batch, count]``."""
    prefill = served.signatures["prefill"]
    decode = served.signatures.get("decode")
    cache = empty_cache(prefill.info, len(tokens), room)
    logits, cache = in_chunks(prefill, tokens, lengths, cache, chunk or tokens.shape[1])
    made = [logits.argmax(-1).astype(np.int32)]
    while len(made) < count:
        if decode is None:  # an ONNX file holds one function, which does for both
            out = prefill(made[-1][:, None], np.ones(len(tokens), np.int32), cache)
        else:
            out = decode(made[-1], cache)
        made.append(np.asarray(out["logits"]).argmax(-1).astype(np.int32))
        cache = out["cache"]
    return np.stack(made, 1)
