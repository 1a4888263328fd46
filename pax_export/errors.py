"""Public error and warning classes.

`PaxError` is the root of the errors, `PaxWarning` that of the warnings.  The page "Errors"
of the API reference says of each what causes it and what to do.

Example:
    >>> import pax_export as pax
    >>> try:
    ...     pax.Linear(2, 3).replace(wieght=0)
    ... except pax.errors.InvalidArgumentError as error:
    ...     print(error.where)
    Linear.wieght
"""

from __future__ import annotations

from pax_export._foundations.errors import *
from pax_export._foundations.errors import PaxError, PaxWarning

__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name
    for name, value in vars().items()
    if isinstance(value, type) and issubclass(value, (PaxError, PaxWarning))
)
