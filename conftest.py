"""What holds for tests, pages and the examples of docstrings alike."""

import pytest


@pytest.fixture(autouse=True)
def no_program_of_pax(monkeypatch):
    """A page or a docstring that runs `install_as_pax` runs it for itself alone."""
    monkeypatch.setattr("pax_export.core._pax_programs._run", False)
