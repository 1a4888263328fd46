"""Detects programs written for PAX, for the few places with PAX's behavior."""

_run = False


def run_pax_programs() -> None:
    """Makes modules print as in PAX, and lets states load with other shapes, as PAX does."""
    global _run
    _run = True


def runs_pax_programs() -> bool:
    """Whether `run_pax_programs` was called."""
    return _run
