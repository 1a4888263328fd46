"""`export`: exports prefill, decode and generate functions with shared variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export import export as exporters
from pax_export._foundations.check import as_strings, checked_choice
from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import Array, DTypeLike, PyTree
from pax_export.generation._cache import new_cache, shapes_of_cache
from pax_export.generation._genai import GENAI, WEB
from pax_export.generation._gguf import GGUF
from pax_export.generation._litertlm import LITERTLM
from pax_export.generation._prompt import (
    Cache,
    LanguageModel,
    check_new_room,
    check_vocabulary,
    checked_cache_dtype,
    checked_count,
    checked_net,
    checked_pad,
    checked_prompt,
    checked_sampler,
    row_keys,
    vocabulary_of,
)
from pax_export.generation._proof import Prompts
from pax_export.generation._runtimes import FUNCTION_FORMATS, export_for_runtime
from pax_export.generation._steps import Settings, begin_generation, generate_rest, last_logits
from pax_export.generation._stops import (
    Stop,
    checked_stops,
    default_pad,
    default_sampler,
    default_stop,
)
from pax_export.generation._tokenizer import Tokenizer
from pax_export.generation.samplers import Sampler

#: Whole models, for runtimes that keep the cache themselves.
RUNTIMES = {each.name: each for each in (GENAI, GGUF, LITERTLM, WEB)}
SIGNATURES = ("prefill", "decode", "generate")
LAYERS = ("listed", "scanned")
#: Length of random test prompts, and number of new tokens, if no prompts are given.
_LENGTHS, _STEPS = (5, 3), 3


def export(
    lm: LanguageModel,
    path: str | os.PathLike[str],
    *,
    format: str = "saved_model",
    max_length: int | str | None = None,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    max_new_tokens: int = 64,
    signatures: Sequence[str] | None = None,
    batch: int | str = "batch",
    length: int | str = "length",
    cache_dtype: DTypeLike | None = None,
    layers: str | None = None,
    sampler: Sampler | None = None,
    stop: Stop = None,
    pad: int | None = None,
    prompts: Prompts | None = None,
    **options: Any,
) -> Any:
    """Exports a language model.

    For a language-model runtime, the export is the whole model with tokenizer and chat template:

    * ``"genai"``: a folder for onnxruntime-genai and transformers.js;
    * ``"gguf"``: a file for llama.cpp, for the families that it supports;
    * ``"litertlm"``: a file for LiteRT-LM; its name ends with ``.litertlm``;
    * ``"web"``: a folder for any static server: that of ``"genai"`` with a chat page and the
      module ``model.js``.

    The export is validated: the runtime continues prompts in a process of its own and must return
    jax's tokens.  Where it chooses another token because logits are nearly equal, the report has
    their distance, which is bounded.

    For other servers, the export has three functions over shared variables:

    * ``prefill`` takes ``tokens [batch, length]``, ``lengths [batch]`` and ``cache``, and returns
      ``logits [batch, vocabulary]`` after each row, and ``cache``;
    * ``decode`` takes ``token [batch]`` and ``cache``, and returns the same;
    * ``generate`` takes ``tokens``, ``lengths``, and ``seed [2]`` if the sampler draws, and
      returns ``output [batch, max_new_tokens]``.

    The cache is an input and an output, so a server holds any number of sessions.  An empty cache
    is zeros.  In ``decode`` a negative token leaves its row of the cache unchanged.  Invalid input
    raises nothing: logits are NaN in a row with a token outside of the vocabulary, or with more
    tokens than its cache has room for; ``generate`` returns -1 there.

    Args:
        lm: a net with a cache, as for `generate`.
        path: a folder for a SavedModel, a bundle, ``"genai"`` and ``"web"``, otherwise a file.
        format: ``"genai"``, ``"gguf"``, ``"litertlm"`` or ``"web"`` for a `Decoder`; or
            ``"saved_model"``, ``"stablehlo"``, ``"onnx"`` or ``"tflite"`` for the functions.
        max_length: the length of the cache; for functions, a name such as ``"room"`` makes it
            symbolic; for a runtime the default is the net's maximum.
        tokenizer: for a runtime: a `Tokenizer`, or its folder, ``tokenizer.json`` or GGUF file.
            The following arguments, except ``prompts``, are for the functions.
        max_new_tokens: of ``generate``.
        signatures: some of the three functions; default: all.  An ONNX file has one: by default
            ``prefill``, which with one token per row is equivalent to ``decode``.
        batch: the batch size, or a name for a symbolic size.
        length: the number of tokens per call of ``prefill`` and ``generate``, or a name.
        cache_dtype: the dtype of keys and values; default: the net's.
        layers: ``"listed"``: layers are unrolled, and the cache has an array of keys and one of
            values per layer (``cache.keys.0``, ...); ``"scanned"``: one loop, and one array for
            all layers (``cache.keys``).  The default is the faster one: listed for ONNX, else as
            in the net, with one array.
        sampler: of ``generate``; default: the most likely token.  The defaults of ``sampler``,
            ``stop`` and ``pad`` are those of ``lm.config.generation``, as for `generate` without
            a key.
        stop: the id of the stop token of ``generate``, a sequence of ids, or several.
        pad: the id of padding after a stop; may be negative.
        prompts: token lists for the validation; random by default.  For a runtime also strings.
        **options: arguments of the format's exporter: ``validate``, ``overwrite``,
            ``accuracy_level`` (runtimes accept these three, llama.cpp the first two; the default
            is 1 for ``"web"``, else 4), ``platforms``, ``consumer``, ``opset``,
            ``quantize``, ...

    Returns:
        The report of the export.  `pax_export.export.load` loads the export.

    Raises:
        TokenizerError: for a runtime: no tokenizer, or another vocabulary.
        ValidationError: the runtime's tokens differ from jax's, and logits are not nearly equal.
        InvalidArgumentError: unsupported format or signature; more than one for ONNX; sizes that
            leave no room for a call; a stop or pad outside of the vocabulary.
        PaxError: any error of the format's exporter; nothing is written then.

    Example:
        >>> import tempfile, numpy as np, pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=50, dim=8, num_layers=1, num_heads=2, hidden_dim=16)
        >>> lm = pax.nets.Decoder(config)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = pax.generation.export(
        ...         lm, folder + "/lm", max_length=16, max_new_tokens=4, signatures=["generate"]
        ...     )
        ...     served = pax.export.load(folder + "/lm")
        ...     served(np.array([[1, 2, 3]]), np.array([3])).shape
        (1, 4)

    """
    where = "export"
    if isinstance(format, str) and format in RUNTIMES:
        ours = {
            "max_new_tokens": max_new_tokens, "signatures": signatures, "batch": batch,
            "length": length, "cache_dtype": cache_dtype, "layers": layers, "sampler": sampler,
            "stop": stop, "pad": pad,
        }  # fmt: skip
        defaults = export.__kwdefaults__ or {}
        changed_options = {name: x for name, x in ours.items() if x != defaults[name]}
        return export_for_runtime(
            RUNTIMES[format], lm, path, tokenizer=tokenizer, max_length=max_length,
            prompts=prompts, **changed_options, **options,
        )  # fmt: skip
    checked_choice(format, (*FUNCTION_FORMATS, *RUNTIMES), "export: format")
    if tokenizer is not None:
        raise InvalidArgumentTypeError(
            "Only exports for runtimes of language models take a tokenizer.",
            where="export: tokenizer",
            got=f"format={format!r:.80}",
            write=f"no tokenizer, or one of the formats {', '.join(map(repr, RUNTIMES))}",
        )
    lm = checked_net(lm, where)
    chosen = _signatures(signatures, format)
    stops = checked_stops(default_stop(stop, lm), where)
    if stops.strings:
        raise InvalidArgumentError(
            "Exported functions support stop tokens, not strings.",
            where="export: stop",
            got=repr(stops.strings[0]),
            write="ids of tokens, or sequences of ids: stop=[2, [13, 13]]",
        )
    settings = Settings(
        checked_sampler(default_sampler(sampler, lm), where),
        stops.ids,
        stops.sequences,
        checked_pad(default_pad(pad, lm), where),
        where=where,
    )
    if (size := vocabulary_of(lm)) is not None:
        check_vocabulary(chain(stops.ids, *stops.sequences), settings.pad, size, where)
    max_length = _checked_size("max_length", max_length)
    batch, length = _checked_size("batch", batch), _checked_size("length", length)
    dtype = checked_cache_dtype(cache_dtype, where)
    count = checked_count(max_new_tokens, "max_new_tokens", where)
    lm, listed = _in_form(lm, layers, format)
    cache: dict[str, Any] = {"listed": listed}
    if format == "tflite" and _has_empty_store(lm, dtype):  # which LiteRT cannot return
        cache["rolling"] = False
    served = _Served(lm, settings, count, dtype, batch, length, max_length, cache)
    served.check_sizes(chosen)
    if options.get("validate", True) not in (False, "variables"):
        options.setdefault("examples", served.examples(chosen, prompts))
    if format == "saved_model":
        options.setdefault("vjp_order", 0)  # no training through a cache
    options.setdefault("outputs", "model")  # the output cache is the next input
    write = getattr(exporters, f"to_{format}")
    return write(
        lm,
        path,
        {key: served.inputs(key) for key in chosen},
        methods={key: getattr(served, key) for key in chosen},
        **options,
    )


def _signatures(signatures: Sequence[str] | None, format: str) -> tuple[str, ...]:
    one = format == "onnx"
    if signatures is None:
        return SIGNATURES[:1] if one else SIGNATURES
    signatures = as_strings("signatures", signatures, f"signatures={SIGNATURES}")
    unknown = [key for key in signatures if key not in SIGNATURES]
    if unknown or not signatures:
        raise InvalidArgumentError(
            "The functions of a language model are prefill, decode and generate.",
            where="export: signatures",
            got=repr(unknown[0] if unknown else signatures),
            write=f"signatures={SIGNATURES}",
        )
    if one and len(signatures) > 1:
        raise InvalidArgumentError(
            "An ONNX file holds one function.",
            where="export: signatures",
            got=repr(signatures),
            write='signatures=["prefill"], which with one token per row is equivalent to '
            "decode; and another file for generate",
        )
    return signatures


def _checked_size(name: str, size: int | str | None) -> int | str:
    return size if isinstance(size, str) else checked_count(size, name, f"export: {name}")


def _in_form(lm: LanguageModel, layers: str | None, format: str) -> tuple[Any, bool]:
    """Returns the net with listed or scanned layers, and whether each layer has its own cache."""
    if layers is not None:
        checked_choice(layers, LAYERS, "export: layers")
    elif format != "onnx":
        return lm, False
    # onnxruntime copies an array to update it: with one per layer it takes a ninth of the time.
    change = getattr(lm, layers or "listed", None)
    if callable(change):
        return change(), layers != "scanned"
    if layers is None:
        return lm, True  # separate arrays, in any net
    raise InvalidArgumentError(
        "The net has no layers that can be listed or scanned.",
        where="export: layers",
        got=f"layers={layers!r} and a {type(lm).__name__}",
        write="layers=None, or a pax.nets.Decoder",
    )


def _has_empty_store(lm: LanguageModel, dtype: DTypeLike | None) -> bool:
    """Whether an array of the cache has no elements, as where all layers have windows."""
    return any(0 in leaf.shape for leaf in jax.tree.leaves(shapes_of_cache(lm, 1, 1, dtype)))


def _fill_cache(cache: Cache, room: int, coming: int) -> list[Any]:
    """Returns the cache as if `coming` filled half of its room, and all of it, with zeros.

    Attention to the filled positions is another program then.
    """
    lengths = getattr(cache, "lengths", None)
    if lengths is None or not hasattr(cache, "with_lengths"):
        return []
    counts = [end - coming for end in (room // 2, room) if end - coming > np.max(lengths)]
    caches = [cache.with_lengths(np.full(np.shape(lengths), count, np.int32)) for count in counts]
    return [jax.tree.map(np.asarray, each) for each in caches]


@dataclass(eq=False)  # hashed by identity, as `jax.jit` and the exporters need of its methods
class _Served:
    """The exported functions, named as in `SIGNATURES`, their inputs, and example calls."""

    lm: LanguageModel
    settings: Settings
    count: int
    dtype: DTypeLike | None
    batch: int | str
    length: int | str
    room: int | str
    cache: Mapping[str, Any]  # options of `init_cache`

    def check_sizes(self, chosen: Sequence[str]) -> None:
        """Refuses sizes for which no call would have room."""
        length = 1 if isinstance(self.length, str) else self.length
        if "generate" in chosen:  # a net with learned positions refuses longer ones
            jax.eval_shape(lambda: self.empty(self.lm, 1, length + self.count))
        if "prefill" in chosen and not isinstance(self.room, str) and length > self.room:
            raise InvalidArgumentError(
                "A prompt has more tokens than the cache has places.",
                where="export: length",
                got=f"length={length} and max_length={self.room}",
                write=f"length={self.room} or less, or max_length={length} or more",
            )

    @staticmethod
    def prefill(lm: LanguageModel, tokens: Array, lengths: Array, cache: Cache) -> dict[str, Any]:
        logits, cache = last_logits(lm, tokens, cache, lengths)
        return {"logits": logits, "cache": cache}

    @staticmethod
    def decode(lm: LanguageModel, token: Array, cache: Cache) -> dict[str, Any]:
        meant = token >= 0
        read = jnp.where(meant, token, 0)[:, None]
        logits, cache = last_logits(lm, read, cache, meant.astype(jnp.int32))
        return {"logits": logits, "cache": cache}

    def generate(
        self, lm: LanguageModel, tokens: Array, lengths: Array, seed: jax.Array | None = None
    ) -> jax.Array:
        cache = self.empty(lm, tokens.shape[0], tokens.shape[1] + self.count)
        keys = row_keys(seed, tokens.shape[0], self.settings.sampler, "generate")
        state = begin_generation(lm, tokens, lengths, cache, keys, self.settings)
        return generate_rest(lm, state, self.settings, self.count)[0]

    def empty(self, lm: LanguageModel, batch: int, room: int) -> Any:
        return new_cache(lm, batch, room, self.dtype, **self.cache)

    def inputs(self, key: str) -> tuple[Any, ...]:
        """Returns the inputs of a function."""
        tokens = exporters.spec((self.batch, self.length), "int32")
        rows = exporters.spec((self.batch,), "int32")
        if key == "generate":
            seed = (exporters.spec((2,), "uint32"),) if self.settings.sampler.draws else ()
            return (tokens, rows, *seed)
        cache = shapes_of_cache(self.lm, self.batch, self.room, self.dtype, **self.cache)
        return (tokens, rows, cache) if key == "prefill" else (rows, cache)

    def examples(self, chosen: Sequence[str], prompts: Prompts | None) -> Mapping[str, Any]:
        """Returns calls along a greedy continuation: of the prompts, and of some later tokens.

        Prompts are fitted to fixed sizes: in batches of so many rows, of which the last one is
        filled up with its last row, and in parts of so many tokens.
        """
        tokens, lengths = self._prompts(prompts)
        size = len(tokens) if isinstance(self.batch, str) else self.batch
        calls: dict[str, list[Any]] = {key: [] for key in SIGNATURES}
        seed = [np.array([0, 7], np.uint32)] * self.settings.sampler.draws
        for first in range(0, len(tokens), size):
            rows = np.minimum(np.arange(first, first + size), len(tokens) - 1)
            begin, here = self._parts(tokens[rows], lengths[rows])[0]
            calls["generate"].append((begin, here, *seed))
            if "decode" in chosen or "prefill" in chosen:
                self._add_session(calls, tokens[rows], lengths[rows])
        return {key: calls[key] for key in chosen}

    def _parts(self, tokens: np.ndarray, lengths: np.ndarray) -> list[tuple]:
        """Returns the calls that read prompts: tokens, and how many of each row."""
        step = tokens.shape[1] if isinstance(self.length, str) else self.length
        filled = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % step)))
        return [
            (filled[:, start : start + step], np.clip(lengths - start, 0, step).astype(np.int32))
            for start in range(0, filled.shape[1], step)
        ]

    def _add_session(
        self, calls: dict[str, list[Any]], tokens: np.ndarray, lengths: np.ndarray
    ) -> None:
        rows, longest = len(tokens), int(lengths.max())
        room = longest + self.count if isinstance(self.room, str) else self.room
        check_new_room(room, lengths, 0, "export: prompts")
        _, shapes = self.inputs("decode")
        sizes: dict[Any, Any] = {self.room: room, self.batch: rows}

        def empty(leaf: Array) -> np.ndarray:
            return np.zeros([sizes.get(str(size), size) for size in leaf.shape], leaf.dtype)

        prefill, decode = jax.jit(self.prefill), jax.jit(self.decode)
        cache: Any = jax.tree.map(empty, shapes)
        logits: Any = None
        for part, here in self._parts(tokens, lengths):
            calls["prefill"].append((part, here, cache))
            outputs, cache = self._run(prefill, part, here, cache)
            logits = outputs if logits is None else np.where((here > 0)[:, None], outputs, logits)
        for step in range(min(_STEPS, room - longest)):
            token = np.argmax(logits, -1).astype(np.int32)
            token[0] = -1 if step == 1 and rows > 1 else token[0]
            calls["decode"].append((token, cache))
            logits, cache = self._run(decode, token, cache)
        # One more turn after the contents of the cache, and calls where it is fuller.
        part, _ = self._parts(tokens, lengths)[0]
        counts = np.full(rows, part.shape[1], np.int32)
        if np.max(getattr(cache, "lengths", room)) + part.shape[1] <= room:
            calls["prefill"].append((part, counts, cache))
        fuller = _fill_cache(cache, room, part.shape[1])
        calls["prefill"] += [(part, counts, each) for each in fuller]
        calls["decode"] += [(part[:, 0], each) for each in _fill_cache(cache, room, 1)]

    def _run(self, function: Callable[..., Any], *inputs: PyTree) -> tuple[np.ndarray, Any]:
        results = jax.tree.map(np.asarray, function(self.lm, *inputs))
        return results["logits"], results["cache"]

    def _prompts(self, prompts: Prompts | None) -> tuple[np.ndarray, np.ndarray]:
        rows: Any = prompts
        lengths = None
        if prompts is None:
            random = np.random.default_rng(0)
            count = len(_LENGTHS) if isinstance(self.batch, str) else self.batch
            width = max(_LENGTHS) if isinstance(self.length, str) else self.length
            if not isinstance(self.room, str):
                width = max(1, min(width, self.room - _STEPS))
            most = vocabulary_of(self.lm) or 2
            rows = random.integers(0, most, (count, width))
            lengths = np.array([max(1, width - 2 * row) for row in range(count)])
        tokens, found = checked_prompt(self.lm, rows, lengths, "export: prompts")
        return np.asarray(tokens), np.asarray(found)
