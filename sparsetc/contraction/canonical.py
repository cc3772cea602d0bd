"""An einsum as written -> one that the compiler lowers: a sparse operand of distinct letters, dense operands reduced.

In: a `Bound` equation and its operands. Out: `Canonical`: the reduced `Bound`, the coordinates to pack, and how each
call's dense operands are brought to the form that kernels read: bits, strides and broadcasts settled, and products of
them alone made by torch, in the precision that the options name and not in autocast's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from sparsetc.codegen import transpose
from sparsetc.errors import DeviceError, DtypeError, ShapeError
from sparsetc.ir.equation.einsum import Bound, Einsum, distinct
from sparsetc.ir.equation.rewrite import Reduction, dense_subexpressions
from sparsetc.ir.program import operands
from sparsetc.options import Options, current
from sparsetc.runtime.calls import integer_einsum
from sparsetc.support import memory
from sparsetc.support.entry import matmul_precision, without_autocast
from sparsetc.support.lru import cached_property
from sparsetc.tensor.inputs import CONVERT, as_dense
from sparsetc.tensor.pattern import Pattern, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor

# -- broadcasts -------------------------------------------------------------------------------------------------------

Dims = tuple[int, ...]
Tensors = Sequence[torch.Tensor]
Operand = TypeVar("Operand", torch.Tensor, SparseTensor, torch.Tensor | SparseTensor)
STEP = 1 << 29
"""Products of a dense step from which it is worth its call on a GPU: of 10^8 a kernel alone took half the time of step
and kernel, of 3 * 10^9 four times it (one H200)."""


def repeated_dims(operand: torch.Tensor) -> Dims:
    """The dimensions along which a tensor is one slice repeated (stride 0); none where it may want a gradient.

    The gradient of an expanded tensor has an element for each of its own, which that of one slice has not.
    """
    strides = operand.stride()
    if 0 not in strides or operand.requires_grad:
        return ()
    return tuple(n for n, (size, stride) in enumerate(zip(operand.shape, strides, strict=True)) if size > 1 > stride)


def broadcast_dims(bound: Bound, operands: Sequence[torch.Tensor | SparseTensor], repeated: bool) -> dict[int, Dims]:
    """For each dense operand, the dimensions whose letters it need not have: another operand has them in full.

    Args:
        bound: the einsum as written.
        operands: its operands; a size of 1 broadcasts.
        repeated: whether a dimension that is one slice repeated is left out as one of size 1 is.
    """
    e = bound.einsum
    holders = {c: set(e.holders(c)) for c in e.indices}
    dropped: dict[int, Dims] = {}
    for p in e.dense:
        operand, dims = operands[p], []
        alike = repeated_dims(operand) if repeated and isinstance(operand, torch.Tensor) else ()
        for n, (letter, size) in enumerate(zip(e.inputs[p], operand.shape, strict=True)):
            broadcast = n in alike or size == 1 != bound.by_index[letter]
            if broadcast and e.inputs[p].count(letter) == 1 and len(holders[letter]) > 1:
                holders[letter].discard(p)
                dims.append(n)
        dropped[p] = tuple(dims)
    return dropped


def without(bound: Bound, dropped: dict[int, Dims]) -> Bound:
    """The einsum whose dense operands lack these dimensions."""
    e = bound.einsum
    inputs = tuple(
        [tuple([c for n, c in enumerate(term) if n not in dropped.get(p, ())]) for p, term in enumerate(e.inputs)]
    )
    return bound if inputs == e.inputs else Bound.of(Einsum(inputs, e.output, e.sparse, e.text), bound.by_index)


# -- tables -----------------------------------------------------------------------------------------------------------


def resolved(operand: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory reads as its elements do: torch marks negation and conjugation by a bit."""
    return operand.resolve_conj().resolve_neg() if operand.is_conj() or operand.is_neg() else operand


