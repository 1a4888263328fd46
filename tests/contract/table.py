"""Every layer once: how to build it and what to feed it.

The suites of this directory loop over `ROWS`, so a new layer is one new row.
Functions are named, not lambdas: rows must load from a pickle in another
process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.experimental.graph import build_graph_module
from pax_export.nets._resnet import ResNet
from tests.closeness import assert_close
from tests.hard.size import IN_LONG_RUNS

NEVER, IN_TRAIN_MODE, ALWAYS = "never", "in train mode", "always"


def call(module: Any, *inputs: Any) -> Any:
    return module(*inputs)


def draw_key(module: Any, *inputs: Any) -> Any:
    return module.next_rng_key()


def adapted() -> pax.Module:
    """A layer with two adapters, one of them LoRA with dropout, one DoRA."""
    layer = pax.adapters.lora(pax.Linear(3, 4), 2, alpha=3, dropout=0.2)
    layer = pax.adapters.lora(layer, 1, alpha=2, name="second", dora=True)
    return layer.at("adapters.*.lora_b").apply(lambda b: b + 0.5)


@dataclass(frozen=True)
class Row:
    """A layer, and what it needs.

    Attributes:
        name: what pytest shows.
        build: makes the layer; two calls follow one recipe.
        symbolic: the shape of each input, as ``jax.export.symbolic_shape`` takes
            it; ``b`` is the batch.
        dtype: of the inputs; integers are drawn from 0 to 3.
        changes_state: when a call gives a module with other leaves, so that it
            needs ``pure`` or ``purecall``.
        random: whether the output depends on a key of the module's state.
        call: how the layer is used.
    """

    name: str
    build: Callable[[], pax.Module]
    symbolic: tuple[str, ...]
    dtype: str = "float32"
    changes_state: str = NEVER
    random: bool = False
    call: Callable[..., Any] = call

    def inputs(self, seed: int = 0, **sizes: int) -> tuple[Any, ...]:
        """Arrays of the shapes in `symbolic`; a dimension not given is 3."""
        draws = np.random.RandomState(seed)
        return tuple([self._draw(draws, shape, sizes) for shape in self.symbolic])

    def _draw(self, draws: np.random.RandomState, shape: str, sizes: dict[str, int]) -> Any:
        words = [word.strip() for word in shape.split(",") if word.strip()]
        size = [int(word) if word.isdigit() else sizes.get(word, 3) for word in words]
        if self.dtype == "int32":
            return jnp.asarray(draws.randint(0, 4, size).astype(np.int32))
        return jnp.asarray(draws.standard_normal(size).astype(jnp.dtype(self.dtype)))

    def symbolic_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Inputs for ``jax.export``, all in one scope."""
        scope = jax.export.SymbolicScope()
        return tuple(
            [
                jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), self.dtype)
                for shape in self.symbolic
            ]
        )

    def run(self, module: Any, *inputs: Any) -> tuple[Any, Any]:
        """The module after the call, and the output."""
        return _run(self.call, module, inputs)


def _run(function: Callable, module: Any, inputs: tuple) -> tuple[Any, Any]:
    def use(module: Any) -> tuple[Any, Any]:
        output = function(module, *inputs)
        return module, output

    return pax.pure(use)(module)


def flat(x: Any) -> Any:
    return x.reshape(x.shape[0], -1)


def small_net() -> pax.Module:
    return pax.Sequential(
        pax.Conv2D(1, 2, 3, stride=2),
        pax.BatchNorm2D(2),
        jax.nn.relu,
        functools.partial(pax.max_pool, window_shape=(2, 2, 1), strides=(2, 2, 1), padding="SAME"),
        flat,
        pax.Dropout(0.2),
        pax.Linear(8, 4),
        name="net",
    )


def over_time(cell: Any, xs: Any) -> Any:
    state = cell.initial_state(xs.shape[0])
    return pax.scan(cell, state, xs, time_major=False)[1]


