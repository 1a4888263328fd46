"""A release in one command: ``tox -e release``.

`changelog` and `sources` say whether there is something to release, `building` makes the
two files, `contents` checks them, `trial` uses them as somebody would who has nothing else.
"""


class ReleaseError(Exception):
    """What stops a release: one line for each thing that must be put right."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def refuse(faults: list[str]) -> None:
    """Stops the release where there are faults."""
    if faults:
        raise ReleaseError(faults)
