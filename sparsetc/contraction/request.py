"""An einsum that is to be compiled and its operands, as rules take them: its rewrite as another one, and its result.

In: a `Bound` einsum, options, and operands, to compile it for or of a call. Out: `Request`, and `Rewrite`, which a rule
makes of it; `Output`, a dense tensor, or values on a pattern that is known once the sparse operand is: shapes, pattern,
the row each nonzero adds to; operands as tensors of one dtype and device, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsetc.contraction.autograd import Tensors
from sparsetc.errors import DeviceError, DtypeError, PlanError, ShapeError
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.options import Options
from sparsetc.planner.problem import Counts, Problem
from sparsetc.support import Ints, cached_property, volume
from sparsetc.support.checks import check_memory
from sparsetc.tensor.coords import numbered
from sparsetc.tensor.dtypes import fitted, result_bytes
from sparsetc.tensor.inputs import CONVERT, as_dense
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor

Operand = TypeVar("Operand", Tensor, SparseTensor, Tensor | SparseTensor)
Operands = Sequence[SparseTensor | Tensor]
Patterns = Sequence[Pattern]
KEEP_SPARSE = "keep more modes sparse in the output"
"""Advice where a dense result passes the memory limit."""
SPARE = 2
"""Letters that gradients of an einsum of entries, and batches of these, need beside its own."""
Change = Callable[..., Tensor]
Take = tuple[Ints, Change | None]
"""How an operand of the rewritten einsum is made: the positions of those before that it is made of, and a function of
these. None in place of a function: it is that operand as it is, or, where there are no positions, a pattern of ones,
which has no values."""
Put = Callable[[Patterns, Pattern | None, bool], tuple[Pattern | None, Change | None]]
"""How a result is put back; arguments and results are those of `Rewrite.put`."""


@dataclass(frozen=True)
class Request:
    """An einsum that is to be compiled.

    Attributes:
        bound: the einsum.
        operands: to compile it for; values are only looked at for their dtype.
        settings: plan, precision, memory limit, backend, determinism.
        form: of the result, ``auto``, ``dense`` or ``sparse``.
        of_call: True if these are the operands of one call of `einsum`, not those of a kernel that will take others. A
            dense dimension of stride 0 is then left out as one of size 1 is, so that one slice is read and not copies;
            and the pattern may be one of many that are met once.
        chunk: True if the sparse operand is a chunk of a tensor cut for streaming. All chunks have one einsum, so the
            count of this one's nonzeros decides nothing.
        unmet: True if several patterns are not known to have met before.
        in_blocks: True if dense modes are positions in blocks, which cannot become coordinates.
        written: the einsum that rules began with, whose letters a schedule may name; None where it is this one.
    """

    bound: Bound
    operands: Operands
    settings: Options
    form: str
    of_call: bool = False
    chunk: bool = False
    unmet: bool = False
    in_blocks: bool = False
    written: Einsum | None = None

    @cached_property
    def sparse(self) -> list[SparseTensor]:
        """The sparse operands."""
        return [o for o in self.operands if isinstance(o, SparseTensor)]

    @property
    def dense_modes(self) -> bool:
        """True if an operand has dense modes, or is in blocks."""
        return any(x._values.ndim > 1 for x in self.sparse)

    @property
    def like(self) -> Tensor:
        """A number of the operands' dtype and device, to stand in for operands."""
        x = self.sparse[0]
        return torch.zeros((), dtype=x.dtype, device=x.device)

    def has_pattern(self, expanded: bool = False) -> bool:
        """Return True if the result is sparse; dense modes become coordinates if `expanded`."""
        e = self.bound.einsum
        orders = [x.order if expanded else x.sparse_order for x in self.sparse]
        return is_sparse(self.form, e, [e.inputs[p][:order] for p, order in zip(e.sparse, orders, strict=True)])

    def is_sparse(self, expanded: bool) -> bool:
        """Return `has_pattern`. Raise OutOfMemoryError if the result is dense and does not fit the memory limit."""
        sparse = self.has_pattern(expanded)
        if not sparse:
            self.check_memory(prod(self.bound.output_shape), self.bound)
        return sparse

    def check_memory(self, elements: int, einsum: object) -> None:
        """Raise OutOfMemoryError if a result of so many elements passes the memory limit; it names the einsum."""
        x = self.sparse[0]
        check_memory(
            f"the result of {einsum}",
            elements * result_bytes(x.dtype),
            x.device,
            self.settings.memory_limit,
            KEEP_SPARSE,
        )

    @cached_property
    def output(self) -> Output:
        """The output of an einsum of one sparse operand, as rules leave it.

        Einsums that keep the same modes of it share their results' pattern.
        """
        bound, pattern = self.bound, self.sparse[0].pattern
        e = bound.einsum
        kept = tuple(map(e.sparse_indices.index, e.kept))
        order = (*e.kept, *e.free)
        shape, width = bound.extents(e.kept), bound.extents(e.free)
        moved = None if order == e.output else tuple([order.index(c) for c in e.output])
        everything = len(kept) == pattern.order
        if not self.has_pattern():
            return Output(shape, width, moved, None, False, None)
        if everything and kept == tuple(range(len(kept))):
            whole = pattern.known(("modes", kept), Pattern(pattern.coords, shape, pattern.is_coalesced))
            return Output(shape, width, moved, whole, moved is None, None)
        rows = pattern.coords[list(kept)]
        numbering = numbered(rows.unbind(), shape, rows.shape[1], rows)
        some = pattern.known(("modes", kept), Pattern(torch.stack(numbering.coords), shape, True))
        return Output(shape, width, moved, some, False, numbering.rank)

    @cached_property
    def problem(self) -> Problem:
        """The problem of planning it.

        Raises:
            OutOfMemoryError: the result would pass the memory limit.
        """
        (x,) = self.sparse
        rows, sparse = self.output.rows, self.output.sparse
        pattern, settings = x.pattern, self.settings
        self.check_memory(rows * self.output.width, self.bound.einsum.text or self.bound)
        counts = Counts(pattern.coords, pattern.shape, pattern.counts, pattern.cache)
        return replace(Problem.of(self.bound, rows, sparse, x, counts, settings), adding=self.chunk)

    @property
    def as_it_is(self) -> list[Take]:
        """Every operand as it is."""
        return [((p,), None) for p in range(len(self.operands))]


