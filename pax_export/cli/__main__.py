"""``python -m pax_export.cli`` is ``pax-export``."""

import sys

from pax_export.cli import main

sys.exit(main())
