"""The page of an inspection, as a browser reads it; skipped where there is none, and in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

import pax_export as pax

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Rows(HTMLParser):
    """Counts the rows in what a browser made of a page."""

    def __init__(self):
        super().__init__()
        self.rows = self.open = 0

    def handle_starttag(self, tag, attributes):
        self.rows += tag == "div" and "row" in (dict(attributes).get("class") or "").split()
        self.open += tag == "details" and "open" in dict(attributes)


@pytest.mark.skipif(CHROMIUM is None or "CI" in os.environ, reason="no Chromium here, or in CI")
def test_every_row_is_in_the_page(tmp_path):
    found = pax.inspect(pax.nets.ResNet18(3, 10), pax.export.spec("batch, 3, 32, 32"))
    path = found.save_html(tmp_path / "net.html")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    seen = Rows()
    seen.feed(done.stdout)
    assert seen.rows == len(found) + 1  # and the titles
    assert 0 < seen.open < len(found)
