"""Atomic writes of files and directories."""

from pax_export._files import (
    checksums,
    directory,
    disk,
    html_text,
    overwrite_guard,
    single_file,
    stale_temporaries,
    system,
)
from pax_export._files.disk import bytes_text
