"""Reports of others: every type is checked, and nothing in one leads to a traceback."""

import contextlib
import copy
import io
import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pax_export.cli import main
from pax_export.export import Report, spec, to_stablehlo
from pax_export.export.artifact import embedded, structure
from tests.hard.size import runs
from tests.refusals import refused


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int | str, ...]
    pair: tuple[int, bool] = (0, False)


@dataclass(frozen=True)
class Outer:
    inner: dict[str, Inner]
    state: Literal["on", "off"] | None
    number: float = 0.0
    anything: Any = None


def test_a_dataclass_in_a_dataclass():
    data = {
        "inner": {"a": {"name": "b", "sizes": [1, "n"], "pair": [3, True]}},
        "state": None, "number": 2, "anything": [{"c": 1}],
    }  # fmt: skip
    assert structure.read(Outer, data) == Outer(
        {"a": Inner("b", (1, "n"), (3, True))}, None, 2.0, [{"c": 1}]
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("inner",), [], "the report.inner is not an object"),
        (("inner", "a"), 3, "the report.inner.a is not an object"),
        (("inner", "a", "name"), None, "the report.inner.a.name is not of type str"),
        (("inner", "a", "sizes"), "no", "the report.inner.a.sizes is not a list"),
        (("inner", "a", "sizes"), [True], "the report.inner.a.sizes.0 is not of type int"),
        (("inner", "a", "sizes"), [2**63], "the report.inner.a.sizes.0 is too large a number"),
        (("inner", "a", "pair"), [1], "the report.inner.a.pair has 1 members instead of 2"),
        (("inner", "a", "more"), 1, "the report.inner.a has 'more', which is not known here"),
        (("inner", "a"), {"name": "b"}, "the report.inner.a has no 'sizes'"),
        (("state",), "broken", "the report.state is none of 'on', 'off'"),
        (("number",), "1", "the report.number is not of type float"),
        (("anything",), json.loads("[" * 200 + "]" * 200), "is nested too deeply"),
        (("anything",), ["\ud800"], "surrogates not allowed"),
    ],
)
def test_wrong_types_are_named(path, value, message):
    data: Any = {"inner": {"a": {"name": "b", "sizes": [1]}}, "state": "on"}
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with refused(ValueError, message):
        structure.read(Outer, data)


# --- any report -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "out"

    def call(params, batch, *, scale=1.0):
        return {"y": (batch["x"] * scale + params["w"], None), "n": batch["ids"][0]}

    to_stablehlo(
        ({"w": 1.0}, call), path, {"x": spec("n, 3"), "ids": [spec("n", "int32")]},
        kwargs={"scale": spec("")}, constraints=("n <= 64",), validate=False,
    )  # fmt: skip
    return json.loads((path / "pax_export.json").read_text())


def paths(value, prefix=()):
    yield prefix
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(each, (*prefix, key))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from([2**63, 10**400, -1, "\ud800", "\x1b[2J", "?", "n", {"leaf": "x"}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def inspected(path):
    """Both forms of `inspect`: no traceback, one line of error, nothing that a terminal obeys."""
    for form in ([], ["--json"]):
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = main(["inspect", str(path), *form])
        assert code in (0, 1)
        assert len(error.getvalue().splitlines()) == code
        assert "\x1b" not in out.getvalue() + error.getvalue()
        (out.getvalue() + error.getvalue()).encode()


@settings(
    max_examples=runs(short=100, long=2500), deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_no_mutation_of_a_report_leads_to_a_traceback(report, tmp_path, data):
    changed = copy.deepcopy(report)
    every = [path for path in paths(changed) if path]
    for path in data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=3)):
        place = changed
        try:
            for step in path[:-1]:
                place = place[step]
            if data.draw(st.booleans()):
                place[path[-1]] = data.draw(anything)
            else:
                del place[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken this place away
    (tmp_path / "pax_export.json").write_text(json.dumps(changed))
    inspected(tmp_path)


def test_round_trip_of_a_report(report, tmp_path):
    (tmp_path / "pax_export.json").write_text(json.dumps(report))
    assert json.loads(json.dumps(Report.read(tmp_path).as_dict())) == report


@pytest.fixture(scope="module")
def file(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("file")
    for name, append in (("zip", embedded.append_zip), ("field", embedded.append_field)):
        (path / name).write_bytes(b"\x08\x07")
        append(path / name, json.dumps(report))
    return path


@pytest.mark.parametrize("kind", ["zip", "field"])
@settings(
    max_examples=runs(short=50, long=1000), deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(data=st.data())
def test_no_damage_to_a_file_leads_to_a_traceback(file, tmp_path, kind, data):
    content = bytearray((file / kind).read_bytes())
    # Half of the damage goes where the archive says what is in it.
    length = len(content)
    place = st.integers(0, length - 1) | st.integers(max(0, length - 120), length - 1)
    for at in data.draw(st.lists(place, min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, length - 1)) :]
    damaged = tmp_path / "model.bin"
    damaged.write_bytes(content)
    inspected(damaged)
