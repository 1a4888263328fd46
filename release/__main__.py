"""Makes and tries a release: ``python -m release [--rehearse]``; uploads nothing."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from release import ReleaseError, building, changelog, contents, refuse, sources, trial

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str]) -> int:
    """Runs all steps; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="go on where sources or CHANGELOG are not ready, and leave nothing in dist/",
    )
    rehearsal = parser.parse_args(arguments).rehearse
    try:
        release(ROOT, rehearsal)
    except ReleaseError as error:
        return _stopped(str(error))
    except subprocess.CalledProcessError as error:
        return _stopped(f"this failed, with status {error.returncode}: {' '.join(error.cmd)}")
    return 0


def release(root: Path, rehearsal: bool) -> None:
    """Checks, builds, tries, and leaves the files in dist/, or none.

    Raises:
        ReleaseError: something must be put right first.
        subprocess.CalledProcessError: a tool failed, and has printed why.
    """
    dist = root / "dist"
    shutil.rmtree(dist, ignore_errors=True)  # files of another release must not go along
    version = sources.version(root)
    ready(root, version, rehearsal)
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        files = made(root, Path(name), version)
        for kind, file in zip(("sdist", "wheel"), files):
            _say(f"trying the {kind}: a new environment, the digits example")
            place = Path(name) / f"try-{kind}"
            place.mkdir()
            refuse(trial.try_out(file, root / "examples", place, version))
        if not rehearsal:
            dist.mkdir()
            files = [Path(shutil.copy(file, dist)) for file in files]
        show(root, version, files, rehearsal)


def ready(root: Path, version: str, rehearsal: bool) -> None:
    """Checks version, CHANGELOG and git; a rehearsal only says what is not ready.

    Raises:
        ReleaseError: the sources are not ready.
    """
    _say(f"pax-export {version}: version, CHANGELOG and git")
    text = (root / changelog.NAME).read_text(encoding="utf-8")
    found = [*changelog.faults(text, version), *sources.faults(root, version)]
    if not rehearsal:
        refuse(found)
    for fault in found:
        print(f"would stop a release: {fault}", flush=True)


def made(root: Path, place: Path, version: str) -> list[Path]:
    """Builds and checks the sdist and the wheel.

    Raises:
        ReleaseError: one of them is not what it should be.
    """
    _say("building the sdist, and from it the wheel")
    source = sources.copy(root, place / "source")
    sdist, wheel = building.build(source, place / "built")
    _say("checking both")
    building.audit(sdist, wheel)
    refuse(
        [
            *contents.sdist_faults(sdist, source, version),
            *contents.wheel_faults(wheel, source, version),
        ]
    )
    return [sdist, wheel]


def show(root: Path, version: str, files: list[Path], rehearsal: bool) -> None:
    """Prints the files, the notes, and what to write to publish them."""
    _say("all is well")
    for file in files:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        print(f"{file.name}\n  {file.stat().st_size} bytes, sha256 {digest}")
    notes = changelog.notes((root / changelog.NAME).read_text(encoding="utf-8"), version)
    print(f"\nNotes of {version}:\n\n{notes}\n")
    if rehearsal:
        print("This was a rehearsal: nothing is left in dist/.")
        return
    python = os.path.relpath(sys.executable, root)
    print("To publish:\n")
    print(f'git tag --annotate v{version} --message "pax-export {version}"')
    print(f"git push origin v{version}")
    print(f"{python} -m twine upload {' '.join(f'dist/{file.name}' for file in files)}")


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _stopped(text: str) -> int:
    print(f"\nno release, and nothing in dist/:\n{text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
