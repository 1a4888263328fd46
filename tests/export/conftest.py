import pytest

from pax_export.export import load, to_saved_model


@pytest.fixture
def export(tmp_path):
    def run(model, inputs, **options):
        options.setdefault("validate", False)
        report = to_saved_model(model, tmp_path / "model", inputs, **options)
        return load(tmp_path / "model"), report

    return run
