"""pax-export run: a program sees and does what it sees and does under python."""

import json
import signal
import zipfile

import pytest

from tests.compat.processes import pax_export_run, python

LOOK = """
import json, sys
import pax
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, __package__, str(__spec__),
                  sys.modules["__main__"].__dict__ is globals()]))
"""
# What the same lines print under python, where there is no pax.
PLAIN = LOOK.replace("import pax\n", "\n")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "programs").mkdir()
    return tmp_path


def same(folder, text, *arguments, plain=None, check=True, program="programs/p.py"):
    """Runs a program by both; all that can be seen from outside must be equal."""
    path = folder / program
    path.write_text(plain or text)
    expected = python(path.relative_to(folder), *arguments, check=False, cwd=folder)
    path.write_text(text)
    got = pax_export_run(path.relative_to(folder), *arguments, check=False, cwd=folder)
    assert got.stdout == expected.stdout
    assert got.stderr == expected.stderr
    assert got.returncode == expected.returncode
    assert not check or got.returncode == 0
    return got


def test_arguments_path_and_main(folder):
    got = same(folder, LOOK, "a", "--version", "--", "-m", "-h", plain=PLAIN)
    argv, path, *_ = json.loads(got.stdout)
    assert argv == ["programs/p.py", "a", "--version", "--", "-m", "-h"]
    assert path == str(folder / "programs")


def test_neighbours_can_be_imported(folder):
    (folder / "programs" / "neighbour.py").write_text("import pax\nname = 'next door'")
    text = "import pax, neighbour\nprint(neighbour.name, neighbour.pax is pax)"
    (folder / "programs" / "p.py").write_text(text)
    assert pax_export_run(folder / "programs" / "p.py").stdout == "next door True\n"


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit('a message')", 1),
        ("sys.exit()", 0),
        ("f()", 1),
        ("raise ExceptionGroup('some', [ValueError(1), KeyError(2)])", 1),
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("1 / 0 if x else", 1),
        ("sys.excepthook = lambda t, e, trace: print(t, trace.tb_lineno); f()", 1),
    ],
)
def test_exit_codes_and_tracebacks(statement, code, folder):
    text = f"""
import os, signal, sys

def f():
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer") from error

{statement}
"""
    assert same(folder, text, check=False).returncode == code


def test_what_runs_at_exit_and_in_threads_still_sees_the_program(folder):
    text = """
import atexit, pickle, threading, time

class Data:
    pass

def use(when):
    print(when, type(pickle.loads(pickle.dumps(Data()))) is Data)

atexit.register(use, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), use("in a thread"))).start()
"""
    assert same(folder, text).stdout == "in a thread True\nat exit True\n"


def test_a_module(folder):
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "__main__.py").write_text(LOOK)
    (folder / "package" / "tool.py").write_text(LOOK)
    for name in ("package", "package.tool"):
        argv, path, main, _, package, spec, is_main = json.loads(
            pax_export_run("-m", name, "-x", cwd=folder).stdout
        )
        assert argv[0].startswith(str(folder / "package")) and argv[1:] == ["-x"]
        assert path == str(folder) and main == "__main__" and is_main
        assert package == "package" and name in spec


def test_a_module_that_fails(folder):
    (folder / "tool.py").write_text("def f():\n    raise ValueError('no')\nf()")
    done = pax_export_run("-m", "tool", check=False, cwd=folder)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{folder}/tool.py", line 3, in <module>'
    assert lines[-1] == "ValueError: no"


def test_a_folder_and_an_archive(folder):
    (folder / "programs" / "__main__.py").write_text(LOOK)
    with zipfile.ZipFile(folder / "p.zip", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    for name in ("programs", "p.zip"):
        argv, path, main, *_ = json.loads(pax_export_run(name, "x", cwd=folder).stdout)
        assert argv == [name, "x"] and path == name and main == "__main__"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none.py"], 2, "pax-export run: can't open file 'none.py': no such file\n"),
        (["-m", "none"], 1, "pax-export run: no module named 'none'\n"),
        (["-m", "json.none"], 1, "pax-export run: no module named 'json.none'\n"),
        (["-m", "none.none"], 1, "error while finding the module 'none.none' (ModuleNotFound"),
        (["-m", "logging"], 1, "'logging' is a package without __main__.py, and cannot be run\n"),
        (["-m"], 2, "a module is expected after -m\n"),
        ([], 2, "an export or a program is expected: a directory, a file, or -m\n"),
        (["-x"], 2, "an export or a program is expected: a directory, a file, or -m\n"),
    ],
)
def test_invalid_programs_are_refused(arguments, code, message, tmp_path):
    done = pax_export_run(*arguments, check=False, cwd=tmp_path)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help():
    text = pax_export_run("--help", fresh=True).stdout
    assert "\n       pax-export run [--compat-jax] program.py [argument ...]\n" in text
    assert "pax-export run [--compat-jax] -m module" in text


@pytest.mark.parametrize("first", ["pax", "opax"])
def test_processes_that_start_afresh_have_pax_as_well(first, folder):
    path = folder / "p.py"
    path.write_text(
        f"""
import {first}
import multiprocessing, pax, opax, sys

def work(seed):
    pax.seed_rng_key(seed)
    return pax.__name__, opax.__name__, float(pax.Linear(1, 1).weight[0, 0])

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [3]) == [work(3)], *work(3)[:2])
"""
    )
    done = pax_export_run(path, fresh=True)
    assert done.stdout == "True pax_export pax_export.opax\n"


def test_a_test_runner_beside_the_sources_of_another_pax(folder):
    """The folder that a program starts in may hold a `pax`; ours comes first."""
    (folder / "pax").mkdir()
    (folder / "pax" / "__init__.py").write_text("raise RuntimeError")
    (folder / "test_it.py").write_text("import pax\ndef test(): assert pax.Linear(1, 1)")
    done = pax_export_run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py", cwd=folder)
    assert "1 passed" in done.stdout