@dataclass(frozen=True)
class Rewrite:
    """An einsum run as another.

    Attributes:
        name: for a reader.
        inner: the einsum that it becomes.
        take: how each operand of that one follows from those before.
        put: the pattern of a result, None of a dense one, and how the result follows from the other's; given the
            patterns of the operands before, that of the other's result, and whether no nonzeros take part. None where
            both are the same.
        holds: whether it serves the dense operands of a call; None for all.
    """

    name: str
    inner: Request
    take: Sequence[Take]
    put: Put | None = None
    holds: Callable[[Tensors], bool] | None = None


@dataclass(frozen=True)
class Output:
    """The form of a result: a dense tensor, or values on a pattern known since compilation.

    Attributes:
        kept_shape: sizes of the sparse letters that it has, in the output's order.
        width_shape: sizes of the dense letters, in the output's order.
        permutation: from (kept, dense) letters to the output's order; None when they are in it already.
        pattern: pattern of a sparse output, over kept modes; None of a dense one.
        own: whether the result's pattern is the sparse operand's own.
        slot: (nnz,) the row of the output each nonzero adds to; None where it is the nonzero's own number.
    """

    kept_shape: Ints
    width_shape: Ints
    permutation: Ints | None
    pattern: Pattern | None
    own: bool
    slot: Tensor | None

    @cached_property
    def sparse(self) -> bool:
        """True if the result is a SparseTensor."""
        return self.pattern is not None

    @cached_property
    def rows(self) -> int:
        """Rows of the result."""
        return prod(self.kept_shape) if self.pattern is None else self.pattern.nnz

    @property
    def width(self) -> int:
        """Elements of a row."""
        return prod(self.width_shape)

    def strides(self, joined: bool) -> Ints | None:
        """Strides of a dense result seen as (rows, *dense sizes); None if it cannot be seen so.

        If `joined`, also None where the dense sizes are not one dimension too.
        """
        sizes = (*self.kept_shape, *self.width_shape)
        order = self.permutation or tuple(range(len(sizes)))
        strides = {dim: volume(sizes, order[at + 1 :]) for at, dim in enumerate(order)}
        count = len(self.kept_shape)
        for dims in (range(count), range(count, len(sizes)))[: 1 + joined]:
            if any(strides[n] != strides[n + 1] * sizes[n + 1] for n in dims[:-1]):
                return None
        return (strides[count - 1] if count else 1, *(strides[n] for n in range(count, len(sizes))))

    def letters_apart(self, rows: Tensor) -> Tensor:
        """The rows of a dense result with a dimension for each letter."""
        return rows if len(self.kept_shape) == 1 else rows.reshape((*self.kept_shape, *self.width_shape))

    def shaped(self, rows: Tensor) -> Tensor:
        """A dense result of (rows, *dense sizes)."""
        result = self.letters_apart(rows)
        return result if self.permutation is None else result.permute(self.permutation)


