"""The public names of errors and warnings: none is missing, each is explained, old pickles load."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

import pax_export as pax
from pax_export._foundations import errors
from tests.processes import ROOT, printed

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
KINDS = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, (errors.PaxError, errors.PaxWarning))
}
_ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", re.M)
ROWS = {
    name: (cause, cure)
    for name, cause, cure in _ROW.findall((ROOT / "docs" / "api" / "errors.md").read_text())
}


def test_every_kind_is_public():
    assert set(pax.errors.__all__) == set(KINDS)
    assert all(getattr(pax.errors, name) is kind for name, kind in KINDS.items())


def test_every_kind_has_a_cause_and_a_cure():
    assert set(ROWS) == set(KINDS)
    assert [name for name, parts in ROWS.items() if min(map(len, parts)) < 10] == []


#: Files whose own kinds never leave their room: raised below, and caught above.
SIGNALS = {
    "export/formats/stablehlo/library_calls.py",
    "export/portable/decompositions/__init__.py",
    "export/portable/real_numbers.py",
    "export/portable/rules.py",
}


def test_no_other_file_of_the_package_makes_a_kind_of_error():
    package = ROOT / "pax_export"
    made = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"^ *class \w+(Error|Warning)\b", path.read_text(), re.M)
    }
    assert made - SIGNALS == {"_foundations/errors.py"}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_shown_by_its_public_name(name):
    assert KINDS[name].__module__ == "pax_export.errors"
    assert pickle.loads(pickle.dumps(KINDS[name])) is KINDS[name]


def test_a_kind_of_a_users_own_keeps_its_module():
    class Mine(pax.errors.PaxError):
        pass

    assert Mine.__module__ == __name__


def test_an_error_that_was_pickled_by_its_old_name_loads():
    new = pickle.dumps(errors.WeightNameError("No.", where="a.b"), protocol=0)
    old = new.replace(b"pax_export.errors", b"pax_export._foundations.errors")
    assert old != new
    assert pickle.loads(old).where == "a.b"


def test_no_page_sends_users_to_a_private_name():
    assert [page for page in PAGES if "pax_export._foundations.errors" in page.read_text()] == []


def test_errors_need_no_jax():
    program = """
import sys
sys.modules["jax"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "jax" else real(name, *a)
import pax_export
print(pax_export.errors.ExportPathError.__name__)
"""
    assert printed(program) == "ExportPathError\n"
