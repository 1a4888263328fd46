"""The one thing that setup.cfg cannot say: how the C file is built.

It is optional: where there is no compiler, or no header of Python, setuptools
warns and goes on, and functions of Python do the work.
"""

import sysconfig

from setuptools import Extension, setup

# A file built with the stable interface serves Python 3.11 and all later ones.
# Pythons without the global lock have no such interface yet.
stable = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            f"pax_export.{name}",
            sources=[f"pax_export/{name.replace('.', '/')}.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if stable else [],
            py_limited_api=stable,
            optional=True,
        )
        for name in ("core._round_trip",)
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable else {},
)
