"""Programs written for PAX run after `install_as_pax`, and print what they print with PAX.

`printed_by_pax/` holds what PAX 0.5.9 and opax 0.2.11 print for `programs/` on
jax 0.4.30, the last but few that PAX runs on, with JAX_THREEFRY_PARTITIONABLE=1,
which is how jax draws random numbers today.
"""

import re

import pytest

from tests.closeness import assert_close
from tests.compat.processes import PROGRAMS, code
from tests.hard.size import IN_LONG_RUNS

#: What lines of modules have here, and not in PAX: names of attributes, sizes, counts.
_MORE = re.compile(
    r"(?<=── )[\w.]+: |(?<=GroupNorm)\(.*data_format=\w+\)|\((?:parameters|state)=[^)]*\)"
)
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")


def require_alike(printed, program):
    """The same text, and the same numbers to 1e-3."""
    expected = (program.parent.parent / "printed_by_pax" / f"{program.stem}.txt").read_text()
    printed = _MORE.sub("", printed)
    assert _NUMBER.sub("#", printed) == _NUMBER.sub("#", expected)
    ours, theirs = (list(map(float, _NUMBER.findall(text))) for text in (printed, expected))
    assert_close(ours, theirs, atol=1e-3)
    assert len(theirs) >= 5


# Most of the time of all, for layers and steps that the others take as well: for long runs.
LONG = ("gpt", "loss_scaling")

RUN_TOGETHER = [program for program in PROGRAMS if IN_LONG_RUNS or program.stem not in LONG]


@pytest.fixture(scope="module")
def printed_after_install(tmp_path_factory):
    """What each of them prints in one process that called `install_as_pax`."""
    text = "\n".join(
        [
            "import runpy, pax_export",
            "pax_export.install_as_pax()",
            *(
                f"runpy.run_path({str(p)!r}, run_name='__main__'); print('====')"
                for p in RUN_TOGETHER
            ),
        ]
    )
    lines = code(text, cwd=tmp_path_factory.mktemp("programs"))
    return dict(zip(RUN_TOGETHER, "\n".join([*lines, ""]).split("====\n")))


@pytest.mark.parametrize("program", RUN_TOGETHER, ids=lambda path: path.stem)
def test_install_as_pax(program, printed_after_install):
    require_alike(printed_after_install[program], program)
