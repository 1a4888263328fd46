"""Equations, forces, and models that optimise or differentiate inside."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from tests.models.registry import between, ints, model, real, weights


def _mlp(seed, *sizes):
    w = weights(seed)
    return [{"w": w(a, b), "b": w(b, scale=0.1)} for a, b in itertools.pairwise(sizes)]


def _run(layers, x):
    for p in layers[:-1]:
        x = jnp.tanh(x @ p["w"] + p["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


@model("jax", between(0, 1, "batch, 2"), differentiable=True)
def pinn():
    """A network as the solution of Burgers' equation, and how far it is from one."""

    def apply(params, points):
        u = lambda t, x: _run(params, jnp.stack([t, x]))[0]  # noqa: E731

        def residual(point):
            t, x = point
            u_t = jax.grad(u, 0)(t, x)
            u_x = jax.grad(u, 1)(t, x)
            u_xx = jax.grad(jax.grad(u, 1), 1)(t, x)
            return u(t, x), u_t + u(t, x) * u_x - 0.01 * u_xx

        return jax.vmap(residual)(points)

    return _mlp(1, 2, 12, 12, 1), apply


@model("jax", real("batch, 5, 3", scale=2.0), differentiable=True)
def forces():
    """Energies of atoms, pair by pair, and forces by `grad`."""
    params = {"net": _mlp(2, 4, 8, 1), "depth": jnp.float32(0.5)}

    def energy(p, atoms):
        apart = atoms[:, None] - atoms[None]
        size = jnp.sqrt((apart**2).sum(-1) + jnp.eye(5))
        seen = jnp.exp(-((size[..., None] - jnp.arange(1.0, 5.0)) ** 2))
        pair = _run(p["net"], seen)[..., 0] + p["depth"] * (1.0 / size**2)
        return jnp.sum(jnp.where(jnp.eye(5, dtype=bool), 0.0, pair)) / 2

    def apply(p, atoms):
        value, slope = jax.vmap(jax.value_and_grad(energy, 1), (None, 0))(p, atoms)
        return {"energy": value, "forces": -slope}

    return params, apply


@model("jax", real("count, 3", scale=2.0), ints(3, "count"), between(5, 6, "3"), odd=())
def lennard_jones():
    """Any number of atoms in a box whose sides meet, with kinds and a cut-off."""
    w = weights(3)

    def energy(p, atoms, kinds, box):
        apart = atoms[:, None] - atoms[None]
        apart = apart - box * jnp.round(apart / box)
        same = jnp.eye(atoms.shape[0], dtype=bool)
        square = jnp.where(same, 1.0, (apart**2).sum(-1) + 0.5)
        six = (p["sigma"][kinds[:, None], kinds[None]] ** 2 / square) ** 3
        pair = jnp.where(same | (square > 6.25), 0.0, 4 * (six**2 - six))
        return pair.sum() / 2

    def apply(p, atoms, kinds, box):
        value, slope = jax.value_and_grad(energy, 1)(p, atoms, kinds, box)
        return value, -slope

    sigma = 0.8 + 0.05 * jnp.abs(w(3, 3))
    return {"sigma": (sigma + sigma.T) / 2}, apply


