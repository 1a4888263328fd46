"""State dicts to a file and back, Flattener, pickles."""

import os
import pickle
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax
from pax.experimental import load_weights_from_dict, save_weights_to_dict


class Net(pax.Module):
    def __init__(self):
        super().__init__()
        self.body = {"fc": pax.Linear(2, 4), "norm": pax.BatchNorm1D(4)}
        self.out = pax.Linear(4, 1)

    def __call__(self, x):
        return self.out(jax.nn.relu(self.body["norm"](self.body["fc"](x))))


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    pax.seed_rng_key(1)
    net = Net()
    x = jnp.asarray(np.random.RandomState(3).randn(5, 3, 2), jnp.float32)
    net, _ = net % x
    path = os.path.join(folder, "weights.pickle")
    with open(path, "wb") as f:
        pickle.dump(jax.tree_util.tree_map(np.asarray, net.state_dict()), f)
    with open(path, "rb") as f:
        weights = pickle.load(f)
    print(list(weights), list(weights["body"]["norm"]))
    other = Net().load_state_dict(jax.tree_util.tree_map(jnp.asarray, weights))
    print("sum", 0, float(other.eval()(x).sum()), float(net.eval()(x).sum()))
    assert load_weights_from_dict(other, save_weights_to_dict(net)) == net

    copy = pickle.loads(pickle.dumps(net))
    print("copy", 0, float(copy.eval()(x).sum()), type(copy).__name__)

    optimizer = opax.sgd(0.1, momentum=0.9)(net.parameters())
    flat = pax.experimental.Flattener(model=net, optimizer=optimizer)

    @jax.jit
    def step(flat):
        net, optimizer = flat.model, flat.optimizer
        grads, net = pax.grad(
            lambda net: (jnp.mean((net % x)[1] ** 2), (net % x)[0]), has_aux=True
        )(net)
        net, optimizer = opax.apply_gradients(net, optimizer, grads)
        return flat.update(model=net, optimizer=optimizer)

    for i in range(3):
        flat = step(flat)
        print("loss", i, float(jnp.mean(flat.model.eval()(x) ** 2)))


if __name__ == "__main__":
    main()