def check_form(form: str, e: Einsum) -> None:
    """Raise `PlanError` unless a result can be given as ``auto``, ``dense`` or, having a pattern, ``sparse``."""
    if form not in ("auto", "dense", "sparse"):
        raise PlanError(f'output must be "auto", "dense" or "sparse", found {form!r}')
    if form == "sparse" and not e.kept:
        which = "the" if len(e.sparse) == 1 else "a"
        why = f"keeps no mode of {which} sparse operand, so its result has no pattern"
        raise PlanError(f'"{e.text}" {why}; use output="dense"')


def is_sparse(form: str, e: Einsum, coordinates: Sequence[Sequence[str]]) -> bool:
    """Return True if a result in this form is sparse, given the letters with coordinates of each sparse operand.

    By itself (``auto``) it is where it keeps a letter with coordinates; of a single sparse operand's letters it must
    keep two or more, or all.
    """
    first = e.inputs[e.sparse[0]]
    kept = {*e.output} & set[str]().union(*coordinates)
    enough = len(e.sparse) > 1 or sum(map(first.__contains__, e.output)) >= min(2, len(set(first)))
    return form == "sparse" or (form == "auto" and bool(kept) and enough)


def known_result(bound: Bound, patterns: Sequence[Pattern], pattern: Pattern) -> Pattern:
    """Return the cached pattern equal to a result's pattern, of an einsum of the same operands, or `pattern` itself."""
    (first, *others), e = patterns, bound.einsum
    return first.known((e.inputs, e.output, e.sparse, bound.sizes), pattern, others)


def arranged(output: Output) -> tuple[Pattern | None, Tensor | None]:
    """A sparse result's pattern with its modes in the output's order, and which element of the rows each value is.

    The second is None where the modes are in that order already, a row for each entry.
    """
    if output.pattern is None or output.permutation is None:
        return output.pattern, None
    elements = torch.arange(output.rows * output.width, device=output.pattern.device)
    numbered = SparseTensor._make(output.pattern, elements.reshape(output.rows, *output.width_shape))
    arranged_numbers = numbered.expand_dense().permute(*output.permutation)
    return arranged_numbers.pattern, arranged_numbers._values


Result = Tensor | SparseTensor


def narrowed(result: Result, dtype: torch.dtype, what: str) -> Result:
    """The result in a dtype; DtypeError for an integer that does not fit."""
    if isinstance(result, SparseTensor):
        return result.with_values(fitted(result.values, dtype, what))
    return fitted(result, dtype, what)


# -- operands ---------------------------------------------------------------------------------------------------------
def repeated_dims(operand: Tensor) -> Ints:
    """Return the dimensions along which a tensor repeats one slice (stride 0); none if it requires a gradient.

    The gradient of an expanded tensor has an element for each of its own, which that of one slice has not.
    """
    strides = operand.stride()
    if 0 not in strides or operand.requires_grad:
        return ()
    return tuple(n for n, (size, stride) in enumerate(zip(operand.shape, strides, strict=True)) if size > 1 > stride)


def promoted(operands: Sequence[Operand]) -> Sequence[Operand]:
    """Convert operands to one dtype under autocast: the widest float among them, as torch promotes.

    Autocast makes layers give narrower floats than the tensors that a caller keeps. Outside of autocast nothing is
    converted unasked.
    """
    if not (torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(operands[0].device.type)):
        return operands
    floats = {o.dtype for o in operands if o.dtype.is_floating_point}
    if len(floats) < 2:
        return operands
    return converted(operands, reduce(torch.promote_types, floats), operands[0].device)  # type: ignore[return-value]


