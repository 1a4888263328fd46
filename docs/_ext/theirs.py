"""Where other projects document a name; addresses are made by rules, for a build has no network.

A name that its project does not have, or of which no page is known, has no address.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace

_JAX = "https://docs.jax.dev/en/latest/"
_NUMPY = "https://numpy.org/doc/stable/reference/"
_OPTAX = "https://optax.readthedocs.io/en/latest/api/"
_TENSORFLOW = "https://www.tensorflow.org/api_docs/python/"
_PYTHON = "https://docs.python.org/3/library/"

_ALIASES = {"jnp": "jax.numpy", "np": "numpy", "tf": "tensorflow", "lax": "jax.lax"}

# The modules of jax whose functions have a page each, and those that are one page.
_JAX_FUNCTIONS = {
    "jax", "jax.debug", "jax.distributed", "jax.dtypes", "jax.image", "jax.lax",
    "jax.lax.linalg", "jax.nn", "jax.nn.initializers", "jax.numpy", "jax.numpy.fft",
    "jax.numpy.linalg", "jax.profiler", "jax.random", "jax.scipy.linalg", "jax.scipy.special",
    "jax.tree", "jax.tree_util", "jax.export",
}  # fmt: skip
_JAX_PAGES = {"jax.sharding", "jax.stages", "jax.errors"}
_JAX_MODULES = {
    "jax.debug", "jax.distributed", "jax.dtypes", "jax.export", "jax.image", "jax.lax", "jax.nn",
    "jax.nn.initializers", "jax.numpy", "jax.ops", "jax.profiler", "jax.random", "jax.scipy",
    "jax.sharding", "jax.tree", "jax.tree_util", "jax.experimental",
}  # fmt: skip

# optax has a page for each kind of thing.
_OPTAX_PAGES = {
    "optimizers": "adadelta adafactor adagrad adam adamax adamw amsgrad lamb lars lbfgs lion "
    "nadam noisy_sgd novograd polyak_sgd radam rmsprop sgd yogi",
    "combining_optimizers": "chain named_chain multi_transform partition",
    "optimizer_wrappers": "apply_if_finite flatten lookahead LookaheadParams LookaheadState "
    "masked MultiSteps",
    "optimizer_schedules": "constant_schedule cosine_decay_schedule exponential_decay "
    "linear_schedule warmup_cosine_decay_schedule contrib.reduce_on_plateau",
    "transformations": "add_decayed_weights clip clip_by_global_norm ema "
    "GradientTransformation GradientTransformationExtraArgs scale scale_by_adam",
    "losses": "l2_loss softmax_cross_entropy softmax_cross_entropy_with_integer_labels",
    "apply_updates": "apply_updates",
}
_OPTAX_HOMES = {name: page for page, names in _OPTAX_PAGES.items() for name in names.split()}


def address(name: str, imports: Mapping[str, str] = {}) -> str | None:
    """The address of a name of jax, numpy, optax, TensorFlow or Python.

    Args:
        name: as a page writes it, with arguments or without: `jnp.where`, `jax.jit(f)`.
        imports: what the imports of the page call modules and names.
    """
    name = name.partition("(")[0].removeprefix("@")
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    first, dot, rest = name.partition(".")
    name = imports.get(first, _ALIASES.get(first, first)) + dot + rest
    package = name.partition(".")[0]
    if package == name or any(part.startswith("_") for part in name.split(".")):
        return None
    rule = {"jax": _jax, "numpy": _numpy, "optax": _optax, "tensorflow": _tensorflow}.get(package)
    if rule is not None:
        return rule(name)
    return python(name) if package in sys.stdlib_module_names else None


def python(name: str) -> str | None:
    """The address of a name of Python's library, or of a built-in one."""
    module, _, last = name.rpartition(".")
    value = value_of(name if module else f"builtins.{name}")
    if value is None or inspect.ismodule(value):
        return None
    if module:
        return f"{_PYTHON}{module}.html#{name}"
    if inspect.isclass(value) and issubclass(value, BaseException):
        return f"{_PYTHON}exceptions.html#{name}"
    if name in ("None", "True", "False"):
        return f"{_PYTHON}constants.html#{name}"
    is_text = name in ("str", "bytes", "list", "tuple", "dict", "set", "frozenset", "range")
    return f"{_PYTHON}{'stdtypes' if is_text else 'functions'}.html#{last}"


def _jax(name: str) -> str | None:
    if name in _JAX_MODULES:
        return f"{_JAX}{name}.html"
    if name in ("jax.config", "jax.config.update"):
        return f"{_JAX}config_options.html"
    if name == "jax.P":
        name = "jax.sharding.PartitionSpec"
    module = name.rpartition(".")[0]
    value = value_of(name)
    if value is None or isinstance(value, ModuleType | SimpleNamespace):
        return None
    if module in _JAX_PAGES or (module == "jax.export" and inspect.isclass(value)):
        return f"{_JAX}{module}.html#{name}"
    if module in _JAX_FUNCTIONS:
        return f"{_JAX}_autosummary/{name}.html"
    return None


def _numpy(name: str) -> str | None:
    value = value_of(name)
    if value is None or inspect.ismodule(value):
        return None
    if name.startswith("numpy.typing."):
        return f"{_NUMPY}typing.html#{name}"
    if inspect.isclass(value) and issubclass(value, importlib.import_module("numpy").generic):
        return f"{_NUMPY}arrays.scalars.html#{name}"
    folder = "random/generated/" if name.startswith("numpy.random.") else "generated/"
    return f"{_NUMPY}{folder}{name}.html"


def _optax(name: str) -> str | None:
    page = _OPTAX_HOMES.get(name.removeprefix("optax."))
    return f"{_OPTAX}{page}.html#{name}" if page else None


def _tensorflow(name: str) -> str | None:
    """By its name alone: TensorFlow takes seconds to import."""
    if name.startswith("tensorflow.python."):  # the file that defines it
        return None
    return _TENSORFLOW + name.replace("tensorflow", "tf", 1).replace(".", "/")


def value_of(name: str) -> object | None:
    """What a dotted name means here; nothing for what this version does not have."""
    path = name.split(".")
    value: object = builtins if path[0] == "builtins" else importlib.import_module(path[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that go
        for index, part in enumerate(path[1:], 2):
            try:
                value = getattr(value, part)
            except AttributeError:
                try:
                    value = importlib.import_module(".".join(path[:index]))
                except ImportError:
                    return None
    return value
