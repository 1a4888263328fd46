"""Generation defaults of a net."""

from __future__ import annotations

from typing import Any

from pax_export._types import PRNGKey, PyTree
from pax_export.generation.samplers import (
    Sampler,
    greedy,
    min_p,
    repetition_penalty,
    temperature,
    top_k,
    top_p,
)
from pax_export.nets import GenerationDefaults


def _of_net(lm: PyTree) -> GenerationDefaults:
    found = getattr(getattr(lm, "config", None), "generation", None)
    return found if isinstance(found, GenerationDefaults) else GenerationDefaults()


def default_stop(stop: object, lm: PyTree) -> Any:
    """Returns the stop condition; by default that of the net's generation config."""
    return _of_net(lm).stop if stop is None else stop


def default_pad(pad: object, lm: PyTree) -> Any:
    """Returns the pad id; by default that of the net's generation config, or 0."""
    return (_of_net(lm).pad or 0) if pad is None else pad


def default_sampler(sampler: object, lm: PyTree, key: PRNGKey | None = None) -> Any:
    """Returns the sampler; by default that of the net's generation config."""
    if sampler is not None:
        return sampler
    said = _of_net(lm)
    rules: list[Sampler] = []
    if said.repetition_penalty != 1:
        rules.append(repetition_penalty(said.repetition_penalty))
    if said.do_sample and key is not None:
        rules.append(temperature(said.temperature))
        rules += [top_k(said.top_k)] if said.top_k else []
        rules += [top_p(said.top_p)] if said.top_p < 1 else []
        rules += [min_p(said.min_p)] if said.min_p else []
    else:
        rules.append(greedy())
    whole = rules[0]
    for rule in rules[1:]:
        whole = whole | rule
    return whole