def attend_to_itself(attention: Any, x: Any) -> Any:
    return attention(x, x, x)


def turn(rotary: Any, x: Any) -> Any:
    return rotary(x, jnp.arange(x.shape[1]))


def read_whole(lm: Any, tokens: Any) -> Any:
    return lm(tokens)  # a loop over layers, whose work XLA counts once: not for `test_flops`


def tiny_decoder() -> pax.Module:
    config = pax.nets.DecoderConfig.llama(
        vocab_size=5, dim=4, num_layers=2, num_heads=2, num_kv_heads=1, hidden_dim=6, tied=True
    )
    return pax.nets.Decoder(config)


class TinyResNet(ResNet):
    """One block; the rest is as in all residual networks."""

    blocks_per_group = (1,)


def tiny_resnet() -> pax.Module:
    first = {"out_features": 2, "kernel_shape": 3, "padding": "SAME"}
    last = {"w_init": jax.nn.initializers.ones}
    return TinyResNet(1, 3, logits_config=last, initial_conv_config=first)


def forked(x: Any, y: Any) -> Any:
    """A graph with every operator, and a module after each."""
    hidden = (x | y) >> functools.partial(jnp.add) >> pax.Linear(4, 4) >> jax.nn.relu
    mixed = hidden.binary_ops(jnp.subtract, y) >> pax.Dropout(0.4)
    joined = (mixed & x) >> functools.partial(jnp.concatenate, axis=-1)
    return joined >> functools.partial(pax.Linear(8, 2))


def graph() -> pax.Module:
    return build_graph_module(forked)(jnp.zeros((3, 4)), jnp.zeros((3, 4)))


class LazyNet(pax.experimental.LazyModule):
    """Creates layers with parameters and with state."""

    def __call__(self, x: Any) -> Any:
        x = self.get_or_create("fc", lambda: pax.Linear(x.shape[-1], 2))(x)
        x = self.get_or_create("norm", lambda: pax.BatchNorm1D(2))(x)
        return self.get_or_create("dropout", lambda: pax.Dropout(0.4))(x)


def lazy_net() -> pax.Module:
    return pax.experimental.materialize(LazyNet(), jnp.zeros((3, 3, 3)))


def pool(function: Callable, **options: Any) -> Callable[[], pax.Module]:
    return lambda: pax.Lambda(functools.partial(function, **options))


PAIRS_1D, PAIRS_2D = [(1, 2)], [(1, 0), (2, 1)]
WINDOW = {"window_shape": (2, 3, 1), "strides": (2, 1, 1)}

