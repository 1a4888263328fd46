"""Every ```python block of README and docs/ runs, and prints what stands under it."""

from __future__ import annotations

import jax
import pytest

from tests.docs.pages import ROOT, PageError, blocks, pages, run
from tests.refusals import refused

WITH_CODE = [page for page in pages() if any(blocks(page))]


@pytest.fixture
def quick_compiler():
    """What pages show hardly depends on how well XLA compiles, and it takes less time."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "docs/idea.md"])
def test_page_that_must_show_code_does(name):
    assert ROOT / name in WITH_CODE


def test_no_block_is_empty():
    empty = [page.name for page in pages() if "```text\n```\n" in page.read_text()]
    assert not empty


@pytest.fixture
def write(tmp_path):
    def write(text):
        page = tmp_path / "page.md"
        page.write_text(text)
        return page

    return write


def test_failure_names_the_page_and_the_line(write):
    page = write(
        "# Title\n\n```python\na = 1\n```\n\nwords\n\n```python\na = 2\n\nassert a == 3\n```\n"
    )
    with pytest.raises(PageError):
        run(page)


def test_failure_inside_a_called_function_names_its_line(write):
    page = write("```python\ndef f():\n    return {}['x']\n\nf()\n```\n")
    with pytest.raises(PageError):
        run(page)


def test_syntax_error_names_its_line(write):
    page = write("text\n```python\na = 1\nb =\n```\n")
    with pytest.raises(PageError):
        run(page)


def test_blocks_of_a_page_share_one_namespace_and_pages_do_not(write):
    run(write("```python\nshared = 1\n```\n```python\nassert shared == 1\n```\n"))
    with refused(PageError, "NameError"):
        run(write("```python\nshared\n```\n"))


def test_only_python_blocks_run(write):
    run(write("```sh\nexit 1\n```\n\n```text\nnot python\n```\n"))


SHOWN = "```python\nprint({!r})\n```\n\n```text\n{}\n```\n"


@pytest.mark.parametrize(
    "printed, shown",
    [
        ("two\nlines \n", "two\nlines"),
        ("a loss of 0.01234", "a loss of ..."),
        ("a loss of 0.01234 after 3 s", "a loss of 0.01235 after ... s"),
        ("moments   1.0e-03, 12.3456", "moments 1.0e-03, 12.3450"),
        ("first\n1\n2\nlast", "first\n...\nlast"),
        ("the largest error 1.2e-07 of 3", "the largest error 2.4e-07 of 3"),
        ("  made by     jax 0.12.1, jaxlib 0.12", "  made by     jax 0.12.0.1, jaxlib 0.12.0.1"),
        ("right: 83%", "right: 81%"),
        ("(a|b) [c] \\d*", "(a|b) [c] \\d*"),
    ],
)
def test_printed_output_may_be_shown(write, printed, shown):
    run(write(SHOWN.format(printed, shown)))


@pytest.mark.parametrize(
    "printed, shown",
    [
        ("two", "three"),
        ("two\nlines", "two"),
        ("", "nothing prints this"),
        ("a loss of 0.01234", "a loss of 0.01134"),
        ("TensorFlow 2.16", "TensorFlow 2.15"),  # few digits: no number that was rounded
        ("jax 0.12.0.1", "jax 0.12.1.1"),
        ("1234 weights", "1235 weights"),
        ("right: 73%", "right: 81%"),
        ("  made by     jax 0.12.1", "  made by     flax 0.12.1"),
    ],
)
def test_another_output_is_an_error(write, printed, shown):
    with pytest.raises(PageError):
        run(write(SHOWN.format(printed, shown)))


@pytest.mark.parametrize("between", ["", "words\n\n```text\nforgotten\n```\n"])
def test_printed_output_is_compared(write, between):
    with refused(PageError, "+forgotten"):
        run(write(f"```python\nprint('forgotten')\n```\n\n{between}"))
