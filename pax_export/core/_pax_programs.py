"""Detects programs written for PAX, for the few places with PAX's behavior."""

_run = False


def run_pax_programs() -> None:
    """From here on modules print, and states load, as programs of PAX know it.

    Such a program keeps, say, the last alignment as a state, whose size is that of the last
    batch: a state has the shape and dtype that it was saved with.  A parameter of another
    shape is a mistake there as well.
    """
    global _run
    _run = True


def runs_pax_programs() -> bool:
    """Whether `run_pax_programs` was called."""
    return _run
