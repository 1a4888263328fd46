"""``python -m pax_export`` is the command ``pax-export``."""

import sys

from pax_export.cli import main

sys.exit(main())