ROWS = [
    Row("Linear", lambda: pax.Linear(3, 4), ("b, 3",)),
    Row("Linear, no bias", lambda: pax.Linear(3, 4, with_bias=False, name="fc"), ("b, t, 3",)),
    Row("Linear, adapted", adapted, ("b, 3",), changes_state=IN_TRAIN_MODE, random=True),
    Row("Conv1D", lambda: pax.Conv1D(2, 4, 3), ("b, w, 2",)),
    Row(
        "Conv1D, NCW",
        lambda: pax.Conv1D(2, 4, 3, rate=2, padding=PAIRS_1D, data_format="NCW"),
        ("b, 2, 6",),
    ),
    Row("Conv2D", lambda: pax.Conv2D(2, 4, (3, 2), stride=(2, 1)), ("b, 6, w, 2",)),
    Row(
        "Conv2D, NCHW",
        lambda: pax.Conv2D(
            2, 4, 3, rate=(1, 2), padding=PAIRS_2D, data_format="NCHW", feature_group_count=2
        ),
        ("b, 2, 6, 5",),
    ),
    Row(
        "Conv2D, no bias",
        lambda: pax.Conv2D(2, 4, 3, padding="VALID", with_bias=False),
        ("b, 6, 5, 2",),
    ),
    Row("Conv1DTranspose", lambda: pax.Conv1DTranspose(2, 3, 4, stride=2), ("b, w, 2",)),
    Row(
        "Conv1DTranspose, NCW",
        lambda: pax.Conv1DTranspose(2, 3, 4, padding=PAIRS_1D, data_format="NCW"),
        ("b, 2, 5",),
    ),
    Row("Conv2DTranspose", lambda: pax.Conv2DTranspose(2, 3, 3, stride=2), ("b, 3, 4, 2",)),
    Row(
        "Conv2DTranspose, NCHW",
        lambda: pax.Conv2DTranspose(
            2, 3, (2, 3), padding="VALID", with_bias=False, data_format="NCHW"
        ),
        ("b, 2, 3, 4",),
    ),
    Row("BatchNorm1D", lambda: pax.BatchNorm1D(2), ("b, w, 2",), changes_state=IN_TRAIN_MODE),
    Row(
        "BatchNorm1D, NCW",
        lambda: pax.BatchNorm1D(2, create_scale=False, data_format="NCW"),
        ("b, 2, w",),
        changes_state=IN_TRAIN_MODE,
    ),
    Row("BatchNorm2D", lambda: pax.BatchNorm2D(2), ("b, h, w, 2",), changes_state=IN_TRAIN_MODE),
    Row(
        "BatchNorm2D, NCHW",
        lambda: pax.BatchNorm2D(2, create_offset=False, decay_rate=0.5, data_format="NCHW"),
        ("b, 2, h, w",),
        changes_state=IN_TRAIN_MODE,
    ),
    Row("LayerNorm", lambda: pax.LayerNorm(4, -1, True, True), ("b, t, 4",)),
    Row(
        "LayerNorm, over a slice",
        lambda: pax.LayerNorm(4, slice(1, None), True, False),
        ("b, t, 4",),
    ),
    Row("LayerNorm, no arrays", lambda: pax.LayerNorm(4, (0, 2), False, False), ("b, t, 4",)),
    Row("RMSNorm", lambda: pax.RMSNorm(4, scale_offset=1.0), ("b, t, 4",)),
    Row("GroupNorm", lambda: pax.GroupNorm(2, 4), ("b, h, w, 4",)),
    Row(
        "GroupNorm, channels first",
        lambda: pax.GroupNorm(2, 4, (1, 2), create_offset=False, data_format="channels_first"),
        ("b, 4, h, w",),
    ),
    Row(
        "Dropout", lambda: pax.Dropout(0.4), ("b, t, 3",), changes_state=IN_TRAIN_MODE, random=True
    ),
    Row("Embed", lambda: pax.Embed(4, 3), ("b, t",), dtype="int32"),
    Row("LSTM", lambda: pax.LSTM(3, 4, forget_gate_bias=1.0), ("b, t, 3",), call=over_time),
    Row("GRU", lambda: pax.GRU(3, 4), ("b, t, 3",), call=over_time),
    Row("GRU, reset after", lambda: pax.GRU(3, 4, reset_after=True), ("b, t, 3",), call=over_time),
    Row("VanillaRNN", lambda: pax.VanillaRNN(3, 4), ("b, t, 3",), call=over_time),
    Row(
        "MultiHeadAttention",
        lambda: pax.MultiHeadAttention(2, 2, 1.0),
        ("b, t, 4",),
        call=attend_to_itself,
    ),
    Row(
        "GroupedQueryAttention",
        lambda: pax.GroupedQueryAttention(
            4, 2, 1, query_key_norm=1e-5, rotary=pax.Rotary(2), window=2, softcap=3.0
        ),
        ("b, t, 4",),
    ),
    Row("Rotary", lambda: pax.Rotary(4), ("b, t, 2, 4",), call=turn),
    Row("GatedDense", lambda: pax.GatedDense(4, 6), ("b, t, 4",)),
    Row("Decoder", tiny_decoder, ("b, t",), dtype="int32", call=read_whole),
    Row(
        "Transformer",
        lambda: pax.nets.Transformer(4, 2, 1, 0.2),
        ("b, t, 4",),
        changes_state=IN_TRAIN_MODE,
        random=True,
    ),
    Row("ResNet", tiny_resnet, ("b, 1, h, w",), changes_state=IN_TRAIN_MODE),
    Row("Sequential", small_net, ("b, 8, 8, 1",), changes_state=IN_TRAIN_MODE, random=True),
    Row("Sequential, empty", lambda: pax.Sequential(), ("b, 3",)),
    Row("Lambda", lambda: pax.Lambda(jax.nn.relu, name="relu"), ("b, 3",)),
    Row("Identity", lambda: pax.Identity(name="id"), ("b, 3",)),
    Row("EMA", lambda: pax.EMA(jnp.zeros(3), 0.9), ("3",), changes_state=IN_TRAIN_MODE),
    Row(
        "EMA, debias",
        lambda: pax.EMA(jnp.zeros((2, 3)), 0.9, debias=True),
        ("2, 3",),
        changes_state=IN_TRAIN_MODE,
    ),
    Row("RngSeq", lambda: pax.RngSeq(seed=1), (), changes_state=ALWAYS, random=True, call=draw_key),
    Row("GraphModule", graph, ("b, 4", "b, 4"), changes_state=IN_TRAIN_MODE, random=True),
    Row("LazyModule", lazy_net, ("b, t, 3",), changes_state=IN_TRAIN_MODE, random=True),
    Row("max_pool", pool(pax.max_pool, padding="SAME", **WINDOW), ("b, h, w, 2",)),
    Row("max_pool, valid", pool(pax.max_pool, padding="VALID", **WINDOW), ("b, 5, 6, 2",)),
    Row("avg_pool", pool(pax.avg_pool, padding="SAME", **WINDOW), ("b, h, w, 2",)),
    Row("avg_pool, valid", pool(pax.avg_pool, padding="VALID", **WINDOW), ("b, 5, 6, 2",)),
]


