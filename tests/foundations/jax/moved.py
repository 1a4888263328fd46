"""A jax whose private names have moved: what `test_moved_names.py` runs in a process of its own.

    python -m tests.foundations.jax.moved PROGRAM NAME NAME ...

Every file of jax is read with these names changed, before anything imports it.  So jax
goes on by its own new names, and whoever uses an old one finds nothing there: the day
that jax moves.  PROGRAM is a function below; what it finds is printed as JSON.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import re
import sys
import warnings


class Moved(importlib.abc.MetaPathFinder):
    """Finds jax's own modules, and reads them with other names."""

    def __init__(self, names):
        # Not those of jaxlib's own modules: `guard_lib.global_state()`.
        self.pattern = re.compile(rf"(?<!_lib\.)\b({'|'.join(names)})\b") if names else None

    def find_spec(self, fullname, path=None, target=None):
        if self.pattern is None or fullname.split(".")[0] != "jax":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self.pattern)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name, path, pattern):
        super().__init__(name, path)
        self._pattern = pattern

    def get_code(self, fullname):
        source = self.get_data(self.path).decode()
        other = self._pattern.sub(r"moved_\1", source)
        if other == source:
            return super().get_code(fullname)
        return compile(other, self.path, "exec")


def refused():
    """The class of the error about a module that is changed under a later trace."""
    import jax
    import jax.numpy as jnp

    import pax_export as pax

    @pax.pure
    def change(module):
        jax.jit(lambda x: setattr(module, "steps", x))(jnp.ones(2))
        return module

    try:
        change(pax.Module())
    except ValueError as error:
        return {"refused": type(error).__name__}
    return {"refused": None}


def digits():
    """Trains a net on small images, and exports it."""
    import pathlib
    import tempfile

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import pax_export as pax

    class Eigenvalues(pax.Module):
        def __call__(self, x):
            return jnp.linalg.eigh(x)[0]

    pax.seed_rng_key(0)
    flat = lambda x: x.reshape(x.shape[0], -1)  # noqa: E731
    net = pax.Sequential(flat, pax.Linear(64, 16), jax.nn.relu, pax.Linear(16, 10))
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 64)
    images = random.normal(size=(10, 8, 8, 1)).astype("float32")[labels]

    def loss_fn(net, images, labels):
        net, logits = net % images
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (losses.mean(), net)

    step = jax.jit(pax.build_update_fn(loss_fn))
    optimizer = pax.optim.from_optax(optax.adam(1e-2))(net.parameters())
    losses = []
    for _ in range(20):
        net, optimizer, loss = step(net, optimizer, images, labels)
        losses.append(float(loss))

    net = net.eval()
    with tempfile.TemporaryDirectory() as folder:
        report = pax.export.to_stablehlo(
            net, folder + "/net", pax.export.spec("batch, 8, 8, 1"), vjp_order=1,
            constraints=("batch <= 100",),
        )  # fmt: skip
        loaded = pax.export.load(folder + "/net")
        error = float(np.abs(np.asarray(loaded(images)) - np.asarray(net(images))).max())
        gradient = jax.grad(lambda x: loaded(x).sum())(images)
        expected = jax.grad(lambda x: net(x).sum())(images)
        apart = float(np.abs(np.asarray(gradient - expected)).max())
        # Only rules for no platform in particular say this without LAPACK.
        pax.export.to_stablehlo(Eigenvalues(), folder + "/eigh", pax.export.spec("3, 3"))
        portable = bool([*pathlib.Path(folder, "eigh").glob("*.mlirbc")])
    (signature,) = report.signatures.values()
    return {
        "first": losses[0],
        "last": losses[-1],
        **refused(),
        "error": error,
        "gradient": apart,
        "constraints": list(signature.constraints),
        "eigh": portable,
    }


if __name__ == "__main__":
    program, *arguments = sys.argv[1].split(",")
    sys.meta_path.insert(0, Moved(sys.argv[2:]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = globals()[program](*arguments)
    found["less"] = [str(each.message) for each in caught if "no longer has" in str(each.message)]
    print(json.dumps(found))
