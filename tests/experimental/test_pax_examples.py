"""The examples in PAX's documentation of its experimental part run as written."""

from pathlib import Path

from tests.compat.processes import code

EXAMPLES = Path(__file__).with_name("pax_examples.txt")


def test_the_examples_run_as_written():
    """In a process of its own, as what is imported as `pax` stays imported."""
    *failures, result = code(
        "import doctest, pax_export; pax_export.install_as_pax();"
        "flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE;"
        f"print(doctest.testfile({str(EXAMPLES)!r}, module_relative=False,"
        " optionflags=flags, encoding='utf-8'))"
    )
    assert result.startswith("TestResults(failed=0, attempted="), "\n".join([*failures, result])
    assert int(result.split("attempted=")[1].strip(")")) == EXAMPLES.read_text().count(">>> ")