@model("jax", "batch, 3", differentiable=True)
def neural_ode():
    """Runge and Kutta's method of fourth order, twelve steps."""

    def apply(params, x):
        f = lambda x: _run(params, x)  # noqa: E731
        h = 1 / 12

        def step(x, _):
            a = f(x)
            b = f(x + h / 2 * a)
            c = f(x + h / 2 * b)
            d = f(x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
            return x, x

        last, path = lax.scan(step, x, None, length=12)
        return last, path.swapaxes(0, 1)

    return _mlp(4, 3, 12, 3), apply


@model("jax", between(0.5, 2, "batch, 2"))
def adaptive_ode():
    """Hunters and hunted, in steps as long as the error allows: a while loop for each row."""
    params = {"rates": jnp.array([1.1, 0.4, 0.1, 0.4])}

    def field(p, y):
        a, b, c, d = p["rates"]
        return jnp.stack([a * y[0] - b * y[0] * y[1], c * y[0] * y[1] - d * y[1]])

    def one(p, y):
        def going(state):
            return state[0] < 2.0

        def step(state):
            t, y, h = state
            h = jnp.minimum(h, 2.0 - t)
            k1 = field(p, y)
            k2 = field(p, y + h * k1)
            k3 = field(p, y + h * (k1 + k2) / 4)
            better = y + h * (k1 + k2 + 4 * k3) / 6
            error = jnp.max(jnp.abs(better - (y + h * (k1 + k2) / 2))) / 1e-3
            fine = error <= 1.0
            grow = jnp.clip(0.9 * jnp.maximum(error, 1e-6) ** (-1 / 3), 0.2, 3.0)
            return jnp.where(fine, t + h, t), jnp.where(fine, better, y), h * grow

        return lax.while_loop(going, step, (jnp.float32(0), y, jnp.float32(0.1)))[1]

    return params, lambda p, y: jax.vmap(lambda row: one(p, row))(y)


@model("jax", between(0.5, 2, "batch, 2"), rtol=1e-3)
def odeint():
    """The same by jax's own solver."""
    from jax.experimental.ode import odeint as solve

    def apply(p, y):
        field = lambda y, t: jnp.stack([y[1], -p["spring"] * y[0] - 0.1 * y[1]])  # noqa: E731
        times = jnp.linspace(0.0, 2.0, 5)
        return jax.vmap(lambda row: solve(field, row, times))(y)

    return {"spring": jnp.float32(2.0)}, apply


@model("jax", "batch, 8, 8", differentiable=True)
def poisson():
    """An equation on a grid whose sides meet, in two transforms of two dimensions."""

    def apply(p, f):
        k = jnp.fft.fftfreq(8) * 2 * jnp.pi
        square = k[:, None] ** 2 + k[None] ** 2
        lines = jnp.fft.fft2(f)
        solved = jnp.where(square > 0, lines / jnp.where(square > 0, square, 1.0), 0.0)
        return p["gain"] * jnp.real(jnp.fft.ifft2(solved))

    return {"gain": jnp.float32(1.5)}, apply


@model("jax", "batch, 12, 12", differentiable=True)
def fourier_operator():
    """A neural operator: few waves are mixed, the rest goes by."""
    w = weights(5)
    params = {
        "lift": w(1, 4), "re": w(4, 4, 4, 4, scale=0.2), "im": w(4, 4, 4, 4, scale=0.2),
        "by": w(4, 4), "out": w(4, 1),
    }  # fmt: skip

    def apply(p, x):
        x = x[..., None] @ p["lift"]
        lines = jnp.fft.rfft2(x, axes=(1, 2))
        mixed = jnp.einsum("bxyi,xyio->bxyo", lines[:, :4, :4], lax.complex(p["re"], p["im"]))
        lines = jnp.zeros_like(lines).at[:, :4, :4].set(mixed)
        x = jax.nn.gelu(jnp.fft.irfft2(lines, (12, 12), axes=(1, 2)) + x @ p["by"])
        return (x @ p["out"])[..., 0]

    return params, apply


@model("jax", "batch, height, width", differentiable=True)
def heat_equation():
    """A stencil over a grid of any size, twenty times."""

    def apply(p, u):
        def step(_, u):
            wide = jnp.pad(u, ((0, 0), (1, 1), (1, 1)), mode="edge")
            around = wide[:, 2:, 1:-1] + wide[:, :-2, 1:-1] + wide[:, 1:-1, 2:] + wide[:, 1:-1, :-2]
            return u + p["rate"] * (around - 4 * u)

        return lax.fori_loop(0, 20, step, u)

    return {"rate": jnp.float32(0.2)}, apply


@model("jax", "batch, 6", differentiable=True)
def deep_equilibrium():
    """A layer that is repeated until nothing moves, with the gradient of the fixed point."""
    w = weights(6)

    def layer(p, x, z):
        return jnp.tanh(z @ p["w"] * 0.4 + x)

    @jax.custom_vjp
    def solve(p, x):
        def going(state):
            old, new, i = state
            return (jnp.max(jnp.abs(new - old)) > 1e-6) & (i < 60)

        step = lambda s: (s[1], layer(p, x, s[1]), s[2] + 1)  # noqa: E731
        return lax.while_loop(going, step, (x, layer(p, x, x), 0))[1]

    def forward(p, x):
        z = solve(p, x)
        return z, (p, x, z)

    def backward(saved, slope):
        p, x, z = saved
        _, vjp = jax.vjp(lambda z: layer(p, x, z), z)
        u = lax.fori_loop(0, 40, lambda _, u: slope + vjp(u)[0], slope)
        return jax.vjp(lambda p, x: layer(p, x, z), p, x)[1](u)

    solve.defvjp(forward, backward)
    return {"w": w(6, 6)}, solve


@model("jax", "batch, 2", "batch, 2", differentiable=True, rtol=1e-3)
def lagrangian_network():
    """Accelerations out of a learned energy: a Hessian, and a system to solve."""

    def lagrangian(p, q, v):
        return 0.5 * v @ v + 0.1 * _run(p, jnp.concatenate([q, v]))[0]

    def apply(p, q, v):
        def one(q, v):
            slope = jax.grad(lagrangian, 1)(p, q, v)
            mass = jax.hessian(lagrangian, 2)(p, q, v)
            turn = jax.jacfwd(jax.grad(lagrangian, 2), 1)(p, q, v)
            return jnp.linalg.solve(mass, slope - turn @ v)

        return jax.vmap(one)(q, v)

    return _mlp(7, 4, 8, 1), apply


@model("jax", "batch, 3, 3", odd=("empty",), sizes=[{"batch": 40}, {"batch": 9}, {"batch": 3}])
def modes():
    """Eigenvalues and singular values of one symmetric matrix, both in their order."""

    def apply(p, x):
        x = (x + jnp.swapaxes(x, 1, 2)) * p["scale"]
        singular = jnp.linalg.svd(x, compute_uv=True)[1]
        return {"eigen": jnp.linalg.eigh(x)[0], "singular": singular}

    return {"scale": jnp.float32(0.5)}, apply


@model("jax", "batch, 4, 4", odd=("empty",))
def linear_algebra():
    """Inverse, determinant, a factorisation and an exponential, of each matrix."""

    def apply(p, x):
        x = x + p["shift"] * jnp.eye(4)
        q, r = jnp.linalg.qr(x)
        return {
            "inverse": jnp.linalg.inv(x),
            "det": jnp.linalg.det(x),
            "again": q @ r,
            "exponential": jax.vmap(jax.scipy.linalg.expm)(0.2 * x),
            "rank": jnp.abs(jnp.diagonal(r, axis1=1, axis2=2)),
        }

    return {"shift": jnp.float32(4.0)}, apply


@model("jax", between(-1, 1, "batch, 3"), between(0.5, 1, "batch, 4"))
def quadratic_program():
    """The best control under limits: projected steps of descent inside of the model."""
    w = weights(8)
    basis = w(4, 4)
    params = {"h": basis @ basis.T + jnp.eye(4), "f": w(3, 4)}

    def apply(p, state, limit):
        slope = lambda u: u @ p["h"] + state @ p["f"]  # noqa: E731
        rate = 1.0 / jnp.trace(p["h"])
        step = lambda _, u: jnp.clip(u - rate * slope(u), -limit, limit)  # noqa: E731
        return lax.fori_loop(0, 50, step, jnp.zeros_like(limit))

    return params, apply


@model("jax", "batch, 5, 2", "batch, 5")
def adapts_to_the_task():
    """Meta-learning: three steps of gradient descent on the examples of a call."""

    def loss(p, x, y):
        return jnp.mean((_run(p, x)[..., 0] - y) ** 2)

    def apply(params, x, y):
        def one(x, y):
            p = params
            for _ in range(3):
                p = jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p, x, y))
            return _run(p, x)[..., 0], loss(p, x, y)

        return jax.vmap(one)(x, y)

    return _mlp(9, 2, 8, 1), apply


