from __future__ import annotations

import pytest

from pax_export.export import load, to_saved_model
from pax_export.export.artifact import dimensions


@pytest.fixture
def export(tmp_path):
    """Exports a model into a directory of its own, and loads it again."""

    def run(model, inputs, **options):
        options.setdefault("validate", False)
        report = to_saved_model(model, tmp_path / "model", inputs, **options)
        return load(tmp_path / "model"), report

    return run


@pytest.fixture
def two_sizes(monkeypatch):
    """Exports are validated at two sizes of their dimensions, not at three."""
    monkeypatch.setattr(dimensions, "SIZES", (1, 5))