def each(rows: list[Row]) -> pytest.MarkDecorator:
    """Runs a test once for each of these rows."""
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def in_every_run(row: Row) -> bool:
    """Whether a suite that compiles each row has it outside of long runs.

    Variants of a layer have its operations, and tests in `tests/nn`; nets have tests in
    `tests/nets`, and their layers rows of their own.
    """
    return row.name == "Linear, adapted" or not ("," in row.name or row.name in NETS)


NETS = ("Transformer", "ResNet", "Decoder")
COMPILED = [row for row in ROWS if IN_LONG_RUNS or in_every_run(row)]

each_row = each(ROWS)
each_stateful_row = each([row for row in ROWS if row.changes_state != NEVER])
each_compiled_row = each(COMPILED)
each_compiled_stateful_row = each([row for row in COMPILED if row.changes_state != NEVER])


def leaves_equal(a: Any, b: Any) -> bool:
    """True if two trees have one structure and equal arrays."""
    if jax.tree_util.tree_structure(a) != jax.tree_util.tree_structure(b):
        return False
    pairs = zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b))
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in pairs)


def at_index(tree: Any, index: int) -> Any:
    """What stands at one place of the leading axis of every leaf; jax would compile each slice."""
    return jax.tree_util.tree_map(lambda x: np.asarray(np.asarray(x)[index]), tree)


def stack(*trees: Any) -> Any:
    """Equal trees as one tree with a leading axis."""
    return jax.tree_util.tree_map(lambda *leaves: jnp.asarray(np.stack(leaves)), *trees)


def assert_trees_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compares two trees of arrays; dtypes must be the same."""
    pax.assert_structure_equal(actual, expected)
    pairs = zip(jax.tree_util.tree_leaves(actual), jax.tree_util.tree_leaves(expected))
    for x, y in pairs:
        assert x.dtype == y.dtype
        assert_close(x, y, rtol=tolerance, atol=tolerance)
