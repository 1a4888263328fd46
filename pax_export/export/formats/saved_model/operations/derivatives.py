"""Whether TensorFlow's derivative of the operations of a program is that of jax.

It is decided by the names of primitives: an operation is listed if TensorFlow's gradient of what
its rule writes is that of jax for all numbers, ties and zeros among them. Programs with others have
the gradients that jax traces, as functions of the SavedModel: custom rules stay the model's.
"""

from __future__ import annotations

from pathlib import Path

import jax

from pax_export._foundations.jaxpr import inner_programs, jaxpr_of, wrapped_program
from pax_export._foundations.types import Atom, Equation, TracedProgram

_SAME = frozenset(
    """
abs acos acosh add add_any and argmax argmin asin asinh atan atanh broadcast_in_dim ceil
concatenate conv_general_dilated convert_element_type copy copy_p cos cosh cumsum dim_as_value div
dot_general dynamic_slice dynamic_update_slice eq erf erfc exp expm1 floor gather ge gt integer_pow
iota is_finite le log log1p logistic lt max min mul ne neg not or pad reduce_and reduce_max
reduce_min reduce_or reduce_sum reshape rev round rsqrt scatter-add scatter_add select_n sign sin
sinh slice sort split sqrt square squeeze stop_gradient sub tan tanh tile top_k transpose xor
""".split()
)
#: Functions of jax with a rule of their own, and the operator that has the same.
RELUS = {"relu": "Relu", "relu6": "Relu6"}
_JAX = Path(jax.__file__).parent


def differentiates(program: TracedProgram) -> bool:
    """Whether TensorFlow differentiates the operations of a program as jax does."""
    return all(map(_differentiates, jaxpr_of(program).eqns))


def _differentiates(equation: Equation) -> bool:
    name, params = equation.primitive.name, equation.params
    if name.startswith("custom_"):
        return function_of_jax(equation) in RELUS
    if wrapped_program(equation) is not None or name in ("scan", "cond"):
        return all(map(differentiates, inner_programs(equation)))
    if any(_is_complex(atom) for atom in (*equation.invars, *equation.outvars)):
        return False
    if name == "conv_general_dilated":  # whose gradient of groups has no kernel on CPUs
        return str(params["feature_group_count"]) == str(params["batch_group_count"]) == "1"
    if name == "integer_pow":  # of a quotient, TensorFlow has NaN at 0
        return params["y"] >= 0
    return name in _SAME


def _is_complex(atom: Atom) -> bool:
    return jax.numpy.issubdtype(atom.aval.dtype, jax.numpy.complexfloating)


def function_of_jax(equation: Equation) -> str:
    """The name of a function of jax that has a rule for its derivative; empty for others."""
    called = equation.params.get("call_jaxpr")
    about = getattr(getattr(called, "jaxpr", called), "debug_info", None)
    file = str(getattr(about, "func_filename", ""))
    return str(getattr(about, "func_name", "")) if file.startswith(f"{_JAX}/") else ""
