"""The page for users of PyTorch, with its blocks of PyTorch, which other environments skip."""

from __future__ import annotations

import pytest

from tests.docs.pages import ROOT, run

pytest.importorskip("torch")


def test_the_page_runs_with_its_blocks_of_pytorch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "from_pytorch.md"
    text = (ROOT / "docs/guide/from_pytorch.md").read_text()
    page.write_text(text.replace("```py\n", "```python\n"))
    run(page)
