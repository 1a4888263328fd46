"""Files that were renamed, shuffled, cut and mixed: adopted right, or refused, and never wrong.

The nets, what torch, Keras and flax write of them, and what they compute come from
`tests.weights.adoption.foreign`, which knows nothing of how a file is read.  What a module computes
after `adopt` is compared with that.

Some changes make a file lie: two arrays of one shape under each other's names are a good file of
another net, and no name tells.  Those get the reference; so do some of the others, at random.
"""

from __future__ import annotations

import collections
import functools
import random as chance
import re

import jax
import numpy as np

import pax_export as pax
from tests.closeness import is_close
from tests.hard.size import runs
from tests.weights.adoption.foreign import CASES, LAYOUTS, OTHERS, attentive

_ROLE = re.compile(r"[./]([A-Za-z_0-9]+)$")


def as_it_is(file, draw):
    return file


def shuffled(file, draw):
    """Another order in the file."""
    return dict(draw.sample(list(file.items()), len(file)))


def prefixed(file, draw):
    prefix = draw.choice(["model.", "module.", "net.core.", "student/x/"])
    return {prefix + n: a for n, a in file.items()}


def joined_otherwise(file, draw):
    """Slashes for dots, or dots for slashes."""
    return {n.replace(".", "/") if "." in n else n.replace("/", "."): a for n, a in file.items()}


def counted_from_one(file, draw):
    return {
        re.sub(r"(?<=[._])(\d+)(?=[./])", lambda m: str(int(m[1]) + 1), n): a
        for n, a in file.items()
    }


def with_gaps(file, draw):
    return {
        re.sub(r"(?<=[._])(\d+)(?=[./])", lambda m: str(3 * int(m[1]) + 2), n): a
        for n, a in file.items()
    }


def _layers_of(file):
    return list(dict.fromkeys(_ROLE.sub("", n) for n in file))


def _with_layers(file, new):
    found = {}
    for name, array in file.items():
        layer = _ROLE.sub("", name)
        found[new[layer] + name[len(layer) :]] = array
    return found


def layers_opaque(file, draw):
    """Each layer has a name that says nothing."""
    layers = _layers_of(file)
    words = [f"{draw.choice('xyz')}{draw.choice('aeu')}{draw.choice('rt')}{n}" for n in
             draw.sample(range(900), len(layers))]  # fmt: skip
    return _with_layers(file, dict(zip(layers, words)))


def layers_counted_wildly(file, draw):
    """Each layer has a number that says nothing."""
    layers = _layers_of(file)
    numbers = draw.sample(range(len(layers)), len(layers))
    word = draw.choice(["tensor", "var", "p", "node"])
    return _with_layers(file, dict(zip(layers, [f"{word}_{n}" for n in numbers])))


def arrays_opaque(file, draw):
    """Each array has a name that says nothing."""
    numbers = draw.sample(range(900), len(file))
    word = draw.choice(["tensor_", "arr_", "t", ""])
    return {f"{word}{n}": a for n, a in zip(numbers, file.values())}


def one_dropped(file, draw):
    gone = draw.choice(list(file))
    return {n: a for n, a in file.items() if n != gone}


def layer_dropped(file, draw):
    gone = draw.choice(_layers_of(file))
    return {n: a for n, a in file.items() if _ROLE.sub("", n) != gone}


def layer_doubled(file, draw):
    twice = draw.choice(_layers_of(file))
    more = {twice + draw.choice(["_copy", "9", ".ema"]) + n[len(twice):]: a.copy()
            for n, a in file.items() if _ROLE.sub("", n) == twice}  # fmt: skip
    return {**file, **more}


def dropped_and_doubled(file, draw):
    """One layer instead of another: as many arrays of every shape as before, where they agree."""
    layers = _layers_of(file)
    gone, twice = draw.sample(layers, 2) if len(layers) > 1 else layers * 2
    kept = {n: a for n, a in file.items() if _ROLE.sub("", n) != gone}
    new = draw.choice([f"{twice}_copy", f"other.{twice}", re.sub(r"\d+", "9", twice) + "9"])
    more = {new + n[len(twice):]: a.copy()
            for n, a in file.items() if _ROLE.sub("", n) == twice}  # fmt: skip
    return {**kept, **more}


def off_by_one(file, draw):
    name = draw.choice([n for n, a in file.items() if a.ndim])
    array, axis = file[name], draw.randrange(file[name].ndim)
    more = np.concatenate([array, np.take(array, [0], axis)], axis)
    return {**file, name: more}


def another(file, draw):
    """A second net, beside the first."""
    return {**{f"student.{n}": a for n, a in file.items()},
            **{f"teacher.{n}": a + 1 for n, a in file.items()}}  # fmt: skip


def averages_beside(file, draw):
    return {**file, **{f"ema.{n}": a * 2 for n, a in file.items()}}


# These make a file lie.


def exchanged(file, draw):
    """Two arrays of one shape under each other's names."""
    by_shape = collections.defaultdict(list)
    for name, array in file.items():
        by_shape[array.shape].append(name)
    several = [names for names in by_shape.values() if len(names) > 1]
    if not several:
        return file
    one, other = draw.sample(draw.choice(several), 2)
    return {**file, one: file[other], other: file[one]}


def layers_permuted(file, draw):
    """The layers under each other's names."""
    layers = _layers_of(file)
    return _with_layers(file, dict(zip(layers, draw.sample(layers, len(layers)))))


def names_shuffled(file, draw):
    return dict(zip(draw.sample(list(file), len(file)), file.values()))


HARMLESS = (
    as_it_is, shuffled, prefixed, joined_otherwise, counted_from_one, with_gaps,
)  # fmt: skip
SILENT = (layers_opaque, layers_counted_wildly, arrays_opaque)
BROKEN = (one_dropped, layer_dropped, layer_doubled, off_by_one, another, averages_beside,
          dropped_and_doubled)  # fmt: skip
LYING = (exchanged, layers_permuted, names_shuffled)


@functools.cache
def made(make, seed):
    """A net and what it computes; jax compiles each once."""
    case = make(seed)
    case.call = jax.jit(case.call)
    return case


def tried(seed):
    """What became of one file: right, refused or wrong, and how it was changed."""
    draw = chance.Random(seed)
    make = draw.choice(CASES)
    case = made(make, draw.randrange(12))
    framework = draw.choice([*LAYOUTS, *(OTHERS if make is attentive else ())])
    change = draw.choice(HARMLESS * 2 + SILENT + BROKEN + LYING)
    file = change(case.file(framework), draw)
    if change not in LYING and draw.random() < 0.3:
        file = draw.choice(HARMLESS)(file, draw)
    expected = case.forward(case.x)
    options = {}
    if change in LYING or draw.random() < 0.1:
        options["reference"] = (case.x, expected, case.call)
    if draw.random() < 0.3:
        options["origin"] = "torch" if framework in OTHERS else framework
    try:
        net, _ = pax.weights.adopt(case.net, file, **options)
    except pax.errors.AdoptionError:
        return change, "refused", (case, framework)
    right = is_close(np.asarray(case.call(net.eval(), case.x)), expected, rtol=1e-3)
    return change, "right" if right else "wrong", (case, framework)


def test_a_file_is_adopted_right_or_refused():
    count = collections.Counter()
    for seed in range(runs(short=25, long=2000)):
        change, result, (_, framework) = tried(seed)
        assert result != "wrong", (seed, change.__name__, framework)
        count[result] += change in HARMLESS and framework != "neox"
    assert count["right"] > 20 * count["refused"]  # what refuses everything would prove nothing
