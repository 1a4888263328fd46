"""What a block of a page prints, beside the text that stands under it.

In that text `...` is anything, as in a doctest, and runs of spaces are one: tables get wider
where a number does.  Numbers may differ as far as another machine makes them differ:

- one with a point and four digits or more by one percent; shorter ones are versions and sizes,
  and are what they are;
- a share in percent by three points;
- in a line that tells what was measured, or which versions wrote something, by anything.

A line of what validation left out is ignored: a slow machine leaves out more.
"""

from __future__ import annotations

import difflib
import re

from tests.closeness import is_close

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
