"""The one thing that setup.cfg cannot say: how the C file is built.

It is optional: where there is no compiler, or no header of Python, setuptools
warns and goes on, and the functions of Python in `core/_tree.py` do the work.
"""

import sysconfig

from setuptools import Extension, setup

# One file built with the stable interface serves Python 3.11 and all later ones.
# Pythons without the global lock have no such interface yet.
stable = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "pax_export.core._round_trip",
            sources=["pax_export/core/_round_trip.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if stable else [],
            py_limited_api=stable,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable else {},
)
