"""A language model of the library's layers, in three sizes, and its training step on a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export import transforms as T
from pax_export.nets._transformer import CausalSelfAttention, DenseBlock

VOCAB = 32768


@dataclass(frozen=True)
class Size:
    """How large the model is, and the text that one device is given."""

    dim: int
    layers: int
    heads: int
    length: int = 2048
    vocab: int = VOCAB


# Width and heads are those of published models; this library's layers are four
# times as wide inside, so the number of layers is what gives the round figure.
SIZES = {
    "1B": Size(dim=2048, layers=18, heads=16),
    "7B": Size(dim=4096, layers=32, heads=32),
    "70B": Size(dim=8192, layers=86, heads=64),
}


class Block(pax.Module):
    """One layer: causal attention, then the dense block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = pax.LayerNorm(size.dim, -1, True, True)
        self.attention = CausalSelfAttention(size.heads, size.dim // size.heads, 1.0)
        self.dense_norm = pax.LayerNorm(size.dim, -1, True, True)
        self.dense = DenseBlock(size.dim, 1.0)

    def __call__(self, h: jax.Array) -> tuple[jax.Array, None]:
        """Applies the layer to ``[batch, length, dim]``, as `T.Scan` calls it."""
        # Without this the compiler may split what lies between two layers as it
        # splits the weights, and move activations instead of weights.
        h = jax.lax.with_sharding_constraint(h, P("data"))
        h = h + self.attention(self.attention_norm(h))
        return h + self.dense(self.dense_norm(h)), None


class Decoder(pax.Module):
    """Embedding, layers, logits; ``[batch, length]`` to ``[batch, length, vocab]``."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = pax.Embed(size.vocab, size.dim)
        block = T.Remat(Block, prevent_cse=False)
        self.layers = T.Scan(block, length=size.layers)(size)
        self.norm = pax.LayerNorm(size.dim, -1, True, True)
        self.logits = pax.Linear(size.dim, size.vocab, with_bias=False)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the token after each."""
        h, _ = self.layers(self.embed(tokens))
        return self.logits(self.norm(h))


def abstract(size: Size, compute: str = "bf16") -> tuple[Any, Any]:
    """The model and its Adam, as shapes: nothing is allocated.

    Parameters and Adam are float32; products of matrices are computed in ``compute``.
    """
    policy = jmp.get_policy(f"p=f32,c={compute},o={compute}")
    net = jax.eval_shape(lambda: pax.precision.mixed_precision(Decoder(size), policy))
    adam = pax.optim.from_optax(optax.adam(1e-4))
    return net, jax.eval_shape(adam, net.parameters())


def loss_fn(net: Any, tokens: jax.Array) -> Any:
    """The mean cross entropy of each next token."""
    net, logits = net % tokens[:, :-1]
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(), (losses.mean(), net)


def compiled_step(size: Size, mesh: Mesh, rules: Any, compute: str = "bf16") -> Any:
    """The training step of the model, compiled for a mesh; one sequence for each device."""
    net, adam = abstract(size, compute)
    placed = shardings(net, adam, mesh, rules)
    by_batch, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    step = jax.jit(
        pax.build_update_fn(loss_fn),
        in_shardings=(*placed, by_batch),
        out_shardings=(*placed, whole),
        donate_argnums=(0, 1),
    )
    tokens = jax.ShapeDtypeStruct((mesh.size, size.length + 1), jnp.int32)
    with jax.set_mesh(mesh):
        return step.lower(net, adam, tokens).compile()


def shardings(net: Any, adam: Any, mesh: Mesh | AbstractMesh, rules: Any) -> tuple[Any, Any]:
    """How the model and its Adam lie on a mesh."""
    follow = pax.sharding.following(net, rules)
    return pax.sharding.shardings(net, mesh, rules), pax.sharding.shardings(adam, mesh, follow)
