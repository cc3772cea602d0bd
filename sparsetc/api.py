"""Serve users: `einsum`, `compile`, `explain`, named operations as thin sugar over them, and what caches hold.

In: an equation and operands, at least one of them sparse. Out: results, or a `Kernel` to call often.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from sparsetc.codegen import cache
from sparsetc.contraction.compile import Workload, compiled_together, contraction, kept_together
from sparsetc.contraction.contraction import Contraction, compiled, kept, parsed, wrap
from sparsetc.contraction.kernel import Kernel
from sparsetc.contraction.passing import passing
from sparsetc.contraction.reduced import reduced
from sparsetc.contraction.request import Operands, Result, as_operand, promoted
from sparsetc.errors import DeviceError, DistributedError, DtypeError, EquationError, PlanError
from sparsetc.explain import Explanation, MapExplanation, explained
from sparsetc.ir.equation.parse import parse_arguments
from sparsetc.options import Auto, Form, Reduction, Settings, ToDense, ToSparse, of_call
from sparsetc.packing.base import Packed
from sparsetc.planner.report import SymbolicCost
from sparsetc.support import later
from sparsetc.support.checks import check_free, check_identifier
from sparsetc.support.entry import entry_point, traced_by_modes
from sparsetc.tensor.inputs import not_sparse
from sparsetc.tensor.pattern import Pattern, clear_patterns, used
from sparsetc.tensor.readings import readings
from sparsetc.tensor.sparse_tensor import SparseTensor

_traced_einsum = later("contraction.library", "traced_einsum")


@overload
def einsum(*args: Any, reduce: Reduction = "sum", **settings: Unpack[ToDense]) -> Tensor: ...
@overload
def einsum(*args: Any, reduce: Reduction = "sum", **settings: Unpack[ToSparse]) -> SparseTensor: ...
@overload
def einsum(*args: Any, reduce: Reduction = "sum", **settings: Unpack[Auto]) -> Tensor | SparseTensor: ...
def einsum(
    *args: Any, output: str = "auto", drop_zeros: bool = False, reduce: str = "sum", **settings: Any
) -> Tensor | SparseTensor:
    """Evaluate an einsum with one or more sparse operands.

    The first call for an equation and a pattern compiles a kernel; later calls find it again. The kernel is kept with
    the pattern: a `SparseTensor`'s, or the index arrays of a torch tensor or of a scipy CSR, CSC, BSR or COO array. If
    many patterns come and go, such as a new graph at each training step, the first calls of a new pattern use torch's
    operations, and a kernel is compiled only for a pattern that stays.

    Values are packed once, and again after they change. On a CPU every change is noticed; on a GPU those that torch
    counts (not writes through ``.data``).

    Args:
        args: an equation and its operands, in any form that `torch.einsum` takes: implicit output, ``...``, a list of
            operands, or operands with index lists. A sparse operand is a `SparseTensor`, a sparse torch tensor, a scipy
            or pydata array, or a `distributed.Sharded` tensor. Dense operands are tensors or ndarrays of its dtype and
            device.
        output: ``"sparse"``, ``"dense"`` or ``"auto"``. With one sparse operand, ``"auto"`` is sparse if the result
            keeps all of its modes, or at least two of them and one with coordinates. With several sparse operands it is
            sparse if the result keeps any of their modes.
        drop_zeros: leave out entries of a sparse result whose value is 0. Without it the result's pattern does not
            depend on values.
        reduce: how to combine entries along the modes that the result does not keep: ``"sum"``, ``"mean"``, ``"amax"``,
            ``"amin"`` or ``"prod"``. Others than ``"sum"`` take one sparse operand; letters that only dense operands
            have are summed. A result without entries is 0, for ``"prod"`` 1.
        settings: ``plan=``, ``precision=``, ``deterministic=``, ``memory_limit=``, ``cache_dir=``, ``backend=``,
            ``tune=``, ``path=``: as in `options`. With a `distributed.Sharded` operand also ``gather=True``, for the
            whole result on every rank.

    Returns:
        A dense tensor or a `SparseTensor`, as `output` says. A sparse result of one sparse operand has that operand's
        pattern without the modes that were summed; letters that only dense operands have become its dense modes. A
        sparse result of several sparse operands has a pattern of its own. Both are coalesced. With a
        `distributed.Sharded` operand a dense result is a DTensor.

    Raises:
        EquationError, ShapeError, DtypeError, DeviceError, PlanError, OutOfMemoryError: before any kernel runs.
        DtypeError: a sum of integers does not fit in 64 bits, or in the result's dtype.

    Examples:
        >>> x = stc.SparseTensor([[0, 1, 1], [2, 0, 1]], [1.0, 2.0, 3.0], (2, 3))
        >>> stc.einsum("ij,jr->ir", x, torch.ones(3, 2))
        tensor([[1., 1.],
                [5., 5.]])
    """
    if reduce != "sum":
        if sharded_of(args) is not None:
            raise DistributedError(f"reduce={reduce!r:.80} is for tensors of one process; take it of x.gather()")
        result = reduced(*_prepared(args), reduce, output, settings)
        return result.drop() if drop_zeros and isinstance(result, SparseTensor) else result
    if torch.compiler.is_compiling() or traced_by_modes():
        return _traced_einsum(_einsum, args, output, drop_zeros, settings)  # type: ignore[no-any-return]
    return _einsum(args, output, drop_zeros, settings)


@entry_point
def _einsum(args: tuple[Any, ...], output: str, drop_zeros: bool, settings: Mapping[str, Any]) -> Result:
    if (sharded := sharded_of(args)) is not None:
        return sharded._einsum(args, output=output, drop_zeros=drop_zeros, **settings)  # type: ignore[no-any-return]
    text, operands = _prepared(args)
    options = of_call(settings)
    cached = kept(text, operands, options, output)
    if cached is None:
        result = passing(text, operands, options, output)
        if result is not None:
            return result
        cached = compiled(text, operands, options, output, once=True)
    return _run(cached, operands, drop_zeros)


def sharded_of(args: tuple[Any, ...]) -> Any:
    """Return the first operand that is sharded over processes, or None; its class compiles einsums of its own."""
    for operand in args:
        if "_einsum" in type(operand).__dict__:
            return operand
    return None


def _run(contraction: Contraction, operands: Operands, drop_zeros: bool) -> Result:
    """Return the result of a contraction that was compiled for these operands."""
    patterns: list[Pattern] = []
    values: list[Tensor] = []
    dense: list[Tensor] = []
    for operand in operands:
        if isinstance(operand, SparseTensor):
            patterns.append(operand._pattern)
            values.append(operand._values)
        else:
            dense.append(operand)
    patterns[0].uses.count += 1
    result = contraction.evaluate(patterns, values, dense, contraction.packed(values), checked=True)
    return wrap(contraction, result, patterns, drop_zeros) if contraction.sparse else result


@entry_point
def compile(*args: Any, output: Form = "auto", drop_zeros: bool = False, **settings: Unpack[Settings]) -> Kernel:
    """Plan, pack and generate an einsum once, and return a `Kernel` to call often.

    Args:
        args: as for `einsum`; of dense operands only shapes, dtypes and devices are read.
        output: as for `einsum`.
        drop_zeros: as for `einsum`.
        settings: as for `einsum`.

    Returns:
        A `Kernel`, called with the dense operands. It holds the sparse operand's values as packed now; `Kernel` says
        which later changes it notices. With a `distributed.Sharded` operand, a `distributed.DistributedKernel`.

    Raises:
        EquationError, ShapeError, DtypeError, DeviceError, PlanError, OutOfMemoryError: as `einsum`.

    Examples:
        >>> k = stc.compile("ij,jr->ir", stc.eye(3), torch.ones(3, 2))
        >>> k(torch.full((3, 2), 5.0))[0]
        tensor([5., 5.])
    """
    if (sharded := sharded_of(args)) is not None:
        return sharded._compiled(args, output=output, drop_zeros=drop_zeros, **settings)[0]  # type: ignore[no-any-return]
    text, operands = _prepared(args)
    sparse = [o for o in operands if isinstance(o, SparseTensor)]
    return Kernel(contraction(parsed(text, operands), operands, of_call(settings), output), sparse, drop_zeros)


@entry_point
def compile_many(
    equations: Sequence[str],
    x: Any,
    operands: Sequence[Any],
    *,
    output: Form = "auto",
    drop_zeros: bool = False,
    **settings: Unpack[Settings],
) -> tuple[Kernel, ...]:
    """Compile several einsums of one sparse operand together, so that they can share packed copies of it.

    A decomposition is an example: it has one einsum for each mode of one tensor. ``plan="auto"`` chooses the set of
    plans with the least expected total time whose copies fit ``memory_limit=`` (by default the free memory): a copy for
    each einsum, or one copy for several (plan ``"mm-csf"``). A plan given by name is used for as many einsums as fit,
    and ``"mm-csf"`` for the others. `Kernel.explain` shows what was chosen and stored.

    Args:
        equations: one or more equations; the first term of each is that of x.
        x: the sparse operand.
        operands: for each equation its dense operands, in order; a single operand need not be in a list.
        output: the form of all results, as for `einsum`.
        drop_zeros: as for `einsum`.
        settings: as for `einsum`.

    Returns:
        A tuple with a `Kernel` for each equation, called with its dense operands.

    Raises:
        EquationError: no equations, a different number of operands, or a second sparse operand; and all that `compile`
            raises.

    Examples:
        >>> x, a = stc.eye(3), torch.ones(3, 2)
        >>> rows, columns = stc.compile_many(["ij,jr->ir", "ij,ir->jr"], x, [a, a])
        >>> rows(a).shape, columns(a).shape
        (torch.Size([3, 2]), torch.Size([3, 2]))
    """
    workload = _workload(equations, x, operands)
    contractions = compiled_together(workload, of_call(settings), output)
    sparse = [[o for o in prepared if isinstance(o, SparseTensor)] for _, prepared in workload]
    return tuple([Kernel(one, operands_of, drop_zeros) for one, operands_of in zip(contractions, sparse, strict=True)])


@entry_point
def einsum_together(
    workload: Workload, output: Form = "auto", drop_zeros: bool = False, **settings: Unpack[Settings]
) -> tuple[Result, ...]:
    """Evaluate einsums of one sparse operand, compiled together as by `compile_many` and kept with its pattern."""
    workload = [_prepared((text, *operands)) for text, operands in workload]
    each = zip(kept_together(workload, of_call(settings), output), workload, strict=True)
    return tuple([_run(one, operands, drop_zeros) for one, (_, operands) in each])


def _workload(equations: Sequence[str], x: Any, operands: Sequence[Any]) -> Workload:
    """Equations with their operands, prepared; only the first of each is sparse."""
    if not isinstance(equations, Sequence) or not isinstance(operands, Sequence):
        kinds = f"{type(equations).__name__} and {type(operands).__name__}"
        raise EquationError(f"compile_many takes two lists, equations and the dense operands of each, found {kinds}")
    if isinstance(equations, str) or len(equations) != len(operands) or not equations:
        raise EquationError(
            "compile_many takes a list of equations, and for each of them its dense operands; found "
            f"{'one text' if isinstance(equations, str) else f'{len(equations)} equations'} and {len(operands)} lists"
        )
    sparse = SparseTensor.coerce(x)
    if sparse is None:
        raise EquationError(f"compile_many takes a sparse operand after the equations, found {type(x).__name__}")
    workload = []
    for equation, dense in zip(equations, operands, strict=True):
        listed = [dense] if isinstance(dense, Tensor | np.ndarray) else dense
        if isinstance(listed, str) or not isinstance(listed, Iterable):
            raise EquationError(
                f"compile_many takes a list of dense operands for {equation!r:.80}, found {type(dense).__name__}"
            )
        text, prepared = _prepared((equation, sparse, *listed))
        for number, operand in enumerate(prepared[1:], 2):
            if isinstance(operand, SparseTensor):
                raise EquationError(
                    f"compile_many takes one sparse operand, and operand {number} of {text!r:.80} is sparse too; "
                    "compile that einsum by itself"
                )
        workload.append((text, prepared))
    return workload


@overload
def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> MapExplanation: ...
@overload
def explain(*args: Any, symbolic: Literal[False] = False, **settings: Unpack[Auto]) -> Explanation: ...
@overload
def explain(*args: Any, symbolic: Literal[True], **settings: Unpack[Auto]) -> SymbolicCost: ...
def explain(*args: Any, symbolic: bool = False, **settings: Any) -> Explanation | SymbolicCost | MapExplanation:
    """Explain how `einsum` would run: parts, formats, bytes, expected time, and the plans that were not chosen.

    Of a function in place of an equation, such as `attention`, `map_entries` or a layer, explain how the attentions and
    maps in it run: in one kernel, with which tiles, or in steps, and why. The function is called once.

    Args:
        args: as for `einsum`; or a function and its arguments.
        symbolic: return the cost as formulas of sizes instead.
        settings: as for `einsum`, or the function's.

    Returns:
        An object that prints as a table; its ``to_dict()`` returns the same as data.

    Examples:
        >>> q = torch.ones(1, 128, 16)
        >>> print(stc.explain(stc.attention, q, q, q, stc.masks.causal(), backend="torch"))
        attention
          runs     in one kernel; torch on cpu
          pairs    128 rows x 128 columns, 1 pattern(s)
          tiles    1 full, 2 partial, 64 rows x 64 neighbouring columns, filled by 67%: result
        ...
        >>> print(stc.explain("ij,jr->ir", stc.eye(8), torch.ones(8, 4), plan="coo"))
        "ij,jr->ir"
          plan     coo, asked for by name
        ...
    """
    if args and callable(args[0]):
        return explained(*args, **settings)
    return compile(*args, **settings).explain(symbolic)  # type: ignore[no-any-return]


def _prepared(args: tuple[Any, ...]) -> tuple[str, Operands]:
    """Equation text, and operands as SparseTensors and dense tensors."""
    text, arguments = parse_arguments(args)
    operands: list[SparseTensor | Tensor] = []
    sparse = False
    for number, operand in enumerate(arguments, 1):
        if type(operand) is Tensor and operand.layout is torch.strided and not operand.is_nested:
            operands.append(operand)
            continue
        if type(operand) is not SparseTensor:
            operand = as_operand(operand, f"operand {number}")
            if not isinstance(operand, SparseTensor | Tensor):
                what_it_is = not_sparse(operand, "use torch.as_tensor")
                raise DtypeError(f"operand {number} must be a torch tensor or sparse, {what_it_is}")
        values = operand
        if isinstance(operand, SparseTensor):
            sparse, values = True, operand._given
            if values.is_meta:
                raise DeviceError(f"operand {number} is on the meta device, which holds no pattern to compile for")
        if values.dtype is torch.bool:
            raise DtypeError(f"operand {number} is of bools, which are not multiplied: .to(torch.float32) makes them 1")
        operands.append(operand)
    if not sparse:
        make = "make one by SparseTensor.from_dense, or from_graph of edges"
        raise EquationError(f'"{text}" has no sparse operand: use torch.einsum, or {make}')
    return text, promoted(operands)


# -- named operations -------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[..., Any]] = {}
F = TypeVar("F", bound=Callable[..., Any])


@overload
def register_op(function: F) -> F: ...
@overload
def register_op(*, replace: bool) -> Callable[[F], F]: ...
def register_op(function: F | None = None, *, replace: bool = False) -> F | Callable[[F], F]:
    """Decorator: make an operation known by its function's name, in `OPERATIONS`.

    An operation writes an equation from its operands' orders and calls `einsum`; see ``examples/custom_op.py``.

    Args:
        function: the operation.
        replace: put it in the place of one that comes with the package.

    Raises:
        PlanError: the function's name is no identifier (a lambda has none), or is taken by the package.

    Examples:
        >>> @stc.register_op
        ... def row_sums(x):
        ...     return stc.einsum("ij->i", x)
        >>> stc.OPERATIONS["row_sums"](stc.eye(2))
        tensor([1., 1.])
    """
    if function is None:
        return partial(register_op, replace=replace)  # type: ignore[call-overload, no-any-return]
    name = check_identifier(getattr(function, "__name__", None), "an operation", PlanError)
    check_free(name, "operation", [OPERATIONS.get(name)], replace, PlanError, function)
    OPERATIONS[name] = function
    return function


@dataclass(frozen=True)
class CacheInfo:
    """Counts of the objects that this process keeps in memory for patterns.

    Attributes:
        patterns: live patterns that anything is kept for.
        kernels: compiled einsums, without those of gradients.
        storages: packed index arrays, each with what reads it.
        nbytes: bytes of packed index arrays, on all devices.
        foreign: coordinates, and tensors of torch.sparse and scipy, whose pattern is remembered.
        modules: generated programs in memory.

    Examples:
        >>> stc.clear_cache()
        >>> stc.cache_info()
        CacheInfo(patterns=0, kernels=0, storages=0, nbytes=0, foreign=0, modules=0)
    """

    patterns: int
    kernels: int
    storages: int
    nbytes: int
    foreign: int
    modules: int


def cache_info() -> CacheInfo:
    """Count the objects kept in memory for the patterns of live tensors; `clear_cache` drops them.

    Examples:
        >>> stc.clear_cache()
        >>> x = stc.eye(3)
        >>> y = x @ torch.ones(3, 2)
        >>> stc.cache_info().kernels
        1
    """
    kept = [value for pattern in list(used) for value in pattern.cache.values()]
    stored = [value for value in kept if isinstance(value, Packed)]
    return CacheInfo(
        patterns=len(used),
        kernels=sum(hasattr(one, "steps") for value in kept for one in (value if type(value) is tuple else (value,))),
        storages=len(stored),
        nbytes=sum(p.nbytes for p in stored),
        foreign=len(readings),
        modules=cache.count(),
    )


def clear_cache() -> None:
    """Drop everything kept in memory for patterns: counts, packed storages, kernels, and generated programs.

    Kernels that are held go on as they are. The folder of generated sources (``cache_dir=``) is not touched.

    Examples:
        >>> stc.clear_cache()
        >>> stc.cache_info().nbytes
        0
    """
    clear_patterns()
    readings.clear()
    if (tiles := sys.modules.get("sparsetc.maps.mask_tiles")) is not None:  # imported by those who attend
        tiles.kept.clear()
    cache.clear()
