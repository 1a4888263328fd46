"""Modules for loops, branches and functions with derivatives of their own.

In Python they are Python's own loops, which autograd follows; for `torch.export` they are its
operators of higher order.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleMethodOverride=false
# torch is not among the packages of the tests.
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch


def _is_exporting() -> bool:
    return torch.compiler.is_exporting() or torch.compiler.is_compiling()


def _fresh(arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies: states of torch's loops are no aliases, and lie in memory alike."""
    return [each.clone(memory_format=torch.contiguous_format) for each in arrays]


def _dense(body: torch.nn.Module, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results of a body as copies: torch takes no slices, which some sizes make of them."""
    return tuple(_fresh(body(*operands)))


def _as_float(array: torch.Tensor) -> torch.Tensor:
    """An integer as a float that has it exactly: autograd of torch's `scan` refuses the others."""
    if array.is_floating_point():
        return array
    is_wide = array.dtype == torch.int64
    return array.view(torch.float64) if is_wide else array.to(torch.float64)


def _like(array: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The number that a float of `_as_float` has."""
    return array.view(dtype) if dtype == torch.int64 else array.to(dtype)


class Branch(torch.nn.Module):
    """One of two bodies, the second where the condition holds."""

    def __init__(self, otherwise: torch.nn.Module, then: torch.nn.Module):
        super().__init__()
        self.then, self.otherwise = then, otherwise

    def forward(self, which: torch.Tensor, *operands: torch.Tensor) -> Any:
        if _is_exporting():
            then, otherwise = (partial(_dense, each) for each in (self.then, self.otherwise))
            return torch.cond(which, then, otherwise, operands)
        return (self.then if bool(which) else self.otherwise)(*operands)


class While(torch.nn.Module):
    """A body, again and again while the condition holds; `count` arrays are the state."""

    def __init__(self, going: torch.nn.Module, step: torch.nn.Module, count: int):
        super().__init__()
        self.going, self.step, self.count = going, step, count

    def forward(self, *operands: torch.Tensor) -> Any:
        state, consts = tuple(operands[: self.count]), tuple(operands[self.count :])
        if _is_exporting():
            loop = torch.ops.higher_order.while_loop

            def is_going(*values: torch.Tensor) -> Any:
                return self.going(*values)[0]

            return tuple(loop(is_going, partial(_dense, self.step), tuple(_fresh(state)), consts))
        while bool(self.going(*state, *consts)[0]):
            state = self.step(*state, *consts)
        return state


class RowLoop(torch.nn.Module):
    """A body over rows: `count` arrays are the state, `rows` are given row by row."""

    def __init__(self, step: torch.nn.Module, count: int, rows: int, reverse: bool, trains: bool):
        super().__init__()
        self.step, self.count, self.rows, self.reverse = step, count, rows, reverse
        self.trains = trains

    def forward(
        self, length: int | torch.SymInt, empty: Sequence[torch.Tensor], *operands: torch.Tensor
    ) -> Any:
        end = self.count + self.rows
        state, rows = tuple(operands[: self.count]), operands[self.count : end]
        consts = operands[end:]
        if _is_exporting() and not isinstance(length, int):
            return self._loop(length, empty, state, rows, consts)
        output_rows: list[Sequence[torch.Tensor]] = []
        for index in reversed(range(length)) if self.reverse else range(length):
            found = self.step(*state, *(each[index] for each in rows), *consts)
            state, outputs = found[: self.count], found[self.count :]
            output_rows.append(outputs)
        if self.reverse:
            output_rows.reverse()
        if not output_rows:
            return (*state, *empty)
        return (*state, *(torch.stack(each) for each in zip(*output_rows)))

    def _loop(
        self,
        length: int | torch.SymInt,
        empty: Sequence[torch.Tensor],
        state: Sequence[torch.Tensor],
        rows: Sequence[torch.Tensor],
        consts: Sequence[torch.Tensor],
    ) -> Any:
        """The loop as an operator of torch, for any number of rows."""
        turned = [each.flip(0) if self.reverse else each.clone() for each in rows]
        some = turned or [torch.zeros((length,), dtype=torch.int64)]  # torch counts by rows
        kinds = [each.dtype for each in (*state, *empty)]

        def step_rows(*operands: torch.Tensor) -> Any:
            now, pieces = operands[: self.count], operands[self.count : self.count + len(rows)]
            rest = operands[self.count + len(some) :]
            return packed(self.step(*unpacked(now), *pieces, *rest))

        def packed(arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return _fresh([_as_float(each) for each in arrays] if self.trains else arrays)

        def unpacked(arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return list(map(_like, arrays, kinds)) if self.trains else list(arrays)

        found = torch.ops.higher_order.scan(step_rows, packed(state), some, tuple(consts))
        last, stacked = found[: self.count], found[self.count :]
        if self.trains:
            last, stacked = unpacked(last), list(map(_like, stacked, kinds[self.count :]))
        stacked = [each.flip(0) for each in stacked] if self.reverse else stacked
        return (*last, *stacked)


class OwnGradient(torch.nn.Module):
    """A function whose derivative is a function of its own, as `jax.custom_vjp` has it."""

    def __init__(
        self, primal: torch.nn.Module, backward: torch.nn.Module, floats: Sequence[int], count: int
    ):
        super().__init__()
        self.primal, self.pull_back = primal, backward
        self.floats, self.count = tuple(floats), count

    def forward(self, *operands: torch.Tensor) -> Any:
        return _GradientFunction.apply(self, *operands)


class _GradientFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: OwnGradient, *operands: torch.Tensor) -> Any:
        ctx.rule = rule
        ctx.save_for_backward(*operands)
        return tuple(each.clone() for each in rule.primal(*operands))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        rule, operands = ctx.rule, ctx.saved_tensors
        primals, sizes = operands[: rule.count], operands[rule.count :]
        found = dict(zip(rule.floats, rule.pull_back(*primals, *cotangents, *sizes)))
        return (None, *(found.get(index) for index in range(len(operands))))


def clip_between(
    x: torch.Tensor, ends: tuple[float | None, float | None], outer: tuple[Any, Any]
) -> torch.Tensor:
    """Numbers between ends, in one call; the slope is 1 between these and a half to the outer ones.

    A number of each pair may be None, and both outer ones are without halves.
    """
    return _Clip.apply(x, ends, outer) if torch.is_grad_enabled() else torch.clamp(x, *ends)


class _Clip(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, ends: Any, outer: Any) -> torch.Tensor:
        return torch.clamp(x, *ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, ctx.ends, ctx.outer = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        return _Clip.jvp(ctx, slope), None, None

    @staticmethod
    def jvp(ctx: Any, slope: torch.Tensor, *_: None) -> torch.Tensor:
        (x,), (low, high), (under, above) = ctx.saved_tensors, ctx.ends, ctx.outer
        x = torch.nan_to_num(x, math.inf if low is None else -math.inf, math.inf, -math.inf)
        inner = _slope_between(x, low, high, slope)
        if under is above is None:
            return inner
        halves = inner.add_(_slope_between(x, under, above, slope)).mul_(0.5)
        return halves.add_(slope, alpha=0)  # elsewhere times 0, as in jax: NaN stays


def _slope_between(
    x: torch.Tensor, low: float | None, high: float | None, slope: torch.Tensor
) -> torch.Tensor:
    """The slope where a number is between the ends, and 0 elsewhere."""
    if high is None:
        return torch.ops.aten.threshold_backward(slope, x, low)
    if low is None:
        return torch.where(x < high, slope, 0)
    return torch.ops.aten.hardtanh_backward(slope, x, low, high)
