"""Complex numbers as two arrays and random keys as their words, in whole programs.

Complex arrays become a real and an imaginary one, keys uint32 ``[..., 2]``: as operands, as
results, in loops and branches. It is for targets that support neither. The keys are those of jax's
own generator, Threefry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_prng_impl

from pax_export._foundations.jax import is_key, scan_operands
from pax_export._foundations.jaxpr import (
    bind_equation,
    inner_programs,
    is_literal,
    jaxpr_dtypes,
    jaxpr_of,
    wrapped_program,
)
from pax_export._foundations.types import Array, Atom, Aval, Equation, TracedProgram
from pax_export.export.portable.complex_numbers import COMPLEX, half_dtype, on_pairs
from pax_export.export.portable.decompositions import Has, NotDecomposedError, decompose
from pax_export.export.portable.fourier import fourier_products as fourier_products
from pax_export.export.portable.kept import PREFIX
from pax_export.export.portable.program import CONTROL, ProgramRewriter, call_of
from pax_export.export.portable.sizes import trace


def on_words(equation: Equation) -> Any:
    """Traces an operation on random keys as a function of their words.

    Each operand and result that is a key has a last axis of 2 in the traced program.

    Raises:
        NotDecomposedError: the keys belong to another generator.
    """
    atoms = (*equation.invars, *equation.outvars)
    for dtype in [atom.aval.dtype for atom in atoms if is_key(atom.aval.dtype)]:
        if "fry" not in str(dtype):
            raise NotDecomposedError("of another kind than threefry2x32")
    structs = [_words(atom.aval) for atom in equation.invars]
    return trace(_FUNCTIONS[equation.primitive.name], structs, equation.params)


def _words(aval: Aval) -> jax.ShapeDtypeStruct:
    if is_key(aval.dtype):
        return jax.ShapeDtypeStruct((*aval.shape, 2), "uint32")
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _each(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """Maps a function of one key over the axes of an array of keys."""
    for _ in range(axes):
        function = jax.vmap(function)
    return function


def _bits(words: Array, *, bit_width: int, shape: Sequence[Any], **_: object) -> Any:
    def draw(key: Array) -> Any:
        return threefry_prng_impl.random_bits(key, bit_width, shape)

    return _each(draw, words.ndim - 1)(words)


def _fold_in(words: Array, numbers: Array, **_: object) -> Any:
    shape = jnp.broadcast_shapes(words.shape[:-1], numbers.shape)
    words, numbers = jnp.broadcast_to(words, (*shape, 2)), jnp.broadcast_to(numbers, shape)
    return _each(threefry_prng_impl.fold_in, len(shape))(words, numbers)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("random_wrap", "random_unwrap", "random_clone"), lambda words, **_: words),
    "random_seed": lambda seeds, **_: _each(threefry_prng_impl.seed, seeds.ndim)(seeds),
    "random_bits": _bits,
    "random_split": lambda words, *, shape, **_: _each(
        lambda key: threefry_prng_impl.split(key, shape), words.ndim - 1
    )(words),
    "random_fold_in": _fold_in,
}
KEYS = frozenset(_FUNCTIONS)


# --- Complex numbers as two arrays and random keys as their words, in whole programs ---


#: Operations that move numbers, or add them: two arrays take them twice.
_MOVES = frozenset(
    "add add_any broadcast_in_dim concatenate copy cumsum device_put dynamic_slice "
    "dynamic_update_slice empty gather layout_constraint name neg "
    "optimization_barrier pad pvary reduce_sum reduced_vary_cast reshape reshard rev scatter "
    "scatter-add scatter-sub scatter_add scatter_sub select_n sharding_constraint slice sort "
    "split squeeze stack stage stop_gradient sub tie tile transpose unstack zeros_like".split()
)


class NotWrittenError(Exception):
    """An operation has no form for a target: `equation`, in the programs of `callers`."""

    def __init__(self, reason: str, equation: Equation, callers: Sequence[Any]):
        super().__init__(reason)
        self.reason, self.equation, self.callers = reason, equation, tuple(callers)


def in_real_numbers(program: TracedProgram, has: Has = lambda _: False) -> Any:
    """Returns a program without complex numbers and random keys; the same object if it has none.

    An operation on complex numbers that a target `has` becomes a composite of their parts.

    Raises:
        NotWrittenError: an operation has no form on parts of complex numbers or words of keys.
    """
    if not _has_parts(program):
        return program
    whole = decompose(program, lambda equation: _is_known(equation) or has(equation))
    return _RealRewriter(has).program(whole)


def in_parts(value: Any) -> list[Any]:
    """Returns the arrays that represent an array in such a program."""
    if is_key(value.dtype):
        return [np.asarray(jax.random.key_data(value))]
    if half_dtype(value.dtype) is None:
        return [value]
    return [np.array(np.real(value)), np.array(np.imag(value))]


def _is_known(equation: Equation) -> bool:
    name = equation.primitive.name
    return not _touches(equation) or name in COMPLEX or name in KEYS or name in _MOVES


def _is_apart(atom: Atom) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and (is_key(dtype) or half_dtype(dtype) is not None)


def _touches(equation: Equation) -> bool:
    return any(map(_is_apart, (*equation.invars, *equation.outvars)))


def _has_parts(program: TracedProgram) -> bool:
    jaxpr = jaxpr_of(program)
    any_apart = any(map(_is_apart, (*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars)))
    return any_apart or any(is_key(d) or half_dtype(d) is not None for d in jaxpr_dtypes(program))


def _structs(atom: Atom) -> list[Any]:
    """The shapes and dtypes of the arrays that an array becomes."""
    aval = atom.aval
    if not _is_apart(atom):
        return [aval]
    if is_key(aval.dtype):
        return [jax.ShapeDtypeStruct((*aval.shape, 2), "uint32")]
    return [jax.ShapeDtypeStruct(aval.shape, half_dtype(aval.dtype))] * 2


class _RealRewriter(ProgramRewriter):
    def __init__(self, has: Has) -> None:
        super().__init__(lambda _: None)
        self._has = has
        self._callers: list[Any] = []

    def _rewritten(self, program: TracedProgram) -> Any:
        if not _has_parts(program):
            return program
        jaxpr = jaxpr_of(program)
        variables: dict[Any, list[Any]] = {}
        equations: list[Any] = []

        def new(atoms: Iterable[Any]) -> list[Any]:
            for each in atoms:
                variables[each] = _variables(_structs(each)) if _is_apart(each) else [each]
            return [variable for each in atoms for variable in variables[each]]

        def read(atoms: Iterable[Atom], equation: Any) -> list[Any]:
            found: list[Any] = []
            for each in atoms:
                if not is_literal(each):
                    found.extend(variables[each])
                elif not _is_apart(each):
                    found.append(each)
                else:
                    parts = in_parts(np.asarray(each.val, each.aval.dtype))
                    outvars = _variables(parts)
                    equations.append(
                        call_of(equation, trace(lambda p=parts: p, (), {}), (), outvars)
                    )
                    found.extend(outvars)
            return found

        constants, operands = new(jaxpr.constvars), new(jaxpr.invars)
        for each in jaxpr.eqns:
            inputs = read(each.invars, each)
            equations.append(self._in_parts(each, inputs, new(each.outvars)))
        results = read(jaxpr.outvars, jaxpr.eqns[-1] if jaxpr.eqns else None)
        changed = {"constvars": constants, "invars": operands, "outvars": results}
        changed |= {"eqns": equations, "debug_info": jaxpr.debug_info.with_unknown_names()}
        values = getattr(program, "consts", ())
        arrays = [p for v in values for p in (in_parts(v) if hasattr(v, "dtype") else [v])]
        if jaxpr is program:  # since jax 0.12 a program and its jaxpr are one class
            return program.replace(**changed, **({"consts": arrays} if arrays else {}))
        return program.replace(jaxpr=jaxpr.replace(**changed), consts=arrays)

    def _in_parts(self, equation: Equation, operands: list[Any], results: list[Any]) -> Any:
        touched = _touches(equation)
        if not touched and not any(map(_has_parts, inner_programs(equation))):
            return equation
        name = equation.primitive.name
        structs = [each for atom in equation.invars for each in _structs(atom)]
        self._callers.append(equation)
        try:
            if name in CONTROL:
                params = self._loop(equation)
                return equation.replace(invars=operands, outvars=results, params=params)
            if name in KEYS:
                return call_of(equation, on_words(equation), operands, results)
            if touched and self._has(equation):
                return call_of(equation, _on_parts(equation, structs), operands, results)
            if name in _MOVES and touched:
                return call_of(equation, _moved(equation, structs), operands, results)
            if name in COMPLEX and touched:
                return call_of(equation, on_pairs(equation, structs), operands, results)
            inner = wrapped_program(equation)
            if inner is None:
                raise NotDecomposedError("of complex numbers or random keys")
            return call_of(equation, self.program(inner), operands, results)
        except NotDecomposedError as error:
            raise NotWrittenError(str(error), equation, self._callers[:-1]) from error
        finally:
            self._callers.pop()

    def _loop(self, equation: Equation) -> dict[str, Any]:
        """Returns the parameters of a loop or branch with its inner programs rewritten."""
        params = {name: self._parameter(value) for name, value in equation.params.items()}
        if equation.primitive.name == "while":
            first, second = params["cond_nconsts"], params["body_nconsts"]
            params["cond_nconsts"] = _count(equation.invars[:first])
            params["body_nconsts"] = _count(equation.invars[first : first + second])
        elif equation.primitive.name == "scan":
            constants, carried, rows = map(_count, scan_operands(equation.params, equation.invars))
            model = _scan_of(constants, carried, rows, _count(equation.outvars) - carried)
            params = model | {k: params[k] for k in ("jaxpr", "length", "reverse", "unroll")}
        return params


def _on_parts(equation: Equation, structs: Sequence[Any]) -> Any:
    """Traces an operation as a composite ``complex_…`` of the parts of its operands."""

    def whole(*parts: Array, **parameters: Any) -> list[Any]:
        left = iter(parts)
        operands = [
            lax.complex(next(left), next(left)) if _is_apart(atom) else next(left)
            for atom in equation.invars
        ]
        results = bind_equation(equation.replace(params=parameters), operands)
        return [
            part
            for each in results
            for part in ((each.real, each.imag) if jnp.iscomplexobj(each) else (each,))
        ]

    composite = lax.composite(whole, f"{PREFIX}complex_{equation.primitive.name}")
    return trace(composite, structs, equation.params)


def _count(atoms: Iterable[Any]) -> int:
    return sum(len(_structs(each)) for each in atoms)


def _variables(structs: Sequence[Any]) -> list[Any]:
    """New variables of these shapes and dtypes."""
    return list(jax.make_jaxpr(lambda *each: each)(*structs).jaxpr.invars)


def _scan_of(constants: int, carried: int, rows: int, stacked: int) -> dict[str, Any]:
    """The parameters of a scan, as this version of jax names them."""

    def run(consts: list[Any], start: list[Any], xs: list[Any]) -> Any:
        def body(state: list[Any], row: list[Any]) -> Any:
            # Nothing is a copy: unchanged values are not part of a loop's state.
            total = sum(consts, jnp.zeros(()))
            return [each + 1 for each in state], [total + number for number in range(stacked)]

        return lax.scan(body, start, xs, length=2)

    numbers = [[jnp.zeros(shape)] * count for shape, count in (((), constants), ((), carried))]
    program = jax.make_jaxpr(run)(*numbers, [jnp.zeros(2)] * rows)
    return dict(program.jaxpr.eqns[-1].params)


def _moved(equation: Equation, structs: Sequence[Any]) -> Any:
    """Traces an operation that only moves elements, applied to both parts."""
    name, atoms = equation.primitive.name, equation.invars
    if name == "sort" and any(map(_is_apart, atoms[: equation.params["num_keys"]])):
        return on_pairs(equation, structs)

    def part(atom: Atom, values: list[Any], index: int) -> Any:
        if not _is_apart(atom):
            return values[0]
        return values[0][..., index] if is_key(atom.aval.dtype) else values[index]

    def run(*values: Array, **parameters: Any) -> list[Any]:
        left = iter(values)
        operands = [[next(left) for _ in _structs(atom)] for atom in atoms]
        both = [
            _again(equation, parameters, [part(*each, index) for each in zip(atoms, operands)])
            for index in range(2)
        ]
        results: list[Any] = []
        for variable, one, other in zip(equation.outvars, *both):
            if not _is_apart(variable):
                results.append(one)
            elif is_key(variable.aval.dtype):
                results.append(jnp.stack([one, other], -1))
            else:
                results += [one, other]
        return results

    return trace(run, structs, equation.params)


def _again(equation: Equation, parameters: dict[str, Any], operands: list[Any]) -> Any:
    name = equation.primitive.name.replace("-", "_")
    if not name.startswith("scatter"):
        return bind_equation(equation.replace(params=parameters), operands)
    # One scatters by a program for its dtype.
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return [getattr(lax, name)(*operands, **{each: parameters[each] for each in names})]
