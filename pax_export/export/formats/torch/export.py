"""`to_torch` and `as_torch`: exports a model as a program, or as a module, of PyTorch."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# torch is not among the packages of the tests.
from __future__ import annotations

import importlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from pax_export._foundations.check import checked_choice
from pax_export._foundations.errors import (
    ExportPathError,
    MissingPackageError,
    PaxError,
    StateChangeError,
)
from pax_export._foundations.files import checksums
from pax_export._foundations.optional import find, install, require
from pax_export._foundations.types import Equation, PyTree
from pax_export.export.artifact.calling import LoadedFile
from pax_export.export.artifact.embedded import NAME_IN_TORCH, append_zip
from pax_export.export.artifact.options import (
    ExportOptions,
    Request,
    check_state,
    takes_options,
)
from pax_export.export.artifact.report import SHA256, Report, package_versions, report_text
from pax_export.export.formats.torch import TORCH
from pax_export.export.formats.torch.run import call, run_methods
from pax_export.export.formats.torch.run import load as load_programs
from pax_export.export.lowering.lowered_model import signature_info
from pax_export.export.lowering.variables import Store
from pax_export.export.pipeline.bisect import name_modules
from pax_export.export.pipeline.format_exporter import FormatExporter, ProgramContents
from pax_export.export.pipeline.phases import ExportRun
from pax_export.export.pipeline.run_export import run_export
from pax_export.export.portable.program import rewritten, traced
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.programs import Program, check_updates, refuse_changes
from pax_export.export.tracing.traced import pull_back
from pax_export.export.tracing.training import is_training, mark_trainable, with_train_mode
from pax_export.export.validation.cases import (
    CaseStep,
    ProgramCases,
    cases_in_turns,
    with_cotangents,
)
from pax_export.export.validation.probes import Budget
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import Case
from pax_export.export.validation.validate import validate as validated_calls

if TYPE_CHECKING:
    import torch


#: torch before this has no archive of several programs.
_OLDEST = (2, 8)
#: The key of the program in train mode.
TRAIN = "train mode"


@takes_options
def to_torch(
    model: Any,
    path: str | os.PathLike[str],
    inputs: Any,
    *,
    trainable: Any = True,
    **options: Unpack[ExportOptions],
) -> Report:
    """Writes a model as a program of PyTorch, for `torch.export.load`.

    Operations of jax become those of torch (core ATen).  Parameters and buffers have the paths of
    the leaves in ``state_dict()``.  Outputs, and gradients of all parameters and float inputs, are
    compared with jax before the file has its name.

    Args:
        model: as for `to_saved_model`.
        path: the file to create, usually ``*.pt2``.
        inputs: as for `to_saved_model`; symbolic dimensions are those of ``torch.export.Dim``.
        trainable: as for `to_saved_model`.  With False, or if all outputs are integers, the program
            is for inference: a BatchNorm is folded into the convolution before it, and no
            gradients are compared.
        **options: those of every writer, `ExportOptions`.

    Returns:
        The report, which can be printed, and is stored in the file (``unzip -p net.pt2
        pax_export.json`` prints it).

    Raises:
        UnsupportedOperationError: torch cannot express an operation; the message has the layer and
            line that use it.
        PaxError: a subclass for each error, as for `to_saved_model`.

    Example:
        >>> import importlib.util, tempfile, jax.numpy as jnp
        >>> from pax_export.export import spec, to_torch
        >>> double = ({"w": jnp.full(3, 2.0)}, lambda params, x: params["w"] * x)
        >>> if importlib.util.find_spec("torch"):  # pip install "pax-export[torch]"
        ...     with tempfile.TemporaryDirectory() as folder:
        ...         report = to_torch(double, folder + "/double.pt2", spec("batch, 3"))
    """
    request = Request.of(to_torch, model, path, inputs, **options)
    exporter = TorchExporter(trainable, request.calls(request.keys), state=request.state)
    return run_export(exporter, request)


def as_torch(
    model: Any,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    methods: Mapping[str, Any] | None = None,
    constraints: Sequence[str] = (),
    state: Literal["frozen", "update", "keep"] = "frozen",
    outputs: Literal["float32", "model"] = "float32",
    trainable: Any = True,
    train: bool | Callable[..., Any] = False,
    validate: bool | Literal["full"] = True,
    examples: Any = None,
) -> torch.nn.Module:
    """Returns a model as a `torch.nn.Module` in this process.

    Parameters and buffers have the paths of the leaves, so that ``state_dict()`` has their names;
    any optimizer of torch trains it.  Functions with derivatives of their own (`jax.custom_vjp`)
    keep these.  Each of `methods` is a method of the module.

    Args:
        model: as for `to_torch`.
        inputs: as for `to_torch`.
        kwargs: as for `to_torch`.
        methods: as for `to_torch`; the first is ``forward``.
        constraints: as for `to_torch`.
        state: as for `to_torch`.
        outputs: as for `to_torch`.
        trainable: as for `to_torch`.
        train: whether the module has a train mode, which ``module.train()`` and ``module.eval()``
            switch: in it, ``forward`` is the model in train mode, and assigns its state (averages
            of BatchNorm, keys of dropout).  For a model of another library, a function that calls
            it in train mode, as those of `methods`.
        validate: call the module at several sizes and compare outputs and gradients with jax.
        examples: as for `to_torch`.

    Raises:
        PaxError: a subclass for each error, as for `to_torch`.

    Example:
        >>> import importlib.util, pax_export as pax
        >>> if importlib.util.find_spec("torch"):  # pip install "pax-export[torch]"
        ...     net = pax.export.as_torch(pax.Linear(3, 2), pax.export.spec("batch, 3"))
        ...     assert sorted(net.state_dict()) == ["bias", "weight"]
    """
    check_state(state, updates=True)
    checked_choice(validate, (True, False, "full"), "validate")
    request = Request(
        model, "", inputs, kwargs=kwargs, methods=methods, constraints=constraints, state=state,
        outputs=outputs, validate=validate, examples=examples,
    )  # fmt: skip
    exporter = TorchExporter(trainable, request.calls(request.keys), True, state, train)
    exporter.find(request)
    try:
        exportable, programs = exporter.trace(request)
        refuse_changes(exportable, programs, state, updates=True)
        contents = exporter.lower(exportable, programs, request)
        module, _ = contents.make_module()
        if validate:
            budget = Budget(probes="all" if validate == "full" else "few")
            methods = {each.key: partial(module._run, each.key) for each in programs}
            signatures = contents.nested_methods()

            def run_here(_: str, cases: Iterable[Mapping[str, Any]]) -> list[Any]:
                return run_methods(methods, signatures, cases, module)

            validated_calls(TORCH, Path(), contents.cases(budget), False, 1.0, run_here)
        return module.train(is_training(model)) if train else module
    except PaxError as error:
        name_modules(error, exporter, request)
        raise


@dataclass(frozen=True)
class TorchExporter(FormatExporter):
    format = TORCH
    one_by_one = True
    updates_state = True

    trainable: Any
    examples: Mapping[str, Sequence[Any]]
    live: bool = False
    state: str = "frozen"
    train: Any = False

    def find(self, request: Request) -> None:
        find("torch", "torch", "as_torch" if self.live else "to_torch")

    def load(self, request: Request) -> None:
        found = require("torch", "torch", "to_torch").__version__
        if tuple(int(each) for each in found.split(".")[:2]) < _OLDEST:
            oldest = ".".join(map(str, _OLDEST))
            raise MissingPackageError(
                f"to_torch needs torch {oldest} or newer.", got=found, write=install("torch")
            )

    def read_model(self, request: Request) -> tuple[Exportable, PyTree]:
        model, _ = super().read_model(request)
        if not self.train:
            return model, None
        several = request.methods is not None
        inputs = request.inputs[model.methods[0].key] if several else request.inputs
        return with_train_mode(model, request.model, TRAIN, self.train), inputs

    def lower(
        self, model: Exportable, programs: Sequence[Program], request: Request
    ) -> TorchContents:
        marked = mark_trainable(model, self.trainable)
        outputs = (output for each in programs for output in each.outputs)
        is_float = any(dtypes.is_floating(each.dtype) for each in outputs)
        # Where all outputs are integers, nothing has a derivative.
        trains = self.trainable is not False and is_float
        store = Store(marked.leaves, (), trainable=trains)
        for each in programs:
            for value in each.traced.constants:
                store.of_constant(value)
        self.load(request)
        module = importlib.import_module("pax_export.export.formats.torch.module")
        names = module.array_names([each.name for each in store.variables])
        for variable, name in zip(store.variables, names):
            variable.name = name
        changes = {}
        for each in programs:
            is_assigned = self.state == "update" or each.trains
            places = each.changed if is_assigned else ()
            if places:
                check_updates(each, model.leaves)
            shared = [o.read & set(places) for o in programs if o is not each]
            if not self.live and any(shared):
                raise StateChangeError(
                    "Programs of one file do not share the state that one of them changes.",
                    where=f"{each.key}: {model.leaves[min(set().union(*shared))].name}",
                    got=f"{len(programs)} methods",
                    write='pax.export.as_torch, whose methods share it; or state="keep"',
                )
            changes[each.key] = [store.variables[store.of_leaf[at]].name for at in places]
        infos = store.infos()
        return TorchContents(
            model.name, infos, programs, store, self.examples, trains, self.live, changes
        )


@dataclass(frozen=True)
class TorchContents(ProgramContents):
    trainable: bool
    live: bool
    changes: Mapping[str, Sequence[str]]  # the arrays that a call assigns, by signature

    def make_module(self) -> tuple[Any, dict[str, tuple[str, ...]]]:
        convert = importlib.import_module("pax_export.export.formats.torch.convert")
        return convert.make_module(self.name, self.programs, self.store, self.trainable, self.live,
                                   self.changes)  # fmt: skip

    def nested_methods(self) -> dict[str, Any]:
        """How arguments and outputs of each method are nested; the first is the archive's own."""
        first = self.programs[0].key
        return {
            each.key: {
                "program": "model" if each.key == first else each.key,
                "arguments": _arguments(each.inputs.structure()),
                "result": each.output_structure,
                "changes": list(self.changes[each.key]),
            }
            for each in self.programs
        }

    def write(self, path: Path) -> dict[str, tuple[str, ...]]:
        module, notes = self.make_module()
        archive = importlib.import_module("pax_export.export.formats.torch.archive")
        archive.write_archive(module, self.programs, self.nested_methods(), path)
        return notes

    def cases(self, budget: Budget) -> Iterator[Case]:
        gradient_cases = (
            GradientCases(
                each,
                self.store,
                self.examples.get(each.key, ()),
                self.trainable,
                self.changes[each.key],
            )
            for each in self.programs
        )
        return cases_in_turns(gradient_cases, budget)

    def report_fields(
        self, path: Path, written: Mapping[str, tuple[str, ...]], run: ExportRun
    ) -> dict[str, Any]:
        notes = list(dict.fromkeys(note for each in written.values() for note in each))
        details = {"runs_in": "torch", SHA256: _digest(path), "kept": notes}
        return {
            "signatures": {each.key: signature_info(each) for each in self.programs},
            "graph_bytes": path.stat().st_size,
            "platforms": ("cpu", "cuda", "rocm"),
            "versions": package_versions("torch"),
            "details": {name: value for name, value in details.items() if value},
        }

    def write_report(
        self, report: Report, path: Path, written: Mapping[str, tuple[str, ...]]
    ) -> None:
        append_zip(path, report_text(report), NAME_IN_TORCH)


