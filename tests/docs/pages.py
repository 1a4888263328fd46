"""The pages that hold code, and how the code of one page is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One ```python block: where its first line stands, and its code."""

    page: Path
    line: int
    code: str


class PageError(Exception):
    """A block failed; the message names the page and the line."""


def pages() -> list[Path]:
    """README, the contributor's page and the written pages of docs/."""
    written = sorted((ROOT / "docs").rglob("*.md"))
    generated = {ROOT / "docs" / "_build", ROOT / "docs" / "api" / "generated"}
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(page for page in written if generated.isdisjoint(page.parents)),
    ]


def blocks(page: Path) -> Iterator[Block]:
    """The ```python blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        first_line = text.count("\n", 0, match.start("code")) + 1
        yield Block(page, first_line, match["code"])


def run(page: Path) -> None:
    """Runs the blocks of a page in one namespace, as a reader would type them.

    Raises:
        PageError: a block failed; its cause is the block's own exception.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        _run(block, namespace)


def _run(block: Block, namespace: dict[str, object]) -> None:
    # Empty lines in front let tracebacks count lines as the page does.
    source = "\n" * (block.line - 1) + block.code
    try:
        exec(compile(source, str(block.page), "exec"), namespace)
    except Exception as error:
        where = f"{block.page.name}:{_line_of(error, block)}"
        raise PageError(f"{where}: {type(error).__name__}: {error}") from error


def _line_of(error: Exception, block: Block) -> int:
    """The line of the page that was running when the error came."""
    if isinstance(error, SyntaxError):
        return error.lineno or block.line
    line, trace = block.line, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(block.page):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
