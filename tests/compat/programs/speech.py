"""Text to frames: convolutions, GRUs in both directions, attention inside a scan, a state kept."""

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax


def conv_block(in_ft, out_ft, activation, use_dropout):
    return pax.Sequential(
        pax.Conv1D(in_ft, out_ft, 3, padding="SAME", with_bias=False),
        pax.BatchNorm1D(out_ft, True, True, 0.99),
        activation if activation is not None else pax.Identity(),
        pax.Dropout(0.5) if use_dropout else pax.Identity(),
        name="conv_block",
    )


class Speaker(pax.Module):
    parameters = pax.parameters_method("score_weight score_norm", "score_bias")

    def __init__(self, mel_dim, text_dim=8, attn_dim=4):
        super().__init__()
        self.mel_dim, self.text_dim = mel_dim, text_dim
        self.embed = pax.Embed(16, text_dim)
        self.encoder = [conv_block(text_dim, text_dim, jax.nn.relu, True)]
        self.forward, self.backward = pax.GRU(text_dim, 4), pax.GRU(text_dim, 4)
        self.prenet_rng = pax.RngSeq()
        self.prenet = pax.Linear(mel_dim, text_dim)
        self.attn_rnn = pax.LSTM(2 * text_dim, text_dim, forget_gate_bias=1.0)
        self.attn_rng = pax.RngSeq()
        self.key_fc = pax.Linear(text_dim, attn_dim)
        self.query_fc = pax.Linear(text_dim, attn_dim, with_bias=False)
        self.score_weight = jax.random.normal(pax.next_rng_key(), [attn_dim])
        self.score_norm = jnp.array(1.0 / jnp.sqrt(attn_dim))
        self.score_bias = jnp.array(0.5)
        self.attn_log = jnp.zeros((1,))
        self.decoder = pax.LSTM(text_dim, text_dim)
        self.output = pax.Linear(text_dim, mel_dim + 1)
        self.post_net = conv_block(mel_dim, mel_dim, None, False)

    def encode(self, text):
        n = len(text)
        mask = (text != 0)[..., None]
        x = self.embed(text)
        for block in self.encoder:
            x = block(x * mask)
        _, ahead = pax.scan(self.forward, self.forward.initial_state(n), x, time_major=False)
        start = self.backward.initial_state(n)

        def core(prev, inputs):
            x, reset = inputs
            state, _ = self.backward(prev, x)
            state = jax.tree_util.tree_map(lambda a, b: jnp.where(reset, a, b), start, state)
            return state, state.hidden

        flipped = (jnp.flip(x, axis=1), jnp.flip(~mask, axis=1))
        _, back = pax.scan(core, start, flipped, time_major=False)
        return jnp.concatenate((ahead, jnp.flip(back, axis=1)), axis=-1) * mask

    def zoneout(self, core, key, rate=0.1):
        def step(state, x):
            new, _ = core(state, x)
            keep = jax.random.bernoulli(key, rate, state.hidden.shape)
            hidden = jnp.where(keep, state.hidden, new.hidden)
            return pax.LSTMState(hidden, new.cell), hidden

        return step

    def decode(self, mel, text):
        keys = self.key_fc(text)

        def loop(states, inputs):
            (rnn, context, place), decoder = states
            x, attn_key, zone_key = inputs
            rnn, out = self.attn_rnn(rnn, jnp.concatenate((x, context), axis=-1))
            query = self.query_fc(jax.nn.relu(out + context))
            score = jnp.tanh(query[:, None, :] + keys) @ self.score_weight
            score = score * self.score_norm / jnp.linalg.norm(self.score_weight)
            noise = jax.random.normal(attn_key[0], score.shape)
            stay = jax.nn.sigmoid(score + self.score_bias + noise)
            moved = jnp.pad(((1 - stay) * place)[:, :-1], ((0, 0), (1, 0)))
            place = stay * place + moved
            context = jnp.einsum("nl,nld->nd", place, text)
            x = jax.nn.relu(out + context)
            decoder, y = self.zoneout(self.decoder, zone_key[0])(decoder, x)
            return ((rnn, context, place), decoder), (jax.nn.relu(x + y), place[0])

        n, length, dim = text.shape
        place = jax.nn.one_hot(jnp.zeros((n,), dtype=jnp.int32), num_classes=length)
        attention = (self.attn_rnn.initial_state(n), jnp.zeros((n, dim)), place)
        states = (attention, self.decoder.initial_state(n))
        attn_keys = jnp.stack(self.attn_rng.next_rng_key(mel.shape[1]))[None]
        zone_keys = jnp.stack(self.attn_rng.next_rng_key(mel.shape[1]))[None]
        _, (x, log) = pax.scan(loop, states, (mel, attn_keys, zone_keys), time_major=False)
        self.attn_log = log
        x = self.output(x)
        return x[..., :-1], x[..., -1]

    def __call__(self, mel, text):
        text = self.encode(text)
        x = jax.nn.relu(self.prenet(mel))
        x = pax.dropout(self.prenet_rng.next_rng_key(), 0.5, x)
        mel, end = self.decode(x, text)
        return mel, mel + self.post_net(mel), end


def loss_fn(net, batch):
    text, mel = batch
    start = jnp.zeros_like(mel[:, :1])
    net, (first, second, end) = pax.purecall(net, jnp.concatenate((start, mel[:, :-1]), 1), text)
    loss = (jnp.mean(jnp.abs(first - mel)) + jnp.mean(jnp.abs(second - mel))) / 2
    return loss + 1e-2 * jnp.mean(jnp.square(end)), net


@jax.jit
def train_step(net, optim, batch):
    (loss, net), grads = pax.value_and_grad(loss_fn, has_aux=True)(net, batch)
    net, optim = opax.apply_gradients(net, optim, grads)
    return net, optim, loss


def main():
    pax.seed_rng_key(4)
    net = Speaker(3)
    optim = opax.chain(opax.clip_by_global_norm(1.0), opax.scale_by_adam(), opax.scale(1e-2))
    optim = optim.init(net.parameters())
    random = np.random.RandomState(0)
    text = random.randint(0, 16, (4, 6))
    text[0, 4:] = 0
    mel = np.sin(random.randn(4, 8, 3).cumsum(1)).astype(np.float32)
    net = net.replace(attn_log=jnp.zeros((6, 8)))
    for i in range(20):
        net, optim, loss = train_step(net, optim, (text, mel))
        print("loss", i, float(loss))
    print("attention", float(net.attn_log[-1] @ jnp.arange(8.0)))
    print("eval", float(jax.jit(loss_fn)(net.eval(), (text, mel))[0]))


if __name__ == "__main__":
    main()
