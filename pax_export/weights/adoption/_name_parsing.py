"""Parses names into words, numbers and roles of arrays, with synonyms of frameworks."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

WEIGHT, BIAS, MEAN, VAR, COUNT = "weight", "bias", "mean", "var", "count"
RECURRENT = "recurrent"
ROLES = frozenset((WEIGHT, BIAS, MEAN, VAR, COUNT, RECURRENT))

_ROLES = {
    "weight": WEIGHT, "weights": WEIGHT, "kernel": WEIGHT, "gamma": WEIGHT, "scale": WEIGHT,
    "w": WEIGHT, "embedding": WEIGHT, "embeddings": WEIGHT, "bias": BIAS, "beta": BIAS,
    "offset": BIAS, "shift": BIAS, "b": BIAS, "biases": BIAS, "mean": MEAN, "var": VAR,
    "variance": VAR, "debias": COUNT,
}  # fmt: skip

# Two or three words that are one thing.
_JOINED = {
    "num batches tracked": "debias", "running mean": "mean", "moving mean": "mean",
    "ema mean": "mean", "running var": "var", "moving variance": "var", "ema var": "var",
    "layer norm": "norm", "batch norm": "norm", "group norm": "norm", "rms norm": "norm",
    "layer normalization": "norm", "batch normalization": "norm", "group normalization": "norm",
    "multi head attention": "attention", "feed forward": "mlp", "ln f": "final",
}  # fmt: skip
_ANY_JOINED = re.compile(rf"(?<!\S)(?:{'|'.join(_JOINED)})(?!\S)")

_SYNONYMS = {
    word: one
    for one, words in {
        "query": "q qry queries wq", "key": "k keys wk", "value": "v val values wv",
        "output": "o out outputs wo", "attention": "attn att mha sa",
        "embed": "emb embd embedding embeddings embedder wte", "position": "pos positional wpe",
        "token": "tok tokens", "encoder": "enc", "decoder": "dec", "linear": "fc dense lin",
        "conv": "convolution conv1d conv2d conv3d", "mlp": "ffn ff ffw feedforward",
        "norm": "ln bn gn rms layernorm layrnorm batchnorm groupnorm rmsnorm normalization",
        "layer": "layers block blocks blk", "head": "heads logits classifier", "final": "last",
        "group": "groups", "hidden": "hid", "projection": "proj", "down": "downs", "up": "ups",
        "recurrent": "rnn", "forward": "fwd", "backward": "bwd reverse reversed",
        "input": "in inputs", "dense": "",
    }.items()
    for word in words.split()
}  # fmt: skip

# Words for layer types: "dense_1" and "dense_2" are numbered as layers are.
KINDS = frozenset(
    "layer linear dense conv norm embed attention mlp group stage head projection transpose "
    "separable depthwise lstm gru recurrent simple cell module sequential features encoder "
    "decoder hidden input output time distributed bidirectional forward backward".split()
)

_RANK = re.compile(r"(conv|norm|normalization|pool|pooling|dropout)_?[123]d", re.IGNORECASE)
_PIECES = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
# torch's LSTM, GRU and RNN: one module with the arrays of several layers and directions.
_TORCH_RNN = re.compile(r"(weight|bias)_(ih|hh)(?:_l(\d+))?(_reverse)?$")
#: Words that distinguish the arrays of one such layer.
OF_CELL = re.compile(r"(weight|bias)_(ih|hh)(?=(_l\d+)?(_reverse)?$)")
# flax's cells have a Dense for each gate: ii, if, ig, io, hi, hf, hg, ho.
# nnx has one for all gates, of the input and of the state.
_NNX_CELL = re.compile(r"(?:^|[./])dense_(i|h)[./](kernel|bias)$")
_FLAX_GATE = re.compile(r"(?:^|[./])([ih][ifgo])[./](kernel|bias)$")
# Words around the name of an array that carry no meaning.
_AROUND = re.compile(r":0$|[./]\.ATTRIBUTES[./]VARIABLE_VALUE$|[./](?:raw_)?value$")
_COLLECTIONS = re.compile(r"(?:(?<=[./])|^)(?:params|batch_stats|variables|state_dict)[./]")
_KERAS_PLACE = re.compile(r"^(.*?)[./]vars[./](\d+)$")


@dataclass(frozen=True)
class Name:
    """A name without its role."""

    words: tuple[str, ...]  # lowercase words; ``#`` for each number
    numbers: tuple[int, ...]

    @property
    def meaning(self) -> frozenset[str]:
        """The words that carry meaning."""
        return frozenset(self.words) - {"#", "projection"}


def split_words(text: str) -> list[str]:
    """Splits a name into lowercase words and numbers.

    Example:
        >>> split_words("encoder.layers.0/SelfAttention.conv2d_1")
        ['encoder', 'layers', '0', 'self', 'attention', 'conv', '1']
    """
    return [piece.lower() for piece in _PIECES.findall(_RANK.sub(r"\1", text))]


def _join_words(words: Sequence[str]) -> list[str]:
    return _ANY_JOINED.sub(lambda found: _JOINED[found[0]], " ".join(words)).split()


def name_of_words(words: Sequence[str]) -> Name:
    """The name of these words, synonyms made one."""
    words = _join_words(words)
    numbers = tuple(int(word) for word in words if word.isdigit())
    return Name(
        tuple("#" if word.isdigit() else _SYNONYMS.get(word, word) for word in words), numbers
    )


def name_of(text: str) -> Name:
    """Parses the path of a module.

    Example:
        >>> name_of("layers.0.attn.q_proj").words
        ('layer', '#', 'attention', 'query', 'projection')
    """
    return name_of_words(split_words(text))


def paths_above(path: str) -> list[str]:
    """The paths of the modules around a layer, the outermost first.

    Example:
        >>> paths_above("a/b.c")
        ['a', 'a.b']
    """
    parts = path.replace("/", ".").split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def number_first(names: Iterable[str]) -> dict[str, str]:
    """Numbers the first of Keras' names: ``dense`` becomes ``dense_0`` if there is a ``dense_1``.

    Example:
        >>> number_first(["a/dense/kernel", "a/dense_1/kernel"])["a/dense/kernel"]
        'a/dense_0/kernel'
    """
    split = {name: re.split(r"([./])", name) for name in names}
    counted = {
        re.sub(r"_\d+$", "", beginning)
        for parts in split.values()
        for end in range(len(parts))
        if re.search(r"[A-Za-z0-9]_\d+$", beginning := "".join(parts[: end + 1]))
    }
    return {
        name: "".join(
            f"{part}_0" if "".join(parts[: index + 1]) in counted else part
            for index, part in enumerate(parts)
        )
        for name, parts in split.items()
    }


def role_of(attribute: str) -> str | None:
    """The role that the attribute of a layer has, or None."""
    words = _join_words(split_words(attribute))
    return _ROLES.get(words[0]) if len(words) == 1 else None


@dataclass(frozen=True)
class Parsed:
    """The name of an array as its layer and its role."""

    layer: str  # as written
    words: tuple[str, ...]  # of the layer, as written
    role: str | None  # also of a recurrent layer, or an index such as ``"0"``


def parse_array_name(name: str) -> Parsed:
    """Parses the name of an array.

    Example:
        >>> parse_array_name("encoder.self_attn.in_proj_weight").role
        'weight'
        >>> parse_array_name("params/Dense_0/kernel").layer
        'Dense_0'
        >>> parse_array_name("lstm.weight_hh_l0").role
        'weight_hh'
    """
    bare = _COLLECTIONS.sub("", _AROUND.sub("", name))
    if found := _TORCH_RNN.search(bare):
        layer = bare[: found.start()].rstrip("._/")
        number = [found[3]] if found[3] is not None else []
        words = (*split_words(layer), *number, "backward" if found[4] else "forward")
        tail = f"_l{found[3]}{found[4] or ''}" if found[3] is not None else ""
        return Parsed(layer + tail, words, f"{found[1]}_{found[2]}")
    if found := _FLAX_GATE.search(bare):
        layer = bare[: found.start()]
        return Parsed(layer, tuple(split_words(layer)), f"{found[1]}.{found[2]}")
    if (found := _NNX_CELL.search(bare)) and found[1] + found[2] != "ibias":
        layer = bare[: found.start()]
        role = BIAS if found[2] == "bias" else WEIGHT if found[1] == "i" else RECURRENT
        return Parsed(layer, tuple(split_words(layer)), role)
    if found := _KERAS_PLACE.match(bare):
        return Parsed(found[1], tuple(split_words(found[1])), found[2])
    return _parse_plain_name(bare)


def _parse_plain_name(bare: str) -> Parsed:
    raw = split_words(bare)
    if raw[-1:] == ["averages"] and _role_at_end(raw[:-1])[0] in (MEAN, VAR):
        raw = raw[:-1]
    elif raw[-1:] == ["debias"] and _role_at_end(raw[:-1])[0] in (MEAN, VAR):
        return Parsed(_strip_role(bare), tuple(raw[: -1 - _role_at_end(raw[:-1])[1]]), COUNT)
    if raw[-2:] == ["recurrent", "kernel"]:
        return Parsed(_strip_role(bare), tuple(raw[:-2]), RECURRENT)
    if len(raw) > 1 and raw[-1] == "r" and bare[-1] == "R":  # of ONNX, with W and B
        return Parsed(_strip_role(bare), tuple(raw[:-1]), RECURRENT)
    role, count = _role_at_end(raw)
    if role is not None:
        return Parsed(_strip_role(bare), tuple(raw[:-count]), role)
    if len(raw) > 1 and raw[-1].isdigit() and raw[-2] in _ROLES:  # w1, b1
        return Parsed(bare, (*raw[:-2], raw[-1]), _ROLES[raw[-2]])
    return Parsed(bare, tuple(raw), None)


def _role_at_end(raw: list[str]) -> tuple[str | None, int]:
    """Returns the role at the end of a name, and its number of words."""
    for count in (3, 2, 1):
        tail = " ".join(raw[-count:])
        one = _JOINED.get(tail, tail)
        if len(raw) >= count and one in _ROLES:
            return _ROLES[one], count
    return None, 0


def _strip_role(bare: str) -> str:
    """Returns the text before the role, as far as it can be separated."""
    for separator in "./":
        head, _, tail = bare.rpartition(separator)
        if head and tail in ("averages", "debias"):
            return head.rpartition(separator)[0]
        if head and (role_of(tail) or tail in ("recurrent_kernel", "R")):
            return head
    ending = re.search(r"[._/]?(recurrent_kernel|[A-Za-z]+)$", bare)
    return bare[: ending.start()] if ending else bare


# --- the order of norms in a block, from their names ----------------------------------
# ``post_attention_layernorm`` of a Llama is the norm before the dense block: such words give an
# order, not the part of the block.


_BEFORE, _AFTER = {"pre", "before"}, {"post", "after"}
_START, _END = {"input", *_BEFORE}, {"output", "final", *_AFTER}
_ORDER = _START | _END
#: The parts of a block in the order in which they are computed; the first that is found counts.
_PARTS = {"cross": 1, "attention": 0, "self": 0, "mlp": 2, "linear": 2}


@dataclass(frozen=True)
class NormPosition:
    """The position of a norm in its block, parsed from its name."""

    block: tuple[str, ...]  # words up to the last number, which counts blocks
    at: float | None  # position in the block; None if no word gives it
    number: int | None  # of the norm in the block
    exact: bool  # whether the name has before or after, and a part
    meaning: frozenset[str]  # the other words of the name


@functools.lru_cache
def norm_position(words: tuple[str, ...]) -> NormPosition:
    """Parses the name of a norm.

    Example:
        >>> norm_position(("layer", "#", "post", "attention", "norm")).at
        0.75
        >>> norm_position(("layer", "#", "final", "norm")).meaning == {"layer", "norm"}
        True
    """
    own = list(words[:-1] if words[-1:] == ("#",) else words)
    begin = len(own) - own[::-1].index("#") if "#" in own else 0
    block, own = tuple(own[:begin]), own[begin:]
    cross = "encoder attention" in " ".join(own)  # of a decoder, over the encoder's output
    part = next((n for w, n in _PARTS.items() if w in own or (w == "cross" and cross)), None)
    after, before = not _AFTER.isdisjoint(own), not _BEFORE.isdisjoint(own)
    if part is None:
        at = 9.0 if not _END.isdisjoint(own) else -1.0 if not _START.isdisjoint(own) else None
    else:
        at = part + (0.75 if after else 0.0 if before else 0.5)
    exact = part is not None and (after or before)
    silent = _ORDER | _PARTS.keys() if exact else _ORDER
    numbers = [int(word) for word in own if word.isdigit()]
    number = numbers[0] if numbers and not KINDS.isdisjoint(own) else None  # `tensor_4` counts all
    return NormPosition(block, at, number, exact, Name((*block, *own), ()).meaning - silent)


def sort_norms(names: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]] | None:
    """Sorts the names of the norms of one block by position; None if names do not give it."""
    places = {name: norm_position(name) for name in names}
    if len({norm.block for norm in places.values()}) > 1:
        return None
    for key in ("at", "number"):
        found = {name: getattr(norm, key) for name, norm in places.items()}
        values = set(found.values())
        if values != {None}:  # some names give it: then all have to, and they have to differ
            decided = None not in values and len(values) == len(found)
            return sorted(found, key=found.__getitem__) if decided else None
    return None


def contradicts_order(pairs: Mapping[tuple[str, ...], tuple[str, ...]]) -> bool:
    """Returns whether matching would swap norms whose names give their order on each side."""
    places = [(norm_position(own), norm_position(other)) for own, other in pairs.items()]
    for own, other in places:
        for second, theirs in places:
            if own.block != second.block or other.block != theirs.block:
                continue
            if own.exact and theirs.exact and own.at == theirs.at and own != second:
                return True  # equal names were matched elsewhere
            if _comes_before(own, second) and _comes_before(theirs, other):
                return True
    return False


def _comes_before(one: NormPosition, other: NormPosition) -> bool:
    return one.at is not None and other.at is not None and one.at < other.at
