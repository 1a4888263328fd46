"""Runs a program like `python`, with this package as `pax` and `opax`."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from pax_export.compat import spawned
from pax_export.compat._install import install_as_pax


def run(arguments: Sequence[str], *, compat_jax: bool = False) -> int:
    """Runs a program that imports ``pax``, as ``python`` does.

    Args:
        arguments: the arguments of ``python``: a file, or a directory or zip archive with a
            ``__main__.py``, or ``-m`` and a module; then the program's own arguments.
        compat_jax: whether the program sees names removed from jax since 2021, listed in the
            migration guide; other modules do not see them.

    Returns:
        The exit code: 0, or 1 after an exception, whose traceback is printed.

    Raises:
        SystemExit: the program raised it, or cannot be found.
    """
    install_as_pax()
    try:
        if arguments[0] == "-m":
            _run_module(list(arguments[1:]), compat_jax)
        else:
            _run_path(list(arguments), compat_jax)
    except SystemExit:
        raise
    except BaseException as error:
        _print_error(error)
        if isinstance(error, KeyboardInterrupt):
            # Python itself must end the process as interrupted.
            sys.excepthook = lambda *_: None
            raise
        return 1
    return 0


def _run_path(argv: list[str], compat_jax: bool) -> None:
    path = argv[0]
    if not os.path.exists(path):
        _exit_with(f"can't open file {path!r}: no such file", 2)
    sys.argv[:] = argv
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        _set_path([path])
        runpy.run_path(path, _program_builtins(path, compat_jax), run_name="__main__")
        return
    folder = os.path.dirname(os.path.realpath(path))
    _set_path([folder])
    own = _program_builtins(folder, compat_jax)
    file = os.path.abspath(path)
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, vars(_new_main(file, own)))


def _program_builtins(folder: str, compat_jax: bool) -> dict[str, Any]:
    """The built-in names that a program has to itself, if any, as globals of its main module."""
    if not compat_jax:
        return {}
    from pax_export.compat import _legacy_jax  # which other programs need not load

    _legacy_jax.show_old_jax(folder)
    return {"__builtins__": _legacy_jax.BUILTINS}


def _new_main(file: str, own: dict[str, Any]) -> ModuleType:
    """The module ``__main__`` of a program; it stays, as pickles and threads need it."""
    main = ModuleType("__main__")
    main.__file__ = file
    main.__loader__ = SourceFileLoader("__main__", file)
    main.__dict__.update({"__builtins__": builtins, "__cached__": None} | own)
    sys.modules["__main__"] = main
    return main


def _run_module(argv: list[str], compat_jax: bool) -> None:
    if not argv:
        _exit_with("a module is expected after -m", 2)
    sys.argv[:] = argv
    _set_path([os.getcwd()])
    own = _program_builtins(os.getcwd(), compat_jax)
    _require_module(argv[0])
    runpy.run_module(argv[0], own, run_name="__main__", alter_sys=True)


def _require_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        _exit_with(f"error while finding the module {name!r} ({type(error).__name__}: {error})", 1)
    if found is None:
        _exit_with(f"no module named {name!r}", 1)
    elif found.submodule_search_locations is not None:
        if importlib.util.find_spec(f"{name}.__main__") is None:
            _exit_with(f"{name!r} is a package without __main__.py, and cannot be run", 1)


def _exit_with(problem: str, code: int) -> NoReturn:
    print(f"pax-export run: {problem}", file=sys.stderr)
    sys.exit(code)


def _set_path(first: list[str]) -> None:
    """Puts the program's folder first on `sys.path`, as Python does."""
    if not sys.flags.safe_path:
        sys.path[:1] = first
    # Processes that multiprocessing starts afresh get this path, and so they get us.
    sys.path.insert(1, spawned.FOLDER)


def _print_error(error: BaseException) -> None:
    """Prints an exception of the program as Python would, starting at its own first line."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _is_ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>")
