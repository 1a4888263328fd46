"""Frames to samples: dilated and transposed convolutions, a pruned GRU, sampling in a scan."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax


class Upsampling(pax.Module):
    def __init__(self, n_mels, dim):
        super().__init__()
        self.input_conv = pax.Conv1D(n_mels, dim, 3, padding="VALID", with_bias=True)
        dilated = partial(pax.Conv1D, dim, dim, 2, padding="VALID")
        self.dilated = [dilated(rate=1), dilated(rate=2)]
        up = partial(pax.Conv1DTranspose, dim, dim, padding="SAME")
        self.ups = [up(kernel_shape=4, stride=2), up(kernel_shape=2, stride=2, data_format="NWC")]
        self.output_conv = pax.Conv1D(dim, dim, 1, padding="VALID", data_format="NCW")

    def __call__(self, mel):
        x = self.input_conv(mel)
        for rate, conv in zip((1, 2), self.dilated):
            x = x[:, rate:] + jax.nn.relu(conv(x))
        for conv in self.ups:
            x = jax.nn.relu(conv(x))
        x = jnp.swapaxes(self.output_conv(jnp.swapaxes(x, 1, 2)), 1, 2)
        n, _, dim = x.shape
        return jnp.tile(x[:, :, None, :], (1, 1, 2, 1)).reshape(n, -1, dim)


class Pruner(pax.Module):
    def __init__(self, core):
        super().__init__()
        self.masks = [jnp.ones(w.shape, jnp.bool_) for w in self.weights(core)]

    @staticmethod
    def weights(core):
        return [core.xh_zr_fc.weight, core.xh_h_fc.weight]

    def update_mask(self, step, core):
        quantile = jnp.minimum(0.5, step / 20.0)
        self.masks = [jnp.abs(w) >= jnp.quantile(jnp.abs(w), quantile) for w in self.weights(core)]

    def __call__(self, core):
        zr, h = (jnp.where(m, w, 0.0) for m, w in zip(self.masks, self.weights(core)))
        core = core.replace_node(core.xh_zr_fc.weight, zr)
        return core.replace_node(core.xh_h_fc.weight, h)


class WaveGRU(pax.Module):
    def __init__(self, n_mels, dim, bits=4):
        super().__init__()
        self.bits = bits
        self.upsampling = Upsampling(n_mels, dim)
        self.gru = pax.GRU(dim, dim)
        self.logits = pax.Linear(dim, 2**bits)
        self.embed = pax.Embed(2**bits, dim)
        self.pruner = Pruner(self.gru)

    def __call__(self, inputs):
        mel, wave = inputs
        x = self.upsampling(mel)
        state = self.gru.initial_state(x.shape[0])
        x = x + self.embed(wave)
        _, x = pax.scan(self.gru, state, x, time_major=False)
        return self.logits(x)

    def inference(self, mel, rng_key=None):
        if rng_key is None:
            rng_key = pax.next_rng_key()
        x = jnp.array([2 ** (self.bits - 1)], dtype=jnp.int32)

        def loop(prev_state, inputs):
            x, state, rng_key = prev_state
            rng_key, next_rng_key = jax.random.split(rng_key)
            state, x = self.gru(state, self.embed(x) + inputs)
            x = jax.random.categorical(rng_key, self.logits(x)).astype(jnp.int32)
            return (x, state, next_rng_key), x

        start = (x, self.gru.initial_state(1), rng_key)
        _, x = pax.scan(loop, start, self.upsampling(mel), time_major=False)
        return x


def loss_fn(model, inputs):
    mel, wave = inputs
    model, logits = pax.purecall(model, (mel, wave[:, :-1]))
    target = jax.nn.one_hot(wave[:, 1:], num_classes=logits.shape[-1])
    loss = -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * target, axis=-1))
    return loss, (loss, model)


@pax.pure
def update_mask(step, net):
    net.pruner.update_mask(step, net.gru)
    return net


@jax.jit
def prune(step, net):
    net = update_mask(step, net)
    return net.replace(gru=net.pruner(net.gru))


def main():
    pax.seed_rng_key(42)
    net = WaveGRU(3, 8)
    print(net.summary())
    optimizer = opax.chain(opax.clip_by_global_norm(1.0), opax.adam(1e-2)).init(net.parameters())
    update = jax.jit(pax.utils.build_update_fn(loss_fn))
    random = np.random.RandomState(0)
    mel = random.randn(2, 8, 3).astype(np.float32)
    wave = (np.cumsum(random.randint(-1, 2, (2, 25)), axis=1) + 8) % 16
    for step in range(20):
        net, optimizer, loss = update(net, optimizer, (mel, wave))
        print("loss", step, float(loss))
        if step % 5 == 4:
            net = prune(jnp.array(step), net)
            print("zeros", int(jnp.sum(net.gru.xh_h_fc.weight == 0)))
    print(net.eval().inference(mel[:1]).tolist())


if __name__ == "__main__":
    main()
