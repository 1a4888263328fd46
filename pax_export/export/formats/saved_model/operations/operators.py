"""The operators of TensorFlow that rules write, and whether their derivatives are those of jax.

A line has the operands, ``>``, the results as ``name=dtype``, the dtypes that have a kernel on
CPUs, and the operators. A dtype is that of an attribute (``T``) or fixed (``bool``); ``N*T`` is a
list. Function bodies call a result by its name. `tests/.../test_operators.py` compares the table
with TensorFlow's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax

from pax_export._foundations.jaxpr import inner_programs, jaxpr_of, wrapped_program
from pax_export._foundations.types import Atom, Equation, TracedProgram

_TABLE = """
T > y=T | float signed complex : Neg
T > y=T | float signed complex64 : Abs Sign
T > y=T | float complex : Exp Log Log1p Expm1 Sin Cos Tan Tanh Sinh Cosh Asin Acos Atan Asinh Acosh
T > y=T | float complex : Atanh Sqrt Rsqrt Sigmoid
T > y=T | float : Floor Ceil Erf Erfc
T > y=T | wide : Rint Erfinv
T > y=T | float16 wide : Lgamma Digamma BesselI0e BesselI1e
T > y=T | number : Square
T > y=T | any : OnesLike
T > y=bool | float : IsFinite IsNan
T > y=uint8 | integer : PopulationCount
bool > y=bool | any : LogicalNot
bool bool > z=bool | any : LogicalAnd LogicalOr
T T > z=T | number : AddV2 Sub Mul
T T > z=T | float complex : RealDiv
T T > z=T | float integer : TruncateDiv FloorDiv
T T > z=T | int32 int64 wide : TruncateMod
T T > z=T | float integer : FloorMod Maximum Minimum
T T > z=T | float signed complex : Pow
T T > z=T | float : Atan2
T T > z=T | wide : Igamma Igammac Zeta Polygamma
T T T > z=T | wide : Betainc
T T > z=T | integer : BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift
T T > z=bool | float integer : Less LessEqual Greater GreaterEqual
T T > z=bool | any : Equal NotEqual
bool T T > output=T | any : SelectV2
SrcT > y=DstT | any : Cast
T > output=type | any : Bitcast
T Tidx > output=T | number : Sum Prod Mean
T Tidx > output=T | float integer : Max Min
bool Tidx > output=bool | any : All Any
T T > product=T | float complex int16 int32 int64 : MatMul
T T > output=T | float complex int16 int32 int64 : BatchMatMulV2
T T > output=T | float int32 : Conv2D
T T > output=T | float : DepthwiseConv2dNative Conv3D
T > output=T | float integer : MaxPool
T > output=T | float : AvgPool
T Tshape > output=T | any : Reshape
T Tperm > y=T | any : Transpose
T > output=T | any : Squeeze Identity StopGradient EnsureShape
T Tdim > output=T | any : ExpandDims
T Tidx > output=T | any : BroadcastTo ReverseV2
N*T Tidx > output=T | any : ConcatV2
N*T > output=T | any : Pack
T Index Index Index > output=T | any : StridedSlice
T Index Index > output=T | any : Slice
T Tpaddings T > output=T | any : PadV2
Tidx Tidx Tidx > output=Tidx | any : Range
T Tmultiples > output=T | any : Tile
T Tlen int32 > output=num_split*T | any : SplitV
T > output=int32 | any : Shape
T T > output=T | number : BiasAdd
T > activations=T | float integer : Relu Relu6
T > softmax=T | float : Softmax
T > logsoftmax=T | float : LogSoftmax
T Tidx > output=output_type | float integer bool : ArgMax ArgMin
T Tidx > out=T | number : Cumsum Cumprod
T int32 > values=T indices=int32 | float integer : TopKV2
Tparams Tindices Taxis > output=Tparams | any : GatherV2
T Tindices T > output=T | any : TensorScatterUpdate
T Tindices T > output=T | number : TensorScatterAdd
T Tindices T > output=T | float integer : TensorScatterMax TensorScatterMin
T Tindices Tnumsegments > output=T | number : UnsortedSegmentProd
T T > out=Tout | wide : Complex
T > output=Tout | complex : Real Imag
T > output=T | complex : Conj
T > y=Tout | complex : ComplexAbs
Tcomplex > output=Tcomplex | complex : FFT FFT2D FFT3D IFFT IFFT2D IFFT3D
Treal int32 > output=Tcomplex | wide : RFFT RFFT2D RFFT3D
Tcomplex int32 > output=Treal | complex : IRFFT IRFFT2D IRFFT3D
T > output=T | wide complex : Cholesky
T > q=T r=T | wide complex : Qr
T > s=T u=T v=T | wide complex : Svd
T > e=T v=T | wide complex : SelfAdjointEigV2
T T > output=T | wide complex : MatrixTriangularSolve
T Tindex Tindex > band=T | any : MatrixBandPart
T > diagonal=T | any : MatrixDiagPart
T T > output=T | any : MatrixSetDiag
shape_type int32 > handle=variant | any : TensorListReserve
element_dtype shape_type > output_handle=variant | any : TensorListFromTensor
variant int32 int32 > item=element_dtype | any : TensorListGetItem
variant int32 element_dtype > output_handle=variant | any : TensorListSetItem
variant int32 > tensor=element_dtype | any : TensorListStack
"""

_WIDE, _FLOAT = "float32 float64", "float16 bfloat16 float32 float64"
_SIGNED, _UNSIGNED = "int8 int16 int32 int64", "uint8 uint16 uint32 uint64"
_COMPLEX = "complex64 complex128"
_CLASSES = {
    "wide": _WIDE,
    "float": _FLOAT,
    "signed": _SIGNED,
    "integer": f"{_SIGNED} {_UNSIGNED}",
    "complex": _COMPLEX,
    "number": f"{_FLOAT} {_SIGNED} {_UNSIGNED} {_COMPLEX}",
}


class OpDef(NamedTuple):
    """An operator: dtypes of operands, results as (name, dtype), and names of dtypes it computes.

    `dtypes` is empty if it computes all.
    """

    operands: tuple[str, ...]
    results: tuple[tuple[str, str], ...]
    dtypes: frozenset[str]


def _read() -> dict[str, OpDef]:
    table = {}
    for line in _TABLE.strip().splitlines():
        form, dtypes, names = (each.strip() for each in line.replace(" : ", " | ").split("|"))
        operands, results = (side.split() for side in form.split(">"))
        found = " ".join(_CLASSES.get(each, each) for each in dtypes.split())
        pairs = tuple((name, dtype) for name, _, dtype in (e.partition("=") for e in results))
        operator = OpDef(tuple(operands), pairs, frozenset(found.split()) - {"any"})
        table.update(dict.fromkeys(names.split(), operator))
    return table


OPERATORS = _read()


# --- derivatives ------------------------------------------------------------

#: Operations of which TensorFlow's gradient of what the rule writes is that of jax for all numbers,
#: ties and zeros among them. Programs with others have the gradients that jax traces, as functions
#: of the SavedModel: custom rules stay the model's.
_SAME_SLOPES = frozenset(
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
    return name in _SAME_SLOPES


def _is_complex(atom: Atom) -> bool:
    return jax.numpy.issubdtype(atom.aval.dtype, jax.numpy.complexfloating)


def function_of_jax(equation: Equation) -> str:
    """The name of a function of jax that has a rule for its derivative; empty for others."""
    called = equation.params.get("call_jaxpr")
    about = getattr(getattr(called, "jaxpr", called), "debug_info", None)
    file = str(getattr(about, "func_filename", ""))
    return str(getattr(about, "func_name", "")) if file.startswith(f"{_JAX}/") else ""
