"""LSTM, GRU and VanillaRNN: cells that compute one time step.

A cell is called as ``cell(state, x) -> (state, output)``, the form of a loop body, so it can be
passed to `scan` directly.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from pax_export._foundations.check import checked_float, checked_integer
from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.types import Array, PRNGKey, PyTree
from pax_export.core import Module
from pax_export.nn._arguments import Initializer, key_or_next, repr_method, require_batch_axis
from pax_export.nn._explicit import laid_like, with_whole_channels
from pax_export.nn._linear import Linear


class LSTMState(NamedTuple):
    """The state of an `LSTM`.

    Attributes:
        hidden: ``[batch, hidden_dim]``, which is the output as well.
        cell: ``[batch, hidden_dim]``.

    Example:
        >>> import pax_export as pax
        >>> pax.LSTM(3, 5).initial_state(2).cell.shape
        (2, 5)
    """

    hidden: jax.Array
    cell: jax.Array


class GRUState(NamedTuple):
    """The state of a `GRU`.

    Attributes:
        hidden: ``[batch, hidden_dim]``, which is the output as well.

    Example:
        >>> import pax_export as pax
        >>> pax.GRU(3, 5).initial_state(2).hidden.shape
        (2, 5)
    """

    hidden: jax.Array


class VanillaRNNState(NamedTuple):
    """The state of a `VanillaRNN`.

    Attributes:
        hidden: ``[batch, hidden_dim]``, which is the output as well.

    Example:
        >>> import pax_export as pax
        >>> pax.VanillaRNN(3, 5).initial_state(2).hidden.shape
        (2, 5)
    """

    hidden: jax.Array


S = TypeVar("S", LSTMState, GRUState, VanillaRNNState)


class _Cell(Module, Generic[S]):
    """The base class of the cells: sizes, and checks of the arguments of a step."""

    _state_form: Any = None
    #: The equations, by the name that frameworks have for them.
    recurrence: ClassVar[str] = ""

    def __init__(self, input_dim: int, hidden_dim: int, name: str | None):
        super().__init__(name=name)
        where = type(self).__name__
        self.input_dim = checked_integer(input_dim, f"{where}.input_dim", least=1)
        self.hidden_dim = checked_integer(hidden_dim, f"{where}.hidden_dim", least=1)

    def _make_linear(
        self, parts: int, rng_key: PRNGKey | None, name: str, **options: PyTree
    ) -> Linear:
        """The linear map from concatenated input and hidden state to ``n`` vectors."""
        in_dim = self.input_dim + self.hidden_dim
        return Linear(in_dim, parts * self.hidden_dim, rng_key=rng_key, name=name, **options)

    def __call__(self, state: S, x: Array) -> tuple[S, jax.Array]:
        """Makes one step in time.

        Args:
            state: the state before the step.
            x: ``[batch, input_dim]``, or ``[input_dim]`` of a single example.

        Returns:
            The state after the step, and the output ``[batch, hidden_dim]``; without `batch` for
            a single example.

        Raises:
            InvalidArgumentError: (an AssertionError too) no axis.
            InvalidArgumentTypeError: (a TypeError) not a state of this cell, or another shape.
        """
        raise NotImplementedError

    def initial_state(self, batch_size: int | None = None) -> S:
        """Returns zeros ``[batch_size, hidden_dim]``, or ``[hidden_dim]`` for a single example.

        The size may be symbolic.
        """
        form = self._state_form
        return form(*[self._zero_state(batch_size) for _ in form._fields])

    def _zero_state(self, batch_size: int | None) -> jax.Array:
        if batch_size is None:
            return jnp.zeros((self.hidden_dim,))
        if not jax.export.is_symbolic_dim(batch_size):
            where = f"{type(self).__name__}.initial_state.batch_size"
            batch_size = checked_integer(batch_size, where, least=0)
        return jnp.zeros((batch_size, self.hidden_dim))

    def _check_arguments(self, state: S, x: Array) -> tuple[jax.Array, ...]:
        """The input and the arrays of the state; raises if they do not fit."""
        form = self._state_form
        if not all(hasattr(state, field) for field in form._fields):
            raise InvalidArgumentTypeError(
                f"The first argument of a cell must be its state, {form.__name__}.",
                where=repr(self),
                got=type(state).__name__,
                write="state, y = cell(cell.initial_state(batch_size), x)",
            )
        inputs: jax.Array = with_whole_channels(jnp.asarray(x))
        arrays = [jnp.asarray(getattr(state, field)) for field in form._fields]
        batch = inputs.shape[:-1]
        self._check_shape("input", inputs, (*batch, self.input_dim))
        for field, array in zip(form._fields, arrays):
            self._check_shape(f"{field} state", array, (*batch, self.hidden_dim))
        return inputs, *[laid_like(array, inputs) for array in arrays]

    def _check_shape(self, word: str, array: jax.Array, shape: tuple) -> None:
        require_batch_axis(array, f"[batch, {shape[-1]}], the {word} of a cell", self)
        if array.shape != shape:
            raise InvalidArgumentTypeError(
                f"The {word} of this cell must have shape {shape}.",
                where=repr(self),
                got=f"shape {array.shape}",
                write="x of [batch, input_dim], one step in time, and a state of that batch; "
                "pax.scan(cell, state, xs) for a sequence",
            )

    _repr = repr_method("input_dim", "hidden_dim")


def _lying_as(before: S, state: S) -> S:
    """A state, on Explicit axes lying as the one before it: a scan carries it."""
    fields = state._fields
    return type(state)(*[laid_like(getattr(state, f), getattr(before, f)) for f in fields])


class LSTM(_Cell[LSTMState]):
    """A long short-term memory cell (Hochreiter and Schmidhuber, 1997).

    With ``i, g, f, o`` the four parts of ``fc([x, hidden])``::

        cell'   = sigmoid(f + forget_gate_bias) * cell + sigmoid(i) * tanh(g)
        hidden' = sigmoid(o) * tanh(cell')

    Args:
        input_dim: the size of an input.
        hidden_dim: the size of the state and of the output.
        w_init: ``w_init(key, shape)`` makes the weight of ``fc``; the default
            is that of `Linear`.
        forget_gate_bias: added to ``f``; 1 lets a fresh cell remember (Jozefowicz et al., 2015).
        rng_key: the key of the initial values; the next of the ambient stream by default.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        fc: a `Linear` from ``input_dim + hidden_dim`` to ``4 * hidden_dim``.

    Raises:
        InvalidArgumentError: a size is less than one.
        InvalidArgumentTypeError: a size is not an integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> lstm = pax.LSTM(3, 5)
        >>> xs = jnp.ones((7, 2, 3))  # [time, batch, input_dim]
        >>> state, ys = pax.scan(lstm, lstm.initial_state(2), xs)
        >>> ys.shape
        (7, 2, 5)
    """

    _state_form = LSTMState
    recurrence = "lstm"

    def __init__(
        self,
        input_dim: int,
        hidden_dim: int,
        w_init: Initializer | None = None,
        forget_gate_bias: float = 0.0,
        *,
        rng_key: PRNGKey | None = None,
        name: str | None = None,
    ):
        super().__init__(input_dim, hidden_dim, name)
        self.forget_gate_bias = checked_float(forget_gate_bias, "LSTM.forget_gate_bias")
        self.fc = self._make_linear(4, rng_key, "lstm_fc", w_init=w_init)

    def __call__(self, state: LSTMState, x: Array) -> tuple[LSTMState, jax.Array]:
        x, hidden, cell = self._check_arguments(state, x)
        z = with_whole_channels(self.fc(jnp.concatenate((x, hidden), axis=-1)))
        i, g, f, o = jnp.split(z, 4, axis=-1)
        forget = jax.nn.sigmoid(f + self.forget_gate_bias)
        cell = forget * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return _lying_as(state, LSTMState(hidden, cell)), hidden


class GRU(_Cell[GRUState]):
    """A gated recurrent unit (Cho et al., 2014).

    With ``z, r`` the two parts of ``sigmoid(xh_zr_fc([x, hidden]))``::

        candidate = tanh(xh_h_fc([x, r * hidden]))
        hidden'   = (1 - z) * hidden + z * candidate

    With ``reset_after=True``, as in Keras by default, in torch and in cuDNN, the reset gate follows
    the product::

        candidate = tanh(x_h_fc(x) + r * h_h_fc(hidden))

    Args:
        input_dim: the size of an input.
        hidden_dim: the size of the state and of the output.
        reset_after: whether the reset gate follows the product with the state.
        rng_key: the key of the initial values; the next of the ambient stream by default.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        xh_zr_fc: a `Linear` from ``input_dim + hidden_dim`` to ``2 * hidden_dim``.
        xh_h_fc: a `Linear` from ``input_dim + hidden_dim`` to ``hidden_dim``; with ``reset_after``
            there are two instead, ``x_h_fc`` and ``h_h_fc``.

    Raises:
        InvalidArgumentError: a size is less than one.
        InvalidArgumentTypeError: a size is not an integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> gru = pax.GRU(3, 5)
        >>> state, y = gru(gru.initial_state(2), jnp.ones((2, 3)))
        >>> y.shape
        (2, 5)
    """

    _state_form = GRUState
    recurrence = "gru"

    def __init__(
        self,
        input_dim: int,
        hidden_dim: int,
        *,
        reset_after: bool = False,
        rng_key: PRNGKey | None = None,
        name: str | None = None,
    ):
        super().__init__(input_dim, hidden_dim, name)
        self.reset_after = bool(reset_after)
        zr_key, h_key = jax.random.split(key_or_next(rng_key, "GRU.rng_key"))
        self.xh_zr_fc = self._make_linear(2, zr_key, "xh_to_zr")
        if not self.reset_after:
            self.xh_h_fc = self._make_linear(1, h_key, "xh_to_h")
            return
        x_key, h_key = jax.random.split(h_key)
        self.x_h_fc = Linear(self.input_dim, self.hidden_dim, rng_key=x_key, name="x_to_h")
        self.h_h_fc = Linear(self.hidden_dim, self.hidden_dim, rng_key=h_key, name="h_to_h")

    def __call__(self, state: GRUState, x: Array) -> tuple[GRUState, jax.Array]:
        x, hidden = self._check_arguments(state, x)
        zr = with_whole_channels(self.xh_zr_fc(jnp.concatenate((x, hidden), axis=-1)))
        z, r = jnp.split(jax.nn.sigmoid(zr), 2, axis=-1)
        if self.reset_after:
            of_state = with_whole_channels(self.h_h_fc(hidden))
            candidate = with_whole_channels(self.x_h_fc(x)) + r * of_state
        else:
            candidate = self.xh_h_fc(jnp.concatenate((x, r * hidden), axis=-1))
        candidate = jnp.tanh(with_whole_channels(candidate))
        hidden = (1 - z) * hidden + z * candidate
        return _lying_as(state, GRUState(hidden)), hidden


class VanillaRNN(_Cell[VanillaRNNState]):
    """A simple recurrent cell (Elman, 1990): ``hidden' = tanh(fc([x, hidden]))``.

    Args:
        input_dim: the size of an input.
        hidden_dim: the size of the state and of the output.
        rng_key: the key of the initial values; the next of the ambient stream by default.
        name: shown by ``repr`` and ``summary``.

    Attributes:
        fc: a `Linear` from ``input_dim + hidden_dim`` to ``hidden_dim``.

    Raises:
        InvalidArgumentError: a size is less than one.
        InvalidArgumentTypeError: a size is not an integer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> rnn = pax.VanillaRNN(3, 5)
        >>> state, y = rnn(rnn.initial_state(2), jnp.ones((2, 3)))
        >>> y.shape
        (2, 5)
    """

    _state_form = VanillaRNNState
    recurrence = "rnn"

    def __init__(
        self,
        input_dim: int,
        hidden_dim: int,
        *,
        rng_key: PRNGKey | None = None,
        name: str | None = None,
    ):
        super().__init__(input_dim, hidden_dim, name)
        self.fc = self._make_linear(1, rng_key, "vanilla_rnn_fc")

    def __call__(self, state: VanillaRNNState, x: Array) -> tuple[VanillaRNNState, jax.Array]:
        x, hidden = self._check_arguments(state, x)
        hidden = self.fc(jnp.concatenate((x, hidden), axis=-1))
        hidden = jnp.tanh(with_whole_channels(hidden))
        return _lying_as(state, VanillaRNNState(hidden)), hidden
