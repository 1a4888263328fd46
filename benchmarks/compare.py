"""Times candidates in turn, and prints their ratios.

Turn by turn, because a machine's speed drifts: what slows one candidate down
slows the others down too, and the ratios of the medians stay.  Where other
programs take the machine away again and again, the least times are steadier.
The order is another in each round: whoever always came first, or after the same
neighbour, would find other things in the processor's caches than the others.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One candidate's median and least time, and their ratios to those of the first candidate."""

    name: str
    seconds: float
    ratio: float
    least: float
    least_ratio: float


def compare(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 21,
    least: float = 2e-3,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Times functions without arguments.

    Args:
        candidates: by name; the first is the floor that the others are compared with.
        rounds: how often each has its turn.
        least: how many seconds one turn lasts at least; a short function is
            called as often as that takes.  The first call of a turn finds its data
            out of the caches, so turns are long where a user calls again and again.
        clock: gives seconds; `time.process_time` where other programs use the cores, for
            candidates that do not wait by spinning.
    """
    calls = {name: _calls(function, least, clock) for name, function in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    turns, order = list(candidates.items()), random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            order.shuffle(turns)
            for name, function in turns:
                times[name].append(_turn(function, calls[name], clock))
    finally:
        gc.enable()
    return rows_of(times)


def rows_of(times: Mapping[str, list[float]]) -> list[Row]:
    """What candidates took in their turns, beside the first of them."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    leasts = {name: min(each) for name, each in times.items()}
    first = next(iter(times))
    return [
        Row(
            name,
            medians[name],
            medians[name] / medians[first],
            leasts[name],
            leasts[name] / leasts[first],
        )
        for name in times
    ]


def _calls(function: Callable[[], object], least: float, clock: Callable[[], float]) -> int:
    for _ in range(2):  # compiles, fills caches; a second call may go another way than the first
        function()
    once = _turn(function, 1, clock)
    return max(1, round(least / max(once, 1e-9)))


def _turn(function: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        function()
    return (clock() - start) / calls


def table(title: str, rows: list[Row], goal: str = "", pax: str = "") -> str:
    """The rows as a Markdown table.

    Args:
        title: stands above it.
        rows: of the candidates.
        goal: what this project set out to reach.
        pax: what PAX 0.5.9 reached, which the jax of today does not run.
    """
    lines = [f"### {title}", "", "| | median | ratio | least | ratio |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.name} | {_text(row.seconds)} | {row.ratio:.2f} "
        f"| {_text(row.least)} | {row.least_ratio:.2f} |"
        for row in rows
    ]
    notes = [f"Goal: {goal}."] if goal else []
    notes += [f"PAX 0.5.9, on another machine: {pax}."] if pax else []
    return "\n".join([*lines, *([""] if notes else []), " ".join(notes), ""])


def _text(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.1f} µs"
