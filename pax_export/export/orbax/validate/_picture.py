"""A report as a picture: how long each batch took, and how wrong each output is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pax_export._optional import require


def draw(
    path: str | os.PathLike[str],
    title: str,
    latencies: Mapping[str, Sequence[float]],
    errors: Sequence[tuple[str, float, bool]],
) -> None:
    """Writes the picture.

    Args:
        path: the file; its ending says in which format.
        title: stands above.
        latencies: for each of those compared, of each batch, in seconds.
        errors: of each output its name, its largest error, and whether it passes.
    """
    require("matplotlib", "examples", "a picture of a validation")
    # Drawn without pyplot, which keeps state and may want a screen.
    figure = require("matplotlib.figure", "examples", "a picture of a validation").Figure(
        figsize=(10, 4), layout="constrained"
    )
    left, right = figure.subplots(1, 2)
    _latencies(left, latencies)
    _errors(right, errors)
    figure.suptitle(title)
    figure.savefig(os.fspath(path))


def _latencies(axes: Any, latencies: Mapping[str, Sequence[float]]) -> None:
    for name, seconds in latencies.items():
        axes.plot(range(len(seconds)), [1000 * each for each in seconds], marker="o", label=name)
    axes.set(xlabel="batch", ylabel="latency [ms]", ylim=(0, None))
    axes.legend()


def _errors(axes: Any, errors: Sequence[tuple[str, float, bool]]) -> None:
    names = [name for name, _, _ in errors]
    finite = [min(error, 1e30) for _, error, _ in errors]
    colors = ["tab:green" if passes else "tab:red" for _, _, passes in errors]
    axes.barh(names, finite, color=colors)
    axes.set(xlabel="largest error")
    axes.set_xscale("symlog", linthresh=1e-9)