def _arguments(structure: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a program takes: Python values are fixed in it."""
    fixed = ({"static", "none"} & tree.keys() for tree in structure.values())
    return {name: tree for (name, tree), is_fixed in zip(structure.items(), fixed) if not is_fixed}


def _digest(path: Path) -> str:
    """The hash of an archive up to its report, or to its list if that is not there yet."""
    with zipfile.ZipFile(path) as archive:
        there = NAME_IN_TORCH in archive.namelist()
        end = archive.getinfo(NAME_IN_TORCH).header_offset if there else archive.start_dir
    return checksums.digest(path, end)


def check(path: Path, report: Report, trusted: bool) -> None:
    """Compares a file with the hash in its report."""
    if _digest(path) != report.details.get(SHA256):
        raise ExportPathError(
            "The export is corrupted: its hash does not match.",
            where=str(path),
            got="other bytes than were written",
            write="a copy of the file, as it was written",
        )


def load(path: Path, report: Report) -> LoadedFile:
    """Loads a file as a function of numpy arrays; `torch.export.load` as a program of torch."""
    require("torch", "torch", "load")
    programs, methods = load_programs(str(path))
    modules = {key: each.module() for key, each in programs.items()}
    return LoadedFile(
        report, programs, lambda key, arrays: call(modules[key], methods[key], arrays)
    )


class GradientCases(ProgramCases):
    """The calls of a program, one of them with gradients."""

    def __init__(self, program: Program, store: Store, examples: Sequence[Any], trainable: bool,
                 changes: Sequence[str] = ()):  # fmt: skip
        leaves = [store.variables[index].value for index in store.of_leaf]
        super().__init__(program, leaves, examples)
        trained = [store.variables[index].trainable for index in store.of_leaf]
        inputs = [dtypes.is_floating(each.struct.dtype) for each in program.inputs.flat]
        wanted = [*trained, *inputs] if trainable else []
        self._wrt = [index for index, is_wanted in enumerate(wanted) if is_wanted]
        names = [store.variables[index].name for index in store.of_leaf]
        self._names = [*names, *(each.name for each in program.inputs.flat)]
        self._of = [i for i, each in enumerate(program.outputs) if dtypes.is_floating(each.dtype)]
        self._changes = [f"state:{each}" for each in changes]

    def named_results(self, results: Sequence[Any]) -> Arrays:
        names = [*self.output_names, *self._changes]
        return dict(zip(names, map(np.asarray, results)))

    def gradient_steps(self, case: Case) -> Iterator[CaseStep]:
        if self._wrt and self._of:
            what = f"the gradients of {self.key}"
            yield CaseStep(what, partial(self._with_gradients, case), 3.0, is_gradient=True)

    def _with_gradients(self, case: Case) -> Case:
        case = with_cotangents(case, (self.output_names[index] for index in self._of))
        operands = [*self.leaves, *case.inputs.values()]
        program = rewritten(jax.make_jaxpr(self.traced.function)(operands), _clamped)
        in_range = jaxpr_as_fun(program)
        function = jax.jit(pull_back(lambda xs: in_range(*xs), self._wrt, self._of))
        cotangents = list(case.cotangents.values())

        def run(operands: Sequence[Any]) -> Arrays:
            return self._named(function(list(operands), cotangents))

        case.expected.update(run(operands))
        case.alternatives = partial(self.alternatives, case, run)
        return case

    def _named(self, found: Sequence[Any]) -> Arrays:
        named: dict[str, np.ndarray] = {}
        for index, value in zip(self._wrt, found):
            name, value = f"gradient:{self._names[index]}", np.asarray(value)
            named[name] = named[name] + value if name in named else value  # tied leaves add up
        return named


def _clamped(equation: Equation) -> Any:
    """A gather whose indices are promised to be in range, as one that clamps them.

    jax clamps them, and on CPUs drops the slopes of those that break the promise.
    """
    if equation.primitive.name != "gather" or "PROMISE" not in str(equation.params["mode"]):
        return None
    params = {**equation.params, "mode": jax.lax.GatherScatterMode.CLIP}
    return traced(partial(equation.primitive.bind, **params), equation.invars)
