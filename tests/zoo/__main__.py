"""`python -m tests.zoo` tries all published nets, and writes results.json and docs/zoo.md."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.zoo import page
from tests.zoo.collection import ZOO
from tests.zoo.trial import attempt

nets = {}
for trained in ZOO:
    with tempfile.TemporaryDirectory() as folder:
        nets[trained.name] = attempt(trained, Path(folder))
    print(trained.name, nets[trained.name], flush=True)
versions = {name: version(name) for name in page.PACKAGES}
page.write({"versions": versions, "nets": nets})
page.PAGE.write_text(page.render(page.read()), encoding="utf-8")
