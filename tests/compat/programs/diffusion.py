"""A denoising diffusion model: U-Net with attention, tables of the schedule kept as states."""

import math
from functools import partial
from inspect import isfunction

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax
from pax import GroupNorm, LayerNorm


def default(value, other):
    if value is not None:
        return value
    return other() if isfunction(other) else other


class Residual(pax.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def __call__(self, x, *args, **kwargs):
        return self.fn(x, *args, **kwargs) + x


class PositionEmbedding(pax.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def __call__(self, x):
        half = self.dim // 2
        rate = jnp.exp(jnp.arange(0, half) * (-math.log(10_000) / (half - 1)))
        angle = x[:, None] * rate[None, :]
        return jnp.concatenate((jnp.sin(angle), jnp.cos(angle)), axis=-1)


class Mish(pax.Module):
    def __call__(self, x):
        return x * jnp.tanh(jax.nn.softplus(x))


class PreNorm(pax.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.fn = fn
        self.norm = LayerNorm(dim, -1, True, True)

    def __call__(self, x):
        return self.fn(self.norm(x))


class Block(pax.Module):
    def __init__(self, dim, dim_out, groups=2):
        super().__init__()
        self.blocks = pax.Sequential(
            pax.Conv2D(dim, dim_out, 3, padding="SAME"), GroupNorm(groups, dim_out), Mish()
        )

    def __call__(self, x):
        return self.blocks(x)


class ResnetBlock(pax.Module):
    def __init__(self, dim, dim_out, *, time_dim=None):
        super().__init__()
        self.mlp = pax.Sequential(Mish(), pax.Linear(time_dim, dim_out)) if time_dim else None
        self.block1 = Block(dim, dim_out)
        self.block2 = Block(dim_out, dim_out)
        if dim != dim_out:
            self.shortcut = pax.Conv2D(dim, dim_out, 1)
        else:
            self.shortcut = pax.Identity()

    def __call__(self, x, time):
        h = self.block1(x)
        if self.mlp is not None:
            h = h + self.mlp(time)[:, None, None, :]
        return self.block2(h) + self.shortcut(x)


class LinearAttention(pax.Module):
    def __init__(self, dim, heads=2, dim_head=4):
        super().__init__()
        self.heads = heads
        self.to_qkv = pax.Conv2D(dim, dim_head * heads * 3, 1, with_bias=False)
        self.to_out = pax.Conv2D(dim_head * heads, dim, 1)

    def __call__(self, x):
        b, h, w, _ = x.shape
        qkv = self.to_qkv(x).reshape(b, h * w, 3, self.heads, -1)
        q, k, v = jnp.transpose(qkv, (2, 0, 3, 4, 1))
        context = jnp.einsum("bhdn,bhen->bhde", jax.nn.softmax(k, axis=-1), v)
        out = jnp.einsum("bhde,bhdn->bhen", context, q)
        return self.to_out(jnp.transpose(out, (0, 3, 1, 2)).reshape(b, h, w, -1))


class UNet(pax.Module):
    ups: list[list[pax.Module]]
    downs: list[list[pax.Module]]

    def __init__(self, dim, mults=(1, 2), channels=1):
        super().__init__()
        dims = [channels] + [dim * m for m in mults]
        in_out = [(dims[i], dims[i + 1]) for i in range(len(mults))]
        self.time_mlp = pax.Sequential(
            PositionEmbedding(dim), pax.Linear(dim, dim * 2), Mish(), pax.Linear(dim * 2, dim)
        )
        self.downs = []
        self.ups = []
        for i, (dim_in, dim_out) in enumerate(in_out):
            last = i >= len(in_out) - 1
            self.downs.append(
                [
                    ResnetBlock(dim_in, dim_out, time_dim=dim),
                    Residual(PreNorm(dim_out, LinearAttention(dim_out))),
                    pax.Identity() if last else pax.Conv2D(dim_out, dim_out, 3, 2),
                ]
            )
        self.middle = ResnetBlock(dims[-1], dims[-1], time_dim=dim)
        for dim_in, dim_out in reversed(in_out[1:]):
            self.ups.append(
                [
                    ResnetBlock(dim_out * 2, dim_in, time_dim=dim),
                    Residual(PreNorm(dim_in, LinearAttention(dim_in))),
                    pax.Conv2DTranspose(dim_in, dim_in, 4, 2, padding="SAME"),
                ]
            )
        self.final = pax.Sequential(Block(dim, dim), pax.Conv2D(dim, channels, 1))

    def __call__(self, x, time):
        time = self.time_mlp(time)
        skips = []
        for resnet, attention, down in self.downs:
            x = attention(resnet(x, time))
            skips.append(x)
            x = down(x)
        x = self.middle(x, time)
        for resnet, attention, up in self.ups:
            x = jnp.concatenate((x, skips.pop()), axis=-1)
            x = up(attention(resnet(x, time)))
        return self.final(x)


def extract(table, t, rank):
    return jnp.take_along_axis(table, t, axis=-1).reshape((-1,) + (1,) * (rank - 1))


class GaussianDiffusion(pax.Module):
    def __init__(self, denoise_fn, *, image_size, timesteps=8, random_seed=42):
        super().__init__()
        self.image_size = image_size
        self.denoise_fn = denoise_fn
        self.rng_seq = pax.RngSeq(random_seed)
        steps = np.linspace(0, timesteps + 1, timesteps + 1)
        curve = np.cos((steps / (timesteps + 1) + 0.008) / 1.008 * np.pi * 0.5) ** 2
        betas = np.clip(1 - curve[1:] / curve[:-1], 0, 0.999)
        kept = np.cumprod(1.0 - betas)
        self.num_timesteps = int(timesteps)
        self.betas = betas
        self.kept = kept
        self.sqrt_kept = np.sqrt(kept)
        self.sqrt_lost = np.sqrt(1.0 - kept)

    def p_sample(self, x, t, key):
        noise = self.denoise_fn(x, t)
        beta = extract(self.betas, t, x.ndim)
        x = (x - beta / extract(self.sqrt_lost, t, x.ndim) * noise) / jnp.sqrt(1 - beta)
        keep = (t > 0).astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
        return x + keep * jnp.sqrt(beta) * jax.random.normal(key, x.shape)

    @partial(jax.jit, static_argnums=[1, 2])
    def sample(self, batch_size=2, random_seed=42):
        key, key1 = jax.random.split(jax.random.PRNGKey(random_seed))
        image = jax.random.normal(key1, (batch_size, self.image_size, self.image_size, 1))
        steps = jnp.flip(jnp.arange(0, self.num_timesteps, dtype=jnp.int32))

        def loop(image, inputs):
            i, key = inputs
            return self.p_sample(image, jnp.full((batch_size,), i), key), None

        image, _ = pax.scan(loop, image, (steps, jax.random.split(key, self.num_timesteps)))
        return image

    def q_sample(self, x, t, noise=None):
        noise = default(noise, lambda: jax.random.normal(self.rng_seq.next_rng_key(), x.shape))
        lost = extract(self.sqrt_lost, t, x.ndim)
        return extract(self.sqrt_kept, t, x.ndim) * x + lost * noise

    def __call__(self, x):
        key = self.rng_seq.next_rng_key()
        t = jax.random.randint(key, (len(x),), 0, self.num_timesteps, dtype=jnp.int32)
        noise = jax.random.normal(self.rng_seq.next_rng_key(), x.shape, x.dtype)
        return jnp.mean(jnp.abs(noise - self.denoise_fn(self.q_sample(x, t, noise), t)))


def loss_fn(model, inputs):
    model, loss = pax.purecall(model, inputs)
    return loss, (loss, model)


def main():
    pax.seed_rng_key(42)
    diffusion = GaussianDiffusion(UNet(4), image_size=4)
    print(diffusion.denoise_fn.time_mlp.summary())
    update = jax.jit(pax.build_update_fn(loss_fn))
    optimizer = opax.adam(1e-2)(diffusion.parameters())
    for i in range(20):
        images = np.sin(np.random.RandomState(i).randn(4, 4, 4, 1).cumsum(1)).astype(np.float32)
        diffusion, optimizer, loss = update(diffusion, optimizer, images)
        print("loss", i, float(loss))
    images = jax.device_get(diffusion.eval().sample(2))
    print("sample", float(images.mean()), float(images.std()))


if __name__ == "__main__":
    main()
