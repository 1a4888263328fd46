"""Two networks against each other: weight norm, spectral norm, two optimizers, one jitted step."""

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax


def normalize(x, axis=None, eps=1e-12):
    return x * jax.lax.rsqrt((x * x).sum(axis=axis, keepdims=True) + eps)


class WeightNorm(pax.Module):
    parameters = pax.parameters_method("g")

    def __init__(self, conv):
        super().__init__()
        self.conv = conv
        self.axis = (0, 1, 2) if isinstance(conv, pax.Conv2D) else (0, 1, 3)
        shape = [1, 1, 1, 1]
        shape[3 if isinstance(conv, pax.Conv2D) else 2] = conv.out_features
        self.g = jnp.ones(shape)

    def get_weight(self):
        return self.g * normalize(self.conv.weight, self.axis)

    def __call__(self, x):
        if self.g is None:
            return self.conv(x)
        return self.conv.replace(weight=self.get_weight())(x)

    def remove(self):
        return self.replace(conv=self.conv.replace(weight=self.get_weight()), g=None)


class SpectralNorm(pax.Module):
    def __init__(self, fc: pax.Linear):
        super().__init__()
        self.fc = fc
        self.u = jax.random.normal(pax.next_rng_key(), (1, fc.out_dim))
        self.sigma = jnp.ones(())

    def __call__(self, x):
        weight = self.fc.weight
        sigma = self.sigma
        if self.training:
            v = normalize(self.u @ weight.T)
            u = jax.lax.stop_gradient(normalize(v @ weight))
            sigma = (jax.lax.stop_gradient(v) @ weight @ u.T)[0, 0]
            self.u, self.sigma = u, sigma
        return self.fc.replace(weight=weight / sigma)(x)


class Generator(pax.Module):
    def __init__(self):
        super().__init__()
        self.fc = pax.Linear(3, 4 * 2 * 2)
        self.ups = [
            WeightNorm(pax.Conv2DTranspose(4, 4, 4, 2, padding="SAME")),
            WeightNorm(pax.Conv2DTranspose(4, 1, 3, 2, padding="SAME", with_bias=False)),
        ]
        self.norms = [pax.BatchNorm2D(4), pax.BatchNorm2D(4, False, True, 0.5)]

    def __call__(self, z):
        x = self.fc(z).reshape(-1, 2, 2, 4)
        for norm, up in zip(self.norms, self.ups):
            x = up(jax.nn.leaky_relu(norm(x), 0.1))
        return jnp.tanh(x)


class Critic(pax.Module):
    def __init__(self):
        super().__init__()
        self.conv = WeightNorm(pax.Conv2D(1, 4, 3, 2, feature_group_count=1))
        self.pools = [
            lambda x: x,
            lambda x: pax.avg_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "SAME", -1),
        ]
        self.fcs = [SpectralNorm(pax.Linear(4 * 16, 1)), SpectralNorm(pax.Linear(4 * 4, 1))]

    def __call__(self, x):
        x = jax.nn.leaky_relu(self.conv(x))
        return [fc(pool(x).reshape(len(x), -1)) for pool, fc in zip(self.pools, self.fcs)]


@pax.pure
def critic_loss_fn(critic, inputs):
    real, fake = inputs
    losses = [jnp.mean((1 - r) ** 2) + jnp.mean(f**2) for r, f in zip(critic(real), critic(fake))]
    return sum(losses), critic


def generator_loss_fn(generator, inputs):
    (real, z), critic, optimizer = inputs
    generator, fake = generator % z
    (loss, critic), grads = pax.value_and_grad(critic_loss_fn, has_aux=True)(critic, (real, fake))
    critic, optimizer, critic_loss = jax.lax.stop_gradient(
        (*opax.apply_gradients(critic, optimizer, grads), loss)
    )
    loss = sum(jnp.mean((1 - y) ** 2) for y in critic.eval()(fake))
    return loss, (generator, critic, optimizer, critic_loss)


@jax.jit
def step(nets, optimizers, batch):
    generator, critic = nets
    optim_g, optim_c = optimizers
    (loss, (generator, critic, optim_c, critic_loss)), grads = pax.value_and_grad(
        generator_loss_fn, has_aux=True
    )(generator, (batch, critic, optim_c))
    generator, optim_g = opax.apply_gradients(generator, optim_g, grads)
    return (generator, critic), (optim_g, optim_c), (loss, critic_loss)


def main():
    pax.seed_rng_key(8)
    nets = Generator(), Critic()
    decay = opax.chain(
        opax.scale_by_adam(b1=0.8, b2=0.99),
        opax.add_decayed_weights(1e-2),
        opax.scale_by_schedule(lambda step: 1e-2 * jnp.power(0.99, jnp.floor(step / 5))),
    )
    optimizers = tuple(decay.init(net.parameters()) for net in nets)
    for i in range(20):
        random = np.random.RandomState(i)
        real = np.tanh(random.randn(6, 8, 8, 1).cumsum(1)).astype(np.float32)
        z = random.randn(6, 3).astype(np.float32)
        nets, optimizers, losses = step(nets, optimizers, (real, z))
        print("losses", i, float(losses[0]), float(losses[1]))
    print("rate", float(optimizers[0][-1].learning_rate))
    generator = nets[0].eval()
    bare = generator.replace(ups=[up.remove() for up in generator.ups])
    print("difference", float(jnp.max(jnp.abs(bare(z) - generator(z)))))


if __name__ == "__main__":
    main()
