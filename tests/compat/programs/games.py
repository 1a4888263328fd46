"""Reinforcement learning: environments are modules, played in vmap and scan by a policy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax


def select_tree(pred, a, b):
    return jax.tree_util.tree_map(partial(jax.lax.select, pred), a, b)


class Environment(pax.Module):
    def __init__(self):
        super().__init__()

    def reset(self):
        """Start anew."""

    def step(self, action) -> tuple["Environment", jnp.ndarray]:
        raise NotImplementedError()


class WinChecker(pax.Module):
    def __init__(self):
        super().__init__()
        conv = pax.Conv1D(1, 1, 2, padding="VALID")
        weight = jnp.array([1.0, 1.0], dtype=conv.weight.dtype).reshape(conv.weight.shape)
        self.conv = conv.replace(weight=weight)

    def __call__(self, board):
        x = self.conv(board[None, :, None].astype(jnp.float32))
        return (jnp.max(x) == 2) * 1 + (jnp.min(x) == -2) * (-1)


class ConnectTwo(Environment):
    board: jnp.ndarray
    turn: jnp.ndarray

    def __init__(self, size=5):
        super().__init__()
        self.size = size
        self.checker = WinChecker()
        self.reset()

    def reset(self):
        self.board = jnp.zeros((self.size,), dtype=jnp.int32)
        self.turn = jnp.array(1, dtype=jnp.int32)
        self.done = jnp.array(False)

    @pax.pure
    def step(self, action):
        invalid = self.board[action] != 0
        board = self.board.at[action].set(self.turn)
        self.board = select_tree(self.done, self.board, board)
        reward = (self.checker(self.board) * self.turn).astype(jnp.float32)
        self.done = self.done | (reward != 0) | invalid | jnp.all(self.board != 0)
        self.turn = -self.turn
        return self, jnp.where(invalid, -1.0, reward)

    def observation(self):
        return self.board * self.turn


@pax.pure
def reset_env(env):
    env.reset()
    return env


class Policy(pax.Module):
    def __init__(self, size):
        super().__init__()
        self.backbone = pax.Sequential(pax.Linear(size, 16), jax.nn.relu)
        self.action_head = pax.Sequential(pax.Linear(16, 16), jnp.tanh, pax.Linear(16, size))
        self.value_head = pax.Sequential(pax.Linear(16, 16), jnp.tanh, pax.Linear(16, 1), jnp.tanh)

    def __call__(self, x, batched=False):
        x = x.astype(jnp.float32)
        if not batched:
            x = x[None]
        x = self.backbone(x)
        logits, value = self.action_head(x), self.value_head(x)[:, 0]
        return (logits, value) if batched else (logits[0], value[0])


@partial(jax.jit, static_argnums=(3,))
def play(policy, env, key, steps):
    env = reset_env(env)
    env = jax.tree_util.tree_map(lambda x: jnp.stack([x] * 8), env)

    def move(state, key):
        env = state
        seen = jax.vmap(lambda e: e.observation())(env)
        logits, _ = jax.vmap(lambda p, s: p(s), in_axes=(None, 0))(policy, seen)
        action = jax.random.categorical(key, logits)
        done = env.done
        env, reward = jax.vmap(lambda e, a: e.step(a))(env, action)
        return env, (seen, action, reward, done)

    return pax.scan(move, env, jax.random.split(key, steps))


def loss_fn(policy, seen, action, gain, weight):
    logits, value = policy(seen, batched=True)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=-1)[:, 0]
    advantage = jax.lax.stop_gradient(gain - value)
    losses = jnp.square(gain - value) - advantage * chosen
    return jnp.sum(losses * weight) / jnp.sum(weight), policy


@jax.jit
def train_step(policy, optimizer, *data):
    (loss, policy), grads = pax.value_and_grad(loss_fn, has_aux=True)(policy, *data)
    policy, optimizer = opax.apply_gradients(policy, optimizer, grads)
    return policy, optimizer, loss


def returns(reward, done):
    gain, total = np.zeros_like(reward), np.zeros(reward.shape[1])
    for t in reversed(range(len(reward))):
        total = np.where(done[t], 0.0, reward[t] - total)
        gain[t] = total
    return gain


def main():
    pax.seed_rng_key(42)
    env, policy = ConnectTwo(), Policy(5)
    optimizer = opax.chain(
        opax.add_decayed_weights(1e-4), opax.sgd(lambda step: 0.1 * jnp.exp2(-step / 10.0), 0.9)
    ).init(policy.parameters())
    for i in range(20):
        _, (seen, action, reward, done) = play(policy, env, jax.random.PRNGKey(i), 5)
        gain = returns(np.asarray(reward), np.asarray(done))
        flat = [np.asarray(a).reshape(-1, *a.shape[2:]) for a in (seen, action, gain, ~done)]
        policy, optimizer, loss = train_step(policy, optimizer, *flat)
        print("loss", i, float(loss), float(jnp.sum(reward)))
    print("rate", float(optimizer[1][-1].learning_rate))
    env, reward = env.step(2)
    env, reward = env.step(2)
    print(env.board.tolist(), float(reward), bool(env.done))


if __name__ == "__main__":
    main()
