import time
import types

import pytest

from pax_export.export.pipeline import phases as showing
from pax_export.export.pipeline.phases import Progress


def test_a_short_save_is_silent(capfd):
    with Progress(2) as progress, progress.phase("trace"):
        pass
    assert capfd.readouterr().err == ""
    assert list(progress.seconds) == ["trace"]


def test_a_long_save_names_its_phases(capfd):
    with Progress(3, patience=0.05) as progress:
        with progress.phase("trace"):
            pass
        with progress.phase("lower"):
            time.sleep(0.3)
        with progress.phase("write"):
            pass
    assert capfd.readouterr().err.splitlines() == [
        "pax_export: lower (2/3)",
        "pax_export: write (3/3)",
    ]
    assert progress.seconds["lower"] >= 0.3


def test_a_runtime_is_announced_before_its_import(capfd):
    with Progress(2, patience=60) as progress:
        with progress.phase("write"):
            pass
        with progress.loading("a runtime", "runtime_that_is_not_imported"):
            assert capfd.readouterr().err == "pax_export: load a runtime (2/2)\n"
    with Progress(1, patience=60) as progress, progress.loading("pytest", "pytest"):
        pass
    assert capfd.readouterr().err == ""


def test_a_phase_keeps_its_number_when_it_is_over_or_comes_again(capfd):
    with Progress(2, patience=0.05) as progress:
        for name in ("lower", "write"):
            with progress.phase(name):
                pass
        time.sleep(0.3)  # patience ends between two phases
        with progress.phase("lower"):
            pass
    assert capfd.readouterr().err.splitlines() == [
        "pax_export: write (2/2)",
        "pax_export: lower (1/2)",
    ]


def test_an_export_within_another_one_shows_nothing(capfd):
    with Progress(2, patience=60) as outer, outer.phase("write"):
        with Progress(2, patience=60) as inner, inner.loading("a runtime", "not_imported"):
            pass
        with outer.loading("a runtime", "not_imported"):
            pass
    with Progress(1, patience=60) as later, later.loading("another", "not_imported"):
        pass
    assert capfd.readouterr().err.splitlines() == [
        "pax_export: load a runtime (2/2)",
        "pax_export: load another (1/1)",
    ]


def test_a_terminal_gets_a_bar(capfd, monkeypatch):
    monkeypatch.setattr(showing.sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(2, patience=0.0) as progress, progress.phase("lower"):
        deadline = time.monotonic() + 10
        while progress._shown is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert isinstance(progress._shown, showing._Bar)
    assert progress._shown is None


def test_without_rich_a_terminal_gets_lines(monkeypatch):
    monkeypatch.setitem(showing.sys.modules, "rich.progress", None)
    monkeypatch.setattr(showing.sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(showing._choose_display(2), showing._Lines)


class Notebook:
    """IPython as a kernel has it, and what is then seen in the cell."""

    def __init__(self):
        self.kernel, self.outputs = self, []

    def __call__(self, content, raw, display_id):
        assert raw and display_id
        self.outputs.append([content])
        return self

    def update(self, content, raw):
        assert raw
        self.outputs[-1].append(content)


@pytest.fixture
def notebook(monkeypatch):
    made = Notebook()
    package = types.SimpleNamespace(get_ipython=lambda: made)
    monkeypatch.setitem(showing.sys.modules, "IPython", package)
    display = types.SimpleNamespace(display=made)
    monkeypatch.setitem(showing.sys.modules, "IPython.display", display)
    return made


def test_a_notebook_has_a_bar_that_changes_in_place(capfd, notebook):
    with Progress(3, patience=0.05) as progress:
        with progress.phase("lower <this>"):
            time.sleep(0.3)
        with progress.phase("write"):
            pass
    (cell,) = notebook.outputs
    assert [content["text/plain"] for content in cell] == [
        "pax_export: lower <this> (1/3)",
        "pax_export: write (2/3)",
        "",
    ]
    bar = '<progress value="0" max="3"></progress> pax_export: lower &lt;this&gt;'
    assert bar in cell[0]["text/html"]
    assert cell[-1]["text/html"] == ""
    assert capfd.readouterr().err == ""


def test_a_notebook_sees_nothing_of_a_short_save(notebook):
    with Progress(2) as progress, progress.phase("trace"):
        pass
    assert notebook.outputs == []


def test_an_error_empties_the_cell(notebook):
    with pytest.raises(KeyError), Progress(1, patience=0.0) as progress, progress.phase("lower"):
        deadline = time.monotonic() + 10
        while not notebook.outputs and time.monotonic() < deadline:
            time.sleep(0.01)
        raise KeyError
    assert notebook.outputs[0][-1]["text/plain"] == ""


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch):
    package = types.SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(showing.sys.modules, "IPython", package)
    assert isinstance(showing._choose_display(2), showing._Lines)
    monkeypatch.setitem(showing.sys.modules, "IPython", types.SimpleNamespace())  # half loaded
    assert isinstance(showing._choose_display(2), showing._Lines)
