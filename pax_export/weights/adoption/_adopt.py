"""adopt: fills a module with the arrays of any weights file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import AnyMesh, ArrayLike, DTypeLike, PyTree
from pax_export.core import Module, pure
from pax_export.sharding import RulesLike, shardings_of_leaves
from pax_export.weights._save_load import leaves_by_name, require_shape
from pax_export.weights.adoption import _refusals
from pax_export.weights.adoption._fill import Filler
from pax_export.weights.adoption._options import Options, options_of
from pax_export.weights.adoption._parametrized import file_names
from pax_export.weights.adoption._plan import Choice, Study, best_study, find_choices
from pax_export.weights.adoption._report import AdoptionReport, Row
from pax_export.weights.sources import Source, open_source

#: How far the outputs may be from the reference, in parts of the largest.
TOLERANCE = 1e-4


class _Reference:
    """``(inputs, outputs)`` of the original net, with ``call(net, *inputs)`` as a third item."""

    def __init__(self, origin: object, tolerance: float):
        if not isinstance(origin, (tuple, list)) or len(origin) not in (2, 3):
            raise InvalidArgumentTypeError(
                "adopt(reference=): expected inputs and outputs.",
                where="adopt(reference=)",
                got=f"{type(origin).__name__}: {origin!r}"[:200],
                write="reference=(inputs, outputs), or (inputs, outputs, call) with "
                "call(net, *inputs)",
            )
        inputs, self._outputs, *call = origin
        self._inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        self._tolerance, self.tried = tolerance, 0
        function = pure(call[0] if call else lambda net, *inputs: net(*inputs))
        self._run_eagerly = lambda net, inputs: function(net, *inputs)
        self._run: Callable = jax.jit(self._run_eagerly)

    def _measure_distance(self, net: Module) -> float:
        module = net.eval() if isinstance(net, Module) else net
        try:
            found = self._run(module, self._inputs)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            self._run = self._run_eagerly  # a call that looks at values is run as it is written
            found = self._run(module, self._inputs)
        outputs, expected = map(jax.tree_util.tree_leaves, (found, self._outputs))
        shapes = [np.shape(each) for each in outputs], [np.shape(each) for each in expected]
        if shapes[0] != shapes[1]:
            raise InvalidArgumentError(
                "The outputs of the module and the reference have different shapes.",
                where="adopt(reference=)",
                got=f"{shapes[0]} instead of {shapes[1]}",
                write="the outputs of one call, or (inputs, outputs, call)",
            )
        return max(map(_relative_difference, outputs, expected), default=np.inf)

    def choose(self, study: Study, filler: Filler) -> tuple[Any, Choice]:
        """The one way that agrees, or an error if none does, or two that differ."""
        found: dict[tuple, tuple[Any, Choice]] = {}
        seen: set[tuple] = set()
        nearest = np.inf
        for choice in _likely_choices(study, found):
            if choice.key() in seen:
                continue
            if self.tried == MOST:
                break
            seen.add(choice.key())
            self.tried += 1
            net = filler.fill(choice.recipe)
            distance = self._measure_distance(net)
            nearest = min(nearest, distance)
            if distance <= self._tolerance:
                found[choice.key()] = net, choice
                if len(found) > 1:
                    raise _refusals.ambiguity_error(study, len(found))
        if not found:
            raise _refusals.no_agreement_error(study.source, self.tried, nearest, MOST)
        return next(iter(found.values()))


def _likely_choices(study: Study, found: Mapping) -> Iterator[Choice]:
    """Yields the choices by name; if none agrees, also with norms in another order."""
    yield from find_choices(study.possible)
    if not found and any(each.outcome.by_order for each in study.possible):
        yield from find_choices(study.possible, reopened=True)


def _relative_difference(one: ArrayLike, other: ArrayLike) -> float:
    one, other = (np.asarray(each).astype(np.float64) for each in (one, other))
    scale = np.abs(other).max(initial=0.0)
    apart = np.abs(one - other).max(initial=0.0)
    if not np.isfinite(apart):
        return np.inf
    return float(apart / scale) if scale else float(apart)


T = TypeVar("T")

#: The largest number of assignments that are run and compared with a reference.
MOST = 256


def adopt(
    net: T,
    source: object,
    *,
    rename: Mapping[str, str] | None = None,
    ignore: str | Iterable[str] | None = None,
    keep: str | Iterable[str] | None = None,
    reference: object = None,
    tolerance: float = TOLERANCE,
    origin: str | None = None,
    fused: str | None = None,
    axes: Mapping[str, Sequence[int]] | None = None,
    flatten: str | Mapping[str, int] | None = None,
    zeros: str | Iterable[str] | None = None,
    rules: RulesLike = None,
    mesh: AnyMesh | None = None,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
) -> tuple[T, AdoptionReport]:
    """Returns a module with the weights of a file of any framework.

    Arrays are matched to leaves by shape, in the layouts of frameworks, and by name. Ambiguous
    matches are never guessed: one error lists them, and what to write.

    Args:
        net: the module to start from; it may be abstract (`jax.eval_shape`), with shardings.
        source: what `open_source` accepts: a path, a model of the Hub, or a mapping of names to
            arrays.
        rename: a name in the source, or its prefix -> the path of a leaf or layer. On both sides,
            ``*`` matches a name or a part of one, and ``**`` any number of names.
        ignore: names of the source, or patterns, to leave out.
        keep: paths of the module, or patterns, that keep their values.
        reference: ``(inputs, outputs)`` of the original net, or ``(inputs, outputs, call)`` to run
            ``call(net, *inputs)``: the possible assignments are run, and the one that agrees is
            taken; a single one must agree, too.
        tolerance: the allowed difference from the reference, relative to the largest output.
        origin: the framework whose conventions the arrays follow, where the file does not tell:
            ``"torch"``, ``"keras"``, ``"tensorflow"``, ``"flax"``, ``"onnx"``, ``"mlx"`` or
            ``"pax"``.
        fused: the order of fused queries, keys and values: ``"blocks"`` or ``"by head"``.
        axes: a path of the module -> the axis of the array for each of its axes.
        flatten: the path of a dense layer behind a flatten -> the number of channels that were
            flattened channels first, as in torch; or ``"channels_first"`` for all such layers,
            or ``"as it is"`` where the order is the same.
        zeros: paths of leaves, or patterns, to set to zeros, such as biases that the original
            layers lack.
        rules: sharding rules, as for `sharding.shard`; require ``mesh``.
        mesh: the mesh for the leaves, each placed before the next is read.
        dtype: the dtype of floating leaves; by default the module's.
        revision: a branch, tag or commit of the model on the Hub.

    Returns:
        The new module, and an `AdoptionReport`.

    Raises:
        AmbiguousWeightsError: (an AdoptionError) several assignments are possible.
        AdoptionError: (a WeightsMismatchError) arrays are missing or left over, have unsuitable
            shapes or dtypes, or no assignment agrees with the reference.
        WeightsFileError: the source cannot be read.
        ShardingError: the rules do not fit the module or the mesh.
        InvalidArgumentError: an option is invalid, or matches nothing.

    Example:
        >>> import numpy as np, pax_export as pax
        >>> file = {"0.weight": np.eye(4, 3), "0.bias": np.ones(4), "2.weight": np.ones((2, 4)),
        ...         "2.bias": np.zeros(2)}
        >>> net = pax.Sequential(pax.Linear(3, 4), pax.Linear(4, 2))
        >>> net, report = pax.weights.adopt(net, file)
        >>> net(np.array([[1.0, 2.0, 3.0]], np.float32)).tolist()
        [[10.0, 10.0]]
        >>> report.rows[0].how
        'transposed'
    """
    options = options_of("adopt", rename=rename, ignore=ignore, keep=keep, axes=axes, origin=origin,
                         fused=fused, flatten=flatten, zeros=zeros)  # fmt: skip
    leaves = leaves_by_name(net)
    for name, leaf in leaves.items():
        require_shape(name, leaf, "adopt needs a module of arrays")
    on_mesh = mesh is not None or rules is not None
    shardings = dict(zip(leaves, shardings_of_leaves(net, mesh, rules))) if on_mesh else {}
    with open_source(source, revision=revision) as file:
        study = _possible_study(net, source, file, options)
        filler = Filler(net, leaves, study.source, study.wanted, shardings, dtype)
        if reference is None:
            choice = _choose_only_way(study)
            return filler.fill(choice.recipe), _report_of(study, choice, leaves)
        compared = _Reference(reference, tolerance)
        new, choice = compared.choose(study, filler)
        return new, _report_of(study, choice, leaves, compared.tried)


def _choose_only_way(study: Study) -> Choice:
    """Returns the one possible way; otherwise raises the error that lists what is ambiguous."""
    decided = all(hypothesis.decided for hypothesis in study.possible)
    choices = reversed(list(find_choices(study.possible))) if decided else ()
    found = {choice.key(): choice for choice in choices}
    if len(found) != 1:
        raise _refusals.ambiguity_error(study)
    (choice,) = found.values()
    return choice


def _report_of(
    study: Study, choice: Choice, leaves: Mapping[str, Any], tried: int = 0
) -> AdoptionReport:
    """Returns the report, with rows in the order of the module."""
    why = {
        leaf.path: "rename=" if group.within is not None else choice.why.get(layer, "the reference")
        for layer, group in choice.pairs
        for leaf in layer.leaves.values()
    }
    rows = tuple(
        Row(
            path,
            tuple(dict.fromkeys(name for piece in choice.recipe[path]
                                for name in file_names(study.source, piece.source))),
            ", ".join(dict.fromkeys(piece.says for piece in choice.recipe[path] if piece.says)),
            why[path],
            tuple(own.shape),
            str(own.dtype),
        )
        for path, own in leaves.items()
        if path in choice.recipe
    )  # fmt: skip
    constants = study.wanted.counters | study.wanted.zeros
    unchanged = tuple(
        path for path in leaves if path not in choice.recipe and path not in constants
    )
    return AdoptionReport(
        study.source.where,
        study.source.kind,
        choice.origin,
        rows,
        counters=tuple(study.wanted.counters),
        kept=unchanged,
        ignored=(*study.ignored, *study.counters),
        constants=tuple(study.constants),
        tied=study.tied,
        tried=tried,
        zeros=tuple(study.wanted.zeros),
        _choice=choice,
    )


def _possible_study(net: PyTree, origin: object, file: Source, options: Options) -> Study:
    study = best_study(net, origin, file, options)
    if not study.possible:
        raise _refusals.impossible_error(study)
    return study


def plan_of(
    net: PyTree, like: object, source: Source, options: Options
) -> tuple[AdoptionReport, Source]:
    """The one way from a source to a module, to be gone back, and the version of the source."""
    study = _possible_study(net, like, source, options)
    return _report_of(study, _choose_only_way(study), leaves_by_name(net)), study.source
