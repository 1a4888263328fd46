"""The operators of TensorFlow that rules write: operands, results, and dtypes with kernels.

A line has the operands, ``>``, the results as ``name=dtype``, the dtypes that have a kernel on
CPUs, and the operators. A dtype is that of an attribute (``T``) or fixed (``bool``); ``N*T`` is a
list. Function bodies call a result by its name. `tests/.../test_operators.py` compares the table
with TensorFlow's own.
"""

from __future__ import annotations

from typing import NamedTuple

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
T T > output=T | wide : NextAfter
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
        computed = frozenset(() if found == "any" else found.split())
        pairs = tuple(tuple(each.split("=")) for each in results)
        operator = OpDef(tuple(operands), pairs, computed)  # type: ignore[arg-type]
        table.update(dict.fromkeys(names.split(), operator))
    return table


OPERATORS = _read()
