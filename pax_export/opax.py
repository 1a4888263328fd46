"""opax, running on this package: ``from pax_export import opax``.

What is imported under this name is opax itself, loaded by `optim/_opax.py`; its
modules are those of this package, and nothing is left under the names ``opax``
and ``pax`` in `sys.modules`.
"""

import sys

from pax_export.optim import load_opax

load_opax(sys.modules[__name__])
