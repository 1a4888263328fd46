from __future__ import annotations

import pytest

from pax_export.export import load, to_saved_model


@pytest.fixture
def export(tmp_path):
    """Exports a model into a directory of its own, and loads it again."""

    def run(model, inputs, **options):
        options.setdefault("validate", False)
        report = to_saved_model(model, tmp_path / "model", inputs, **options)
        return load(tmp_path / "model"), report

    return run
