"""The pages that hold code, and how the code of one page is run."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.closeness import is_close

ROOT = Path(__file__).parent.parent.parent

# A ```text block directly under a block of code is what that code prints.
_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One ```python block: where its first line stands, its code, and what is to come of it."""

    page: Path
    line: int
    code: str
    output: str = ""  # what stands under it
    end: int = 0  # where on the page its last line ends


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


def extension(name: str) -> ModuleType:
    """A file of docs/_ext, by which Sphinx makes links of names."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_ext" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: Path) -> Iterator[Block]:
    """The ```python blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        first_line = text.count("\n", 0, match.start("code")) + 1
        after = match.end("code") + len("```")
        yield Block(page, first_line, match["code"], match["output"] or "", after)


def run(page: Path) -> None:
    """Runs the blocks of a page in one namespace, as a reader would type them.

    Raises:
        PageError: a block failed, and its cause is the block's own exception; or it prints
            another thing than stands under it, or prints and nothing stands there.
    """
    for block, printed in printing(page):
        if other := difference(block.output, printed):
            raise PageError(f"{page.name}:{block.line}: it prints something else\n{other}")


def printing(page: Path) -> Iterator[tuple[Block, str]]:
    """Runs the blocks of a page one by one, and gives each with what it printed."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        yield block, _run(block, namespace)


def _run(block: Block, namespace: dict[str, object]) -> str:
    # Empty lines in front let tracebacks count lines as the page does.
    source = "\n" * (block.line - 1) + block.code
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(block.page), "exec"), namespace)
    except Exception as error:
        where = f"{block.page.name}:{_line_of(error, block)}"
        raise PageError(f"{where}: {type(error).__name__}: {error}") from error
    return printed.getvalue()


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


# --- what a block prints, compared with what stands under it ------------------------------


_NUMBER = r"[-+]?\d+\.\d+(?:e[-+]?\d+)?"
_TOKEN = re.compile(
    rf"(?P<any>\.\.\.)|(?P<gap> +)|(?<![\w.])(?:(?P<share>\d+)%|(?P<number>{_NUMBER})(?![\w.]*\w))"
)
_MEASURED = re.compile(
    r" *(made by|mended by|seconds|graph|before|now|runs in +jax)\b"
    r"|.*(largest error| ms on average)"
)


def difference(expected: str, printed: str) -> str:
    """The lines in which the two differ, or nothing."""
    expected, printed = _tidy(expected), _tidy(printed)
    if _fits(expected, printed):
        return ""
    lines = difflib.unified_diff(
        expected.splitlines(), printed.splitlines(), "on the page", "printed", lineterm=""
    )
    return "\n".join(lines)


def _tidy(text: str) -> str:
    lines = (line.rstrip() for line in text.rstrip().splitlines())
    return "\n".join(line for line in lines if not line.lstrip().startswith("left out "))


def _fits(expected: str, printed: str) -> bool:
    allowed: list[tuple[float, float, float]] = []  # the number, its rtol and its atol
    pattern = "\n".join(_pattern(line, allowed) for line in expected.splitlines())
    match = re.fullmatch(pattern, printed, re.DOTALL)
    return match is not None and all(
        is_close(float(got), wanted, rtol=rtol, atol=atol)
        for got, (wanted, rtol, atol) in zip(match.groups(), allowed)
    )


def _pattern(line: str, allowed: list[tuple[float, float, float]]) -> str:
    """A line as a regular expression, whose groups are the numbers that are compared."""
    if _MEASURED.match(line):
        line = re.sub(r"\d[\d.]*(?:e[-+]?\d+)?", "...", line)
    pattern, end = "", 0
    for token in _TOKEN.finditer(line):
        pattern += re.escape(line[end : token.start()])
        end = token.end()
        if token["any"]:
            pattern += ".*?"
        elif token["gap"]:
            pattern += " +"
        elif token["share"]:
            pattern += r"(\d+)%"
            allowed.append((float(token["share"]), 0.0, 3.0))
        elif sum(char.isdigit() for char in token["number"]) < 4:
            pattern += re.escape(token["number"])
        else:
            pattern += f"({_NUMBER})"
            allowed.append((float(token["number"]), 1e-2, 0.0))
    return pattern + re.escape(line[end:])