def table(
    operand: torch.Tensor, shape: tuple[int, ...], permutation: Dims | None, settings: Options, contiguous: bool = True
) -> torch.Tensor:
    """Return the operand expanded to `shape`, its dimensions in the order a kernel reads them, contiguous or a view.

    Raises:
        OutOfMemoryError: the operand is a broadcast one whose copy would pass the memory limit.
    """
    whole = operand if operand.shape == shape else operand.expand(shape)
    whole = resolved(whole if permutation is None else whole.permute(permutation))
    if not contiguous or whole.is_contiguous():
        return whole
    if 0 in whole.stride():
        what = f"a broadcast operand of shape {tuple(shape)}, which kernels read whole,"
        memory.check(what, whole.numel() * whole.element_size(), whole.device, settings.memory_limit)
    return transpose.contiguous(whole)


# -- products of dense operands alone ---------------------------------------------------------------------------------


def promoted(operands: Sequence[Operand]) -> list[Operand]:
    """Operands of one dtype where autocast is on and floats differ: the widest, as torch promotes them.

    Autocast makes layers give narrower floats than the tensors that a caller keeps. Outside of autocast nothing is
    converted unasked.
    """
    if not torch.is_autocast_enabled(operands[0].device.type):
        return list(operands)
    floats = {o.dtype for o in operands if o.dtype.is_floating_point}
    if len(floats) < 2:
        return list(operands)
    widest = reduce(torch.promote_types, floats)
    return [o.to(widest) if o.dtype.is_floating_point and o.dtype != widest else o for o in operands]