def converted(operands: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Sequence[Any]:
    """Operands of a compiled kernel, floats brought to its dtype where autocast is on."""
    if not dtype.is_floating_point or not torch.is_autocast_enabled(device.type):
        return operands
    both = Tensor, SparseTensor
    return [o.to(dtype) if isinstance(o, both) and o.dtype.is_floating_point else o for o in operands]


def dense_of_call(written: Bound, dense: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensors:
    """Return the dense operands of a call as tensors of the kernel's dtype; convert ndarrays and autocast's floats.

    Raises:
        ShapeError, DtypeError, DeviceError: the einsum was not compiled for them.
    """
    text = written.einsum.text
    positions = written.einsum.dense
    shapes = written.dense_shapes
    if len(dense) == len(shapes):
        for operand, shape in zip(dense, shapes, strict=True):
            if not (
                type(operand) is Tensor
                and operand.dtype is dtype
                and operand.layout is torch.strided
                and not operand.is_nested
                and operand.shape == shape
                and operand.device == device
            ):
                break
        else:  # nothing need be done to them, or said, as of most
            return dense
    if len(dense) != len(positions):
        raise ShapeError(f'"{text}" takes {len(positions)} dense operands, found {len(dense)}')
    operands = [as_dense(operand, f"operand {p + 1}") for operand, p in zip(dense, positions, strict=True)]
    tensors = converted(operands, dtype, device)
    for operand, position in zip(tensors, positions, strict=True):
        if not isinstance(operand, Tensor):
            raise DtypeError(f"operand {position + 1} must be a torch tensor, found {type(operand).__name__}")
        if operand.layout != torch.strided:
            raise DtypeError(f"operand {position + 1} must be dense, as it was compiled; found {operand.layout}")
        check_operand(operand, position, dtype, device)
        expected = written.shape(position)
        broadcasts = operand.ndim == len(expected) and all(
            f in (1, n) for f, n in zip(operand.shape, expected, strict=True)
        )
        if not broadcasts:
            raise ShapeError(
                f'operand {position + 1} of "{text}": the kernel was compiled for shape '
                f"{tuple(expected)}, found {tuple(operand.shape)}; compile again for other sizes"
            )
    return tensors


def stand_in(operand: Operand) -> Operand:
    """A tensor to compile for in place of an operand: its shape and repeated dimensions, and memory that holds nothing.

    What is compiled outlives the call, and an operand that a transform of `torch.func` wraps has no memory to look at.
    """
    if isinstance(operand, SparseTensor):
        return SparseTensor._make(operand._pattern, stand_in(operand._values))
    repeated = repeated_dims(operand)
    strides = [int(n not in repeated) for n in range(operand.ndim)]  # elements overlap, since nobody reads them
    return torch.empty_strided(operand.shape, strides, dtype=operand.dtype, device=operand.device)


def stand_ins(bound: Bound, sparse: Sequence[SparseTensor]) -> list[SparseTensor | Tensor]:
    """Return operands to compile an einsum for: these sparse ones, and dense ones without memory."""
    like = torch.empty((), dtype=sparse[0].dtype, device=sparse[0].device)
    sparse_operands = iter(sparse)
    return [
        next(sparse_operands) if p in bound.einsum.sparse else like.expand(bound.shape(p))
        for p in range(len(bound.einsum.inputs))
    ]


def as_operand(operand: Any, what: str) -> Any:
    """A SparseTensor of anything sparse, a tensor of an ndarray; all else as it is. Raises as `as_dense`."""
    if type(operand) is Tensor and operand.layout is torch.strided and not operand.is_nested:
        return operand
    if isinstance(operand, SparseTensor):
        return operand
    dense = as_dense(operand, what)
    sparse = SparseTensor.coerce(dense)
    return dense if sparse is None else sparse


def check_operand(
    operand: SparseTensor | Tensor,
    position: int | str,
    dtype: torch.dtype,
    device: torch.device,
    other: str = "the sparse operand",
) -> None:
    """Raise unless an operand, at a position or of a name, has the dtype and the device that another one has."""
    what = position if isinstance(position, str) else f"operand {position + 1}"
    if operand.dtype != dtype:
        raise DtypeError(f"{what} has dtype {operand.dtype}, {other} has {dtype}; convert one of them: {CONVERT}")
    if operand.device != device:
        raise DeviceError(f"{what} is on {operand.device}, {other} is on {device}; move one of them with .to()")


_programs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Patterns of coordinates that programs hold, which are checked once: a check takes as long as a short product."""
NODES = 16
"""Patterns kept for one tensor of coordinates: its nodes of other dtypes and dense modes. Not measured."""


def placed(values: Tensor, coords: Tensor, shape: tuple[Any, ...], in_blocks: bool, coalesced: bool) -> SparseTensor:
    """Return the tensor of a program's values and coordinates; a pattern is found again if torch counts no changes."""
    patterns = _programs.setdefault(coords, {})
    changes = None if coords.is_inference() else coords._version
    key = changes, shape, values.shape, values.dtype, in_blocks, coalesced
    pattern = patterns.get(key)
    if pattern is not None and values.device == pattern.device:
        return SparseTensor._make(pattern, values)
    make = SparseTensor.from_blocks if in_blocks else SparseTensor
    made = make(coords, values, shape, coalesce=coalesced)
    if made._values is values:  # and not in another order
        if len(patterns) >= NODES:
            patterns.clear()
        patterns[key] = made._pattern
    return made
