"""CHANGELOG.md: its versions, their notes, and what keeps one from being released."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

NAME = "CHANGELOG.md"
UNRELEASED = "Unreleased"

_HEADING = re.compile(r"^## \[(?P<version>[^\]\n]+)\](?: - (?P<date>.*\S))?[ \t]*$", re.MULTILINE)
_RELEASE = re.compile(r"\d+\.\d+\.\d+")


@dataclass(frozen=True)
class Section:
    """One version: what stands between its heading and the next."""

    version: str
    date: str | None
    notes: str


def sections(text: str) -> list[Section]:
    """The versions of a changelog, in its order, the newest first."""
    found = list(_HEADING.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return [
        Section(match["version"], match["date"], text[match.end() : end].strip())
        for match, end in zip(found, ends)
    ]


def notes(text: str, version: str) -> str:
    """What a changelog says of a version; empty if it says nothing."""
    return next((each.notes for each in sections(text) if each.version == version), "")


def faults(text: str, version: str) -> list[str]:
    """What is not right for a release of this version, with what to write."""
    if not _RELEASE.fullmatch(version):
        return [
            f"{version} is no version to release: write one like 0.1.0 as __version__ "
            "in pax_export/__init__.py"
        ]
    waiting, released = _split(sections(text))
    found = [_waits(version)] if waiting else []
    if not released or released[0].version != version:
        return [*found, _other_version(version, released)]
    if not _is_date(released[0].date):
        found.append(f"{NAME} has no date for {version}: write {_heading(version)}")
    if not released[0].notes:
        found.append(f"{NAME} says nothing of {version}: write what is new under its heading")
    return found


def _split(found: list[Section]) -> tuple[str, list[Section]]:
    """What waits for a version, and the versions."""
    waiting = "".join(each.notes for each in found if each.version == UNRELEASED)
    return waiting, [each for each in found if each.version != UNRELEASED]


def _waits(version: str) -> str:
    return (
        f"{NAME} has lines under [{UNRELEASED}] that no notes would show: "
        f"move them under {version}, or under a version that is newer"
    )


def _other_version(version: str, released: list[Section]) -> str:
    newest = f"the newest in {NAME} is {released[0].version}" if released else f"{NAME} has none"
    return (
        f"pax_export/__init__.py has version {version}, {newest}: "
        f"write {_heading(version)} with its notes, or the other version as __version__"
    )


def _heading(version: str) -> str:
    return f'"## [{version}] - {datetime.date.today()}"'


def _is_date(text: str | None) -> bool:
    try:
        return str(datetime.date.fromisoformat(text or "")) == text
    except ValueError:
        return False