def converted(operands: Tensors, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Dense operands of a compiled kernel, floats brought to its dtype where autocast is on."""
    if not dtype.is_floating_point or not torch.is_autocast_enabled(device.type):
        return operands
    return [o.to(dtype) if isinstance(o, torch.Tensor) and o.dtype.is_floating_point else o for o in operands]


def einsum(equation: str, *operands: torch.Tensor, precision: str = "highest") -> torch.Tensor:
    """The result of `torch.einsum`, 16-bit floats summed in float32 and rounded once; integers stay in 64 bits."""
    # Torch's own rules serve forward mode and transforms, in the precision that is in force when they are asked.
    plain = not transforming() and forward_ad._current_level < 0
    if plain and torch.is_grad_enabled() and any(o.requires_grad for o in operands):
        result: torch.Tensor = _DenseEinsum.apply(equation, precision, *operands)
        return result
    return _contracted(equation, precision, operands)


class _DenseEinsum(torch.autograd.Function):
    """`einsum`, whose gradient is made as its result is, wherever `backward` is called."""

    @staticmethod
    def forward(ctx: Any, equation: str, precision: str, *operands: torch.Tensor) -> torch.Tensor:
        ctx.equation, ctx.precision = equation, precision
        ctx.save_for_backward(*operands)
        return _contracted(equation, precision, operands)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        operands, again = ctx.saved_tensors, torch.is_grad_enabled()
        wanted = [o for o, needed in zip(operands, ctx.needs_input_grad[2:], strict=True) if needed]
        with torch.enable_grad(), without_autocast(upstream.device), matmul_precision(ctx.precision):
            result = _contracted(ctx.equation, ctx.precision, operands)
            gradients = iter(torch.autograd.grad(result, wanted, upstream, create_graph=again))
        return (None, None, *(next(gradients) if needed else None for needed in ctx.needs_input_grad[2:]))


def _contracted(equation: str, precision: str, operands: Tensors) -> torch.Tensor:
    dtype = operands[0].dtype
    with without_autocast(operands[0].device), matmul_precision(precision):
        if dtype in (torch.float16, torch.bfloat16):
            return _product(equation, [o.float() for o in operands]).to(dtype)
        if not (dtype.is_floating_point or dtype.is_complex):  # torch's own mixes types where an index has size 0
            return integer_einsum(equation, *(o.long() for o in operands))
        return _product(equation, operands)


def aligned_to(operand: torch.Tensor, letters: str, output: str) -> torch.Tensor:
    """The operand with its modes in the output's order, and a mode of size 1 for each that it lacks."""
    whole = operand.permute([letters.index(c) for c in output if c in letters])
    return whole[tuple([slice(None) if c in letters else None for c in output])]


WIDE = 8
"""Elements behind a mode from which it is contracted where it lies: a copy of the tensor took up to twice as long (one
core, 10 shapes of TTM chains)."""


def _product(equation: str, operands: Tensors) -> torch.Tensor:
    """The result of `torch.einsum`; two kinds of products of two operands are made without copies of these.

    What sums nothing is multiplied element by element, where torch would take matrices of width 1. A matrix is
    multiplied into a mode that lies within the other operand as many small matrices.
    """
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if len(operands) != 2 or any(len(set(t)) < len(t) for t in terms):
        return torch.einsum(equation, *operands)
    shared, summed = set(terms[0]) & set(terms[1]), {*terms[0], *terms[1]}.difference(output)
    if not summed:
        own = [aligned_to(o, t, output) for t, o in zip(terms, operands, strict=True)]
        sizes = torch.broadcast_shapes(*(o.shape for o in own))
        # Modes behind one that each operand lacks are written out first: torch is slow where short ones repeat.
        lacked = [next((n for n, c in enumerate(output) if c not in t), len(output)) for t in terms]
        at = min(len(output), max(lacked) + 1)
        wide = [o.expand(*o.shape[:at], *sizes[at:]).flatten(at) if at < len(output) else o for o in own]
        return torch.mul(*wide).view(sizes)
    both = sorted(zip(terms, operands, strict=True), key=lambda own: own[1].numel())
    (matrix, table), (letters, tensor) = both
    if len(matrix) == 2 and len(shared) == 1 and shared == summed:
        (mode,) = shared
        at, kept = letters.index(mode), matrix.replace(mode, "")
        if at and tensor.shape[at + 1 :].numel() >= WIDE:
            table = table if matrix[1] == mode else table.t()
            result = torch.matmul(table, tensor.flatten(at + 1)).unflatten(-1, tensor.shape[at + 1 :])
            made = letters.replace(mode, kept)
            return result.permute([made.index(c) for c in output])
    return torch.einsum(equation, *operands)


Operands = Sequence[SparseTensor | torch.Tensor]
Patterns = Sequence[Pattern]


@dataclass(frozen=True)
class Canonical:
    """A reduced einsum over one sparse operand, and the way there.

    Attributes:
        narrow: the einsum as written, less the dimensions along which its dense operands were broadcast.
        broadcast: the dimensions along which each dense operand was broadcast.
        bound: the reduced einsum, the sparse operand's letters distinct.
        coords: (order, nnz) of the sparse operand.
    """

    written: Bound
    narrow: Bound
    broadcast: tuple[Dims, ...]
    reduction: Reduction
    bound: Bound
    coords: torch.Tensor
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def letters(self) -> tuple[str, ...]:
        """The sparse operand's letters, which are distinct, by mode."""
        return self.bound.einsum.sparse_indices

    @cached_property
    def arrangement(self) -> tuple[Dims | None, ...]:
        """For each reduced dense operand, the permutation to (sparse letters, dense letters); None when it is so."""
        e, axes = self.bound.einsum, (*self.letters, *self.bound.einsum.axes)
        arranged = [(e.inputs[p], tuple(c for c in axes if c in e.inputs[p])) for p in e.dense]
        return tuple(None if letters == order else tuple(map(letters.index, order)) for letters, order in arranged)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the sparse operand's modes, one for each distinct letter."""
        return self.bound.extents(self.letters)

    @property
    def kept(self) -> tuple[int, ...]:
        """Modes of the sparse operand that the output has, in the output's order."""
        return tuple(map(self.letters.index, self.bound.einsum.kept))

    def settled(self, dense: Sequence[Any]) -> Tensors:
        """The dense operands of a call as tensors of the kernel's dtype; raises unless it was compiled for them."""
        return dense_of_call(self.written, dense, self.dtype, self.device)

    def slices(self, dense: Tensors) -> list[torch.Tensor] | None:
        """The operands of `narrow`; None where an operand is not broadcast as those were that were compiled for."""
        if self.narrow is self.written:
            return list(dense)
        sliced = []
        for operand, dims in zip(dense, self.broadcast, strict=True):
            repeated = repeated_dims(operand) if dims else ()
            if any(operand.shape[n] != 1 and n not in repeated for n in dims):
                return None
            for n in reversed(dims):
                operand = operand.select(n, 0)
            sliced.append(operand)
        return sliced

    def reduced(self, dense: Tensors, settings: Options | None = None) -> Tensors:
        """Dense operands of `narrow` -> those of the reduced einsum, differentiable."""
        if not self.reduction.steps:
            return dense
        whole: list[torch.Tensor | None] = [None] * len(self.narrow.einsum.inputs)
        for operand, position in zip(dense, self.narrow.einsum.dense, strict=True):
            whole[position] = operand.expand(self.narrow.shape(position))
        contract = partial(einsum, precision=(settings or current()).effective_precision())
        left = self.reduction.apply(whole, contract)  # type: ignore[arg-type]
        return [left[p] for p in self.bound.einsum.dense]  # type: ignore[misc]

    def arrange(
        self,
        dense: Tensors,
        settings: Options | None = None,
        contiguous: bool = True,
        read: Sequence[operands.Operand] = (),
    ) -> list[torch.Tensor]:
        """Dense operands of the reduced einsum -> tables, contiguous as kernels read them, or views for torch.

        Args:
            dense: the operands.
            settings: the memory limit.
            contiguous: False for views.
            read: the operands of a program, where it may read some in the order that they are given in.

        Raises:
            OutOfMemoryError: the table of a broadcast operand would pass the memory limit.
        """
        settings, orders = settings or current(), list(self.arrangement)
        for n in (n for n, o in enumerate(read) if o.strides):
            orders[n] = None
        return [
            table(operand, shape, permutation, settings, contiguous)
            for operand, shape, permutation in zip(dense, self.bound.dense_shapes, orders, strict=True)
        ]


def canonicalise(bound: Bound, operands: Operands, repeated: bool = False, cut: bool = False) -> Canonical:
    """Reduce the dense operands' own expressions.

    Args:
        bound: the einsum, the sparse operand's letters distinct.
        operands: its operands.
        repeated: whether a dense operand's dimensions of stride 0 are left out as those of size 1 are, so that one
            slice is read and not copies; not where operands only stand for others of their shapes.
        cut: whether the sparse operand is one of the chunks of a tensor, which have one einsum whatever each holds.
    """
    (position,) = bound.einsum.sparse
    x = operands[position]
    assert isinstance(x, SparseTensor)
    dropped = broadcast_dims(bound, operands, repeated)
    narrowed = without(bound, dropped)
    least = 0 if x.device.type == "cpu" else STEP
    reduction = dense_subexpressions(narrowed, 0 if cut else max(1, x.nnz), least)
    einsums = bound, narrowed, tuple(dropped.values()), reduction, reduction.bound
    return Canonical(*einsums, x.coords, x.dtype, x.device)


def one_mode_a_letter(bound: Bound, operands: Operands) -> tuple[Bound, Operands, torch.Tensor | None]:
    """Make coordinates of the sparse operand's dense modes, take the diagonal of repeated letters, and sort it.

    Returns:
        The einsum, its operands, of which the sparse one holds no values, and the numbers of the elements of values
        that take part, in order; None for all as they are.
    """
    e = bound.einsum
    (position,) = e.sparse
    x = operands[position]
    assert isinstance(x, SparseTensor)
    pattern, source = x.pattern.expanded(tuple(x._values.shape[1:])).distinct(e.inputs[position])
    if pattern is x.pattern:
        return bound, operands, None
    inputs = tuple(distinct(t) if p == position else t for p, t in enumerate(e.inputs))
    none = torch.zeros((), dtype=x.dtype, device=x.device).expand(pattern.nnz)
    whole = [SparseTensor._make(pattern, none) if o is x else o for o in operands]
    return Bound(Einsum(inputs, e.output, e.sparse, e.text), bound.sizes), whole, source


def dense_of_call(written: Bound, dense: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensors:
    """The dense operands of a call of a compiled einsum, as tensors of its dtype: ndarrays too, and autocast's floats.

    Raises:
        ShapeError, DtypeError, DeviceError: the einsum was not compiled for them.
    """
    text, positions, shapes = written.einsum.text, written.einsum.dense, written.dense_shapes
    if len(dense) == len(shapes) and all(_is_plain(o, s, dtype, device) for o, s in zip(dense, shapes, strict=True)):
        return list(dense)
    if len(dense) != len(positions):
        raise ShapeError(f'"{text}" takes {len(positions)} dense operands, found {len(dense)}')
    operands = [as_dense(operand, f"operand {p + 1}") for operand, p in zip(dense, positions, strict=True)]
    tensors = converted(operands, dtype, device)
    for operand, position in zip(tensors, positions, strict=True):
        if not isinstance(operand, torch.Tensor):
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


def _is_plain(operand: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if nothing need be done to an operand of a call, or said of it, as of most."""
    return (
        type(operand) is torch.Tensor
        and operand.dtype is dtype
        and operand.layout is torch.strided
        and not operand.is_nested
        and operand.shape == shape
        and operand.device == device
    )


def stand_in(operand: Operand) -> Operand:
    """A tensor to compile for in place of an operand: its shape and repeated dimensions, and memory that holds nothing.

    What is compiled outlives the call, and an operand that a transform of `torch.func` wraps has no memory to look at.
    """
    if isinstance(operand, SparseTensor):
        return SparseTensor._make(operand._pattern, stand_in(operand._values))
    repeated = repeated_dims(operand)
    strides = [int(n not in repeated) for n in range(operand.ndim)]  # elements overlap, since nobody reads them
    return torch.empty_strided(operand.shape, strides, dtype=operand.dtype, device=operand.device)


def stand_ins(bound: Bound, sparse: Sequence[SparseTensor]) -> list[SparseTensor | torch.Tensor]:
    """Operands to compile an einsum for: these sparse ones, and dense ones of its shapes that take no memory."""
    like = torch.empty((), dtype=sparse[0].dtype, device=sparse[0].device)
    sparse_operands = iter(sparse)
    return [
        next(sparse_operands) if p in bound.einsum.sparse else like.expand(bound.shape(p))
        for p in range(len(bound.einsum.inputs))
    ]


def as_operand(operand: Any, what: str) -> Any:
    """A SparseTensor of anything sparse, a tensor of an ndarray; all else as it is. Raises as `as_dense`."""
    if type(operand) is torch.Tensor and operand.layout is torch.strided and not operand.is_nested:
        return operand
    dense = as_dense(operand, what)
    sparse = SparseTensor.coerce(dense)
    return dense if sparse is None else sparse


def check_operand(
    operand: SparseTensor | torch.Tensor, position: int | str, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless a dense operand, at a position or of a name, has the sparse operand's dtype and device."""
    what = position if isinstance(position, str) else f"operand {position + 1}"
    if operand.dtype != dtype:
        raise DtypeError(
            f"{what} has dtype {operand.dtype}, the sparse operand has {dtype}; convert one of them: {CONVERT}"
        )
    if operand.device != device:
        raise DeviceError(
            f"{what} is on {operand.device}, the sparse operand is on {device}; move one of them with .to()"
        )
