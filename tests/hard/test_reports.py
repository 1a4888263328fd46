"""Reports that say something else than their exports: read or refused, and never a raw error.

Each value in a report is replaced by values of other kinds, as somebody would who writes one by
hand or means harm; hashes are made to fit.
"""

from __future__ import annotations

import contextlib
import io
import json
import random as chance
import shutil

import pytest

from pax_export.cli import main
from pax_export.errors import PaxError
from pax_export.export import Report, load, renew, spec, to_saved_model, to_stablehlo, to_tflite
from pax_export.export.artifact import embedded
from pax_export.export.artifact.formats import import_function
from pax_export.export.validation import recheck, serve
from tests.export.models import affine, affine_params, random, rehash
from tests.hard.size import runs

MODEL, X = (affine_params(), affine), random(2, 3)
GONE = object()
VALUES = (
    None, True, -1, 0, 10**30, 2**31, 2**63, -(10**9), 1e999, float("nan"), "", "x", "\0", "\udc80",
    "../../x", "/etc/passwd", "a*b", "2**999999999", "mod(x, 0)", "floordiv(n,n)", "(" * 5000,
    "x+" * 3000 + "x", "batch" * 100_000, "%s{}\n\x1b[31m", [], {}, [[]], {"a": 1}, [1], ["x"],
    [None], GONE,
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    to_saved_model(MODEL, path / "saved", spec("n, 3"), trainable=True, validate=False)
    (path / "saved" / "SHA256SUMS").unlink()
    to_stablehlo(
        MODEL, path / "bundle", spec("n, 3"), platforms=("cpu",), vjp_order=1, validate=False
    )
    to_tflite(MODEL, path / "m.tflite", spec("2, 3"), validate=False)
    return path


def report_of(path):
    if path.is_dir():
        return json.loads((path / "pax_export.json").read_text())
    report = json.loads(embedded.read(path) or "")
    del report["details"]["sha256"]
    return report


def places(value, at=()):
    """Where values stand in a report."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        if isinstance(each, (dict, list)):
            yield from places(each, (*at, key))
        else:
            yield (*at, key)


def changed(report, at, value):
    report = json.loads(json.dumps(report))
    if not at:
        return None if value is GONE else value
    place = report
    for key in at[:-1]:
        place = place[key]
    if value is GONE:
        del place[at[-1]]
    else:
        place[at[-1]] = value
    return report


def written(report, path, content):
    """The export with another report, and with hashes that fit it."""
    if content is not None:
        path.write_bytes(content)
        embedded.append_zip(path, json.dumps(report))
        return
    (path / "pax_export.json").write_text(json.dumps(report))
    if (path / "SHA256SUMS").exists():
        rehash(path)


def used(path):
    """Everything that reads it; a PaxError is what they may raise."""
    with contextlib.suppress(PaxError):
        str(Report.read(path))
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as told,
    ):
        main(["inspect", str(path)])
    assert "failed unexpectedly" not in told.getvalue()
    with contextlib.suppress(PaxError):
        load(path)(X)
    with contextlib.suppress(PaxError):
        recheck.Rechecked(path)
    if path.name == "bundle":
        with contextlib.suppress(PaxError):
            renew(path)


@pytest.mark.parametrize("name", ["saved", "bundle", "m.tflite"])
def test_changed_reports(whole, tmp_path, monkeypatch, name):
    def here(format, place, calls, mode):
        return serve.run_each(import_function(format.run), str(place), calls)

    monkeypatch.setattr(recheck, "in_process", here)
    path, content = tmp_path / name, None
    report = report_of(whole / name)
    if name == "m.tflite":
        text = embedded.read(whole / name)
        content = (whole / name).read_bytes()[: -len(embedded._zip_archive(text.encode(), 0))]
    all_places = list(places(report))
    for seed in range(runs(short=40, long=3000)):
        draw = chance.Random(seed)
        at, value = draw.choice(all_places), draw.choice(VALUES)
        if path.is_dir():
            shutil.rmtree(path)
        shutil.copytree(whole / name, path) if content is None else None
        written(changed(report, at, value), path, content)
        try:
            used(path)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {at} = {str(value)[:50]}: {error!r}") from error
