"""What tox.ini cannot say: where pyenv keeps its interpreters, and that CI skips none.

tox loads this file by its name.  It looks for interpreters on PATH, where
pyenv puts shims that work for the version chosen by the user alone; the
interpreters themselves are one directory deeper.  They go to the end of PATH,
so that an interpreter which the user did put there still comes first.
"""

from __future__ import annotations

import os
from pathlib import Path

from tox.config.sets import ConfigSet
from tox.plugin import impl
from tox.session.state import State


def pyenv_interpreters() -> list[str]:
    """The directories of pyenv's interpreters, the newest version first."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [path.parent for path in root.glob("versions/[0-9]*/bin/python")]
    return [str(path) for path in sorted(found, key=_version, reverse=True)]


def _version(directory: Path) -> list[int]:
    return [int(part) for part in directory.parent.name.split(".") if part.isdigit()]


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Offers pyenv's interpreters, and lets a missing one fail where CI is set."""
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *pyenv_interpreters()])
    if os.environ.get("CI") and state.conf.options.skip_missing_interpreters == "config":
        state.conf.options.skip_missing_interpreters = "false"
