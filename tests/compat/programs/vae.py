"""A variational autoencoder: a stream of keys inside the model, build_update_fn."""

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax


class Encoder(pax.Module):
    def __init__(self, dim, latent):
        super().__init__()
        self.net = pax.Sequential(pax.Linear(dim, 16), pax.BatchNorm1D(16), jax.nn.relu)
        self.mean = pax.Linear(16, latent, w_init=jax.nn.initializers.normal(0.1))
        self.log_std = pax.Linear(16, latent, b_init=jax.nn.initializers.zeros)

    def __call__(self, x):
        x = self.net(x[:, None])[:, 0]
        return self.mean(x), self.log_std(x)


class VAE(pax.Module):
    def __init__(self, dim, latent):
        super().__init__()
        self.encoder = Encoder(dim, latent)
        self.decoder = pax.Sequential(
            pax.Linear(latent, 16), jnp.tanh, pax.Dropout(0.2), pax.Linear(16, dim)
        )
        self.rng_seq = pax.RngSeq()
        self.num_calls = jnp.array(0)

    def __call__(self, x):
        self.num_calls = self.num_calls + 1
        mean, log_std = self.encoder(x)
        noise = jax.random.normal(self.rng_seq.next_rng_key(), mean.shape)
        return self.decoder(mean + jnp.exp(log_std) * noise), mean, log_std

    def sample(self, count):
        key1, key2 = self.rng_seq.next_rng_key(2)
        z = jax.random.normal(key1, (count, self.encoder.mean.out_dim))
        return jax.random.bernoulli(key2, jax.nn.sigmoid(self.decoder(z)))


def loss_fn(model, x):
    model, (logits, mean, log_std) = pax.module_and_value(model)(x)
    likelihood = x * jax.nn.log_sigmoid(logits) + (1 - x) * jax.nn.log_sigmoid(-logits)
    kl = 0.5 * jnp.sum(jnp.exp(2 * log_std) + mean**2 - 1 - 2 * log_std, axis=-1)
    loss = jnp.mean(kl - jnp.sum(likelihood, axis=-1))
    return loss, ((loss, jnp.mean(kl)), model)


def main():
    pax.seed_rng_key(3)
    net = VAE(12, 2)
    print(net.summary())
    optimizer = opax.chain(opax.clip(1.0), opax.adam(3e-2))(net.parameters())
    update = jax.jit(pax.utils.build_update_fn(loss_fn))
    pictures = np.random.RandomState(0).rand(3, 12) > 0.5
    for step in range(25):
        batch = pictures[np.random.RandomState(step).randint(0, 3, 16)].astype(np.float32)
        net, optimizer, (loss, kl) = update(net, optimizer, batch)
        print("step", step, float(loss), float(kl))
    print("calls", int(net.num_calls))
    net, samples = pax.module_and_value(net.eval().sample)(4)
    print(np.asarray(samples, np.int32).tolist())
    print(np.asarray(net.rng_seq.state_dict()["_rng_key"]).tolist())


if __name__ == "__main__":
    main()
