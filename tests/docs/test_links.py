"""Names in backticks mean what the reference lists, and those of others have an address."""

from __future__ import annotations

import functools
import re

import pytest

from tests.docs.pages import ROOT, blocks, extension, pages

OURS = extension("ours")
THEIRS = extension("theirs")
NAMES = OURS.Ours(ROOT / "docs" / "api")
_FENCE = re.compile(r"^(```+).*?^\1$", re.M | re.S)
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# Names of PAX and of what is no attribute: files, groups of entry points, names that went.
_NO_NAMES = {
    "pax_export.json",
    "pax_export.html",
    "pax_export.formats",
    "pax_export.opax",
    "pax.utils",
    "pax.export.symbolic_numpy",
}


def written(page):
    """The code in backticks of a page, outside of its blocks."""
    return _CODE.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))


@functools.cache
def imports(page):
    return OURS.imported(block.code for block in blocks(page))


def place(page):
    return str(page.relative_to(ROOT / "docs").with_suffix(""))


SITE = [page for page in pages() if page.is_relative_to(ROOT / "docs")]


@pytest.mark.parametrize("page", SITE, ids=place)
def test_a_name_of_ours_means_something(page):
    code = [text for text in written(page) if re.match(r"(pax|pax_export)\.\w", text)]
    lost = [text for text in code if not NAMES.find(text, imports(page), place(page))]
    assert sorted(set(lost) - _NO_NAMES) == []


def test_links_are_many():
    found = [
        NAMES.find(text, imports(page), place(page)) for page in SITE for text in written(page)
    ]
    assert sum(map(bool, found)) > 400


@pytest.mark.parametrize(
    "text, name",
    [
        ("pax.Linear", "pax_export.Linear"),
        ("pax.inspect(path)", "pax_export.inspect"),
        ("pax_export.transforms.grad", "pax_export.grad"),
        ("@pax.pure", "pax_export.pure"),
        ("sharding.cost", "pax_export.sharding.cost"),
        ("Decoder.from_gguf", "pax_export.nets.Decoder.from_gguf"),
        ('net.at("head")', "pax_export.Module.at"),
        ("save_weights", "pax_export.save_weights"),
        ("ValidationError", "pax_export.errors.ValidationError"),
        ("pax.sharding", "pax_export.sharding"),
        ("T.Any", "pax_export.transforms.Any"),
    ],
)
def test_a_name_is_found(text, name):
    assert NAMES.find(text, {"T": "pax_export.transforms"}) == name


@pytest.mark.parametrize(
    "text",
    [
        "Any",
        "load",
        "pax",
        "pax.nothing",
        "net.head",
        "top_k",
        "print(net)",
        "jax.jit",
        "a.b",
        "x + 1",
    ],
)
def test_names_of_others_are_no_links(text):
    assert NAMES.find(text) is None


def test_a_page_about_a_room_says_its_names_alone():
    assert NAMES.find("load", page="guide/exporting") == "pax_export.export.load"
    assert NAMES.find("greedy()", {"greedy": "pax_export.generation.samplers.greedy"})
    assert NAMES.find("scan", {"scan": "jax.lax.scan"}) is None


@pytest.mark.parametrize(
    "text, end",
    [
        ("jax.jit(f)", "jax.dev/en/latest/_autosummary/jax.jit.html"),
        ("jnp.where", "jax.dev/en/latest/_autosummary/jax.numpy.where.html"),
        ("jax.numpy", "jax.dev/en/latest/jax.numpy.html"),
        ("jax.sharding.Mesh", "jax.dev/en/latest/jax.sharding.html#jax.sharding.Mesh"),
        ("np.savez", "numpy.org/doc/stable/reference/generated/numpy.savez.html"),
        ("np.int64", "numpy.org/doc/stable/reference/arrays.scalars.html#numpy.int64"),
        ("optax.adam(1e-3)", "optax.readthedocs.io/en/latest/api/optimizers.html#optax.adam"),
        ("tf.saved_model.load", "tensorflow.org/api_docs/python/tf/saved_model/load"),
        ("functools.partial", "python.org/3/library/functools.html#functools.partial"),
    ],
)
def test_a_name_of_others_has_an_address(text, end):
    assert THEIRS.address(text).startswith("https://")
    assert THEIRS.address(text).endswith(end)


@pytest.mark.parametrize(
    "text",
    [
        "jax.nothing",
        "jax._src.core.Jaxpr",
        "np",
        "x.shape",
        "jax.util",
        "jax.ad",
        "tf.python.module.Module",
    ],
)
def test_unknown_names_have_no_address(text):
    assert THEIRS.address(text) is None


def test_typing_any_is_not_the_filter():
    assert THEIRS.python("typing.Any").endswith("library/typing.html#typing.Any")


def test_names_of_optax_and_tensorflow_are_there():
    site = {text.partition("(")[0] for page in SITE for text in written(page)}
    without = [name for name in site if name.startswith("optax.") and not THEIRS.address(name)]
    assert without == []
    known = [f"optax.{name}" for name in THEIRS._OPTAX_HOMES]
    known += [name.replace("tf.", "tensorflow.", 1) for name in site if name.startswith("tf.")]
    assert [name for name in known if THEIRS.value_of(name) is None] == []
