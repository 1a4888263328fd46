"""Writing files: a path in, out of it a file or folder that is there whole or not at all."""

from pax_export._files import (
    bounded,
    checksums,
    directory,
    disk,
    file_types,
    html_text,
    overwrite_guard,
    signature_file,
    single_file,
    stale_temporaries,
)
from pax_export._files.sizes import bytes_text