@model("jax", ints(2, "batch, 6, 6"), ints(2**31, "2", "uint32"), odd=("empty",))
def ising():
    """Spins on a board: half of them at a time are drawn anew."""

    def apply(p, spins, key):
        board = (jnp.arange(6)[:, None] + jnp.arange(6)) % 2 == 0
        spins = 2 * spins - 1

        def step(carry, key):
            around = sum(jnp.roll(carry, s, axis=a) for s in (1, -1) for a in (1, 2))
            up = jax.nn.sigmoid(2 * p["cold"] * around)
            drawn = jnp.where(jax.random.uniform(key, up.shape) < up, 1, -1)
            return jnp.where(board, drawn, carry), carry.sum((1, 2))

        keys = jax.random.split(jax.random.wrap_key_data(key), 4)
        spins, sums = lax.scan(step, spins, keys)
        return spins, sums.T

    return {"cold": jnp.float32(0.4)}, apply


@model("equinox", "batch, 2", differentiable=True)
def hamiltonian_network():
    """Steps that keep the energy: half a kick, a drift, half a kick."""
    import equinox as eqx

    arrays, rest = eqx.partition(
        eqx.nn.MLP(1, "scalar", 8, 2, activation=jnp.tanh, key=jax.random.key(1)), eqx.is_array
    )

    def apply(arrays, state):
        potential = eqx.combine(arrays, rest)

        def one(state):
            q, v = state[:1], state[1:]
            for _ in range(4):
                v = v - 0.05 * jax.grad(potential)(q)
                q = q + 0.1 * v
                v = v - 0.05 * jax.grad(potential)(q)
            return jnp.concatenate([q, v])

        return jax.vmap(one)(state)

    return arrays, apply
