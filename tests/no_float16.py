"""Tests that need float16 are skipped where XLA compiles none at all.

So it is for processors without F16C, and with XLA_FLAGS=--xla_cpu_max_isa=SSE4_2 for any.
A plugin, since hooks of a conftest.py hear nothing of the doctests of pax_export.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

# The functions that LLVM calls where the processor converts no float16, and XLA does not have.
_SAYS_SO = re.compile(r"__truncsfhf2|__extendhfsf2|Failed to materialize symbols")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed and not _compiles_float16():
        if _SAYS_SO.search(report.longreprtext + report.capstderr):
            reason = "Skipped: XLA compiles no float16 for this processor or these XLA_FLAGS"
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, reason)
    return report


@functools.cache
def _compiles_float16():
    try:
        jax.jit(lambda x: x.astype(jnp.float16))(jnp.ones(2)).block_until_ready()
    except jax.errors.JaxRuntimeError:
        return False
    return True
