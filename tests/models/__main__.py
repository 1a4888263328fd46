"""Tries every model of the battery in every format.

`python -m tests.models` tries all in what this environment has; `--only` and `--formats` choose.
Each trial is a fork of a process that has imported the libraries: it may die, hang, or leave
something behind, and the next one begins anew.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from tests.models import page
from tests.models.formats import FORMATS, GRADIENTS, NEEDS, missing
from tests.models.registry import FRAMEWORKS, Model, all_models
from tests.models.trial import DEAD, RIGHT, Outcome, attempt

_MODULES = {"linen": "flax", "nnx": "flax", "haiku": "haiku", "equinox": "equinox"}
_WARM = (
    "flax.nnx", "flax.linen", "haiku", "equinox", "tensorflow", "ai_edge_litert.interpreter",
    "onnxruntime", "jax2onnx", "torch._dynamo",
)  # fmt: skip


_ONLY_SOME = ("tensorflow", "ai_edge_litert", "onnxruntime", "jax2onnx", "torch")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code is 1 if a model was raw, dead, wrong or unclear."""
    options = _options(argv)
    models = [m for name, m in all_models().items() if not options.only or name in options.only]
    if unknown := set(options.only or ()) - {model.name for model in models}:
        print(f"no such models: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    stored = page.read(options.output) if options.output else page.empty()
    page.describe(stored, models)
    pairs = untried(_pairs(models, options.formats), stored["outcomes"], options.resume)
    _warm({form for form, _ in pairs})
    with tempfile.TemporaryDirectory() as kept, ThreadPoolExecutor(options.jobs) as pool:
        options.kept = Path(kept)
        _keep_compiled(options.kept / "compiled")
        runs = [(form, model, pool.submit(_in_fork, model, form, options)) for form, model in pairs]
        for form, model, run in runs:
            outcome = run.result() | {"day": f"{date.today()}"}
            _say(form, model, outcome, options.verbose)
            stored["outcomes"].setdefault(form, {})[model.name] = outcome
            if options.output:
                page.write(stored, options.output)
    print(page.table(stored, [form for form in FORMATS if form in stored["outcomes"]]))
    return int(page.any_bad(stored, options.formats))


def untried(
    pairs: Iterable[tuple[str, Model]], outcomes: dict[str, dict[str, Any]], resume: bool
) -> list[tuple[str, Model]]:
    """Those to try: all, whose earlier outcomes are dropped, or those that a stopped run left."""
    if resume:
        return [(form, model) for form, model in pairs if model.name not in outcomes.get(form, {})]
    pairs = list(pairs)
    for form, model in pairs:
        outcomes.get(form, {}).pop(model.name, None)
    return pairs


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument(
        "--formats", type=lambda text: text.split(","), default=list(FORMATS),
        help=f"some of {','.join(FORMATS)}",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models")
    parser.add_argument(
        "--static-too", action="store_true", help="try fixed sizes where symbolic ones fail"
    )
    parser.add_argument(
        "--no-validate", dest="validate", action="store_false",
        help="leave out the test that an export makes of itself",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="JSON", help="add what was found to this")
    parser.add_argument("--resume", action="store_true", help="leave out what stands there")
    parser.add_argument("--timeout", type=float, default=240, help="of one trial, in seconds")
    parser.add_argument("--jobs", type=int, default=1, help="trials at once")
    parser.add_argument("-v", "--verbose", action="store_true", help="print whole messages")
    options = parser.parse_args(argv)
    if unknown := set(options.formats) - set(FORMATS):
        parser.error(f"no such formats: {', '.join(sorted(unknown))}")
    return options


def _pairs(models: Sequence[Model], formats: Sequence[str]) -> Any:
    """What there is to try in this environment; what it lacks is named."""
    have = {f for f in FRAMEWORKS if f not in _MODULES or find_spec(_MODULES[f])}
    if others := set(FRAMEWORKS) - have:
        print(f"left out, not installed: {', '.join(sorted(others))}", file=sys.stderr)
    lacks = {form: missing(form) for form in formats}
    for form, lack in lacks.items():
        if lack:
            print(f"{form} is left out: {lack}", file=sys.stderr)
    for model in models:
        for form in formats:
            fits = model.framework in have and (form not in GRADIENTS or model.differentiable)
            if fits and not lacks[form]:
                yield form, model


def _warm(formats: Collection[str]) -> None:
    """Imports what trials need; none may start a thread, for only one goes over into a fork."""
    wanted = {need for form in formats for need in NEEDS[form]}
    for name in _WARM:
        top = name.partition(".")[0]
        if top in _ONLY_SOME and top not in wanted:
            continue
        if find_spec(top) and find_spec(name):
            importlib.import_module(name)


def _keep_compiled(folder: Path) -> None:
    """What XLA compiles for one trial, it need not compile for the next."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _in_fork(model: Model, form: str, options: argparse.Namespace) -> dict[str, Any]:
    """A trial in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        found, said = Path(folder) / "found.json", Path(folder) / "said"
        child = os.fork()
        if not child:
            code = 1
            try:
                with said.open("wb") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                outcome = attempt(model, form, options.static_too, options.validate, options.kept)
                found.write_text(json.dumps(outcome.as_dict()))
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        ended = _waited(child, options.timeout)
        if found.exists():
            return json.loads(found.read_text())
        last = said.read_text(errors="replace")[-1500:] if said.exists() else ""
        return Outcome(DEAD, ended, details=last).as_dict()


def _waited(child: int, timeout: float) -> str:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"not done after {timeout:.0f} s"


def _say(form: str, model: Model, outcome: dict[str, Any], verbose: bool) -> None:
    line = f"{form:12} {model.name:28} {outcome['outcome']:8} {outcome.get('seconds', 0):6.1f} s"
    if outcome["outcome"] != RIGHT:
        line += f"  {outcome.get('error', '')[:150]} [{outcome.get('where', '')[:80]}]"
    print(line, flush=True)
    if verbose and outcome["outcome"] != RIGHT:
        print(outcome.get("details", ""), flush=True)


if __name__ == "__main__":
    sys.exit(main())
