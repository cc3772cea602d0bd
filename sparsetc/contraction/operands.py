"""Operands as callers give them, checked and brought to one dtype; and products of dense operands alone, by torch.

In: operands of an einsum, to compile it for or of a call. Out: tensors of the kernel's dtype and device, or an error;
products in the precision that the options name and not in autocast's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from sparsetc.contraction.autograd import Multilinear, apply
from sparsetc.contraction.autograd import Tensors as Tensors
from sparsetc.errors import DeviceError, DtypeError, ShapeError
from sparsetc.ir.equation.einsum import Bound
from sparsetc.runtime.calls import integer_einsum
from sparsetc.support import Ints
from sparsetc.support.entry import matmul_precision, summed_wide, without_autocast
from sparsetc.tensor.inputs import CONVERT, as_dense
from sparsetc.tensor.pattern import Pattern, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor

Operand = TypeVar("Operand", Tensor, SparseTensor, Tensor | SparseTensor)
Operands = Sequence[SparseTensor | Tensor]
Patterns = Sequence[Pattern]


def repeated_dims(operand: Tensor) -> Ints:
    """Return the dimensions along which a tensor repeats one slice (stride 0); none if it requires a gradient.

    The gradient of an expanded tensor has an element for each of its own, which that of one slice has not.
    """
    strides = operand.stride()
    if 0 not in strides or operand.requires_grad:
        return ()
    return tuple(n for n, (size, stride) in enumerate(zip(operand.shape, strides, strict=True)) if size > 1 > stride)


# -- products of dense operands alone ---------------------------------------------------------------------------------


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


def einsum(equation: str, *operands: Tensor, precision: str = "highest") -> Tensor:
    """The result of `torch.einsum`, 16-bit floats summed in float32 and rounded once; integers stay in 64 bits."""
    # Torch's own rules serve forward mode and transforms, in the precision in force when they are asked, and a single
    # operand, which the result may be a view of.
    if transforming() or forward_ad._current_level >= 0 or len(operands) == 1:
        return _contracted(equation, precision, operands)
    return apply(DenseEinsum(equation, precision), operands)


@dataclass(frozen=True)
class DenseEinsum(Multilinear):
    """`einsum` for autograd: gradients are made as the result is, wherever `backward` is called."""

    equation: str
    precision: str

    def rows(self, tensors: Tensors) -> Tensor:
        """The result, outside autograd."""
        return _contracted(self.equation, self.precision, tensors)

    def gradients(self, wanted: Sequence[bool], tensors: Tensors, upstream: Tensor) -> list[Tensor | None]:
        """The gradient for each tensor where it is wanted."""
        again, followed_tensors = torch.is_grad_enabled(), [t for t, w in zip(tensors, wanted, strict=True) if w]
        with torch.enable_grad(), matmul_precision(self.precision):
            gradients = torch.autograd.grad(self.rows(tensors), followed_tensors, upstream, create_graph=again)
        each = iter(gradients)
        return [next(each) if w else None for w in wanted]


def _contracted(equation: str, precision: str, operands: Tensors) -> Tensor:
    dtype = operands[0].dtype
    with without_autocast(operands[0].device), matmul_precision(precision):
        if dtype in (torch.float16, torch.bfloat16):
            pair = _pair(equation)
            # Of a matrix product, with every summed letter in both, a GPU rounds once.
            if operands[0].is_cuda and pair is not None and all(pair[2] <= set(term) for term in pair[0]):
                with summed_wide():
                    return _product(equation, operands)
            return _product(equation, [o.float() for o in operands]).to(dtype)
        if not (dtype.is_floating_point or dtype.is_complex):  # torch's own mixes types where an index has size 0
            return integer_einsum(equation, *(o.long() for o in operands))
        return _product(equation, operands)


WIDE = 8
"""Least elements behind a mode for contracting it in its place: copying the tensor first took up to twice as long (one
core, 10 shapes of TTM chains)."""


def _product(equation: str, operands: Tensors) -> Tensor:
    """Compute `torch.einsum`; some products of two operands faster, without copying them.

    What sums nothing is multiplied element by element, where torch would take matrices of width 1. A matrix is
    multiplied into a mode that lies within the other operand as many small matrices, into its last mode as one.
    """
    outer = _outer(equation)
    if outer is not None:
        lying, at = outer
        aligned = [o.permute(order)[places] for o, (order, places) in zip(operands, lying, strict=True)]
        # `torch.broadcast_shapes` takes up to 240 us for it (torch 2.13).
        sizes = [m if n == 1 else n for m, n in zip(aligned[0].shape, aligned[1].shape, strict=True)]
        wide = [o.expand(*o.shape[:at], *sizes[at:]).flatten(at) if at < len(sizes) else o for o in aligned]
        return torch.mul(*wide).view(sizes)
    small = int(len(operands) == 2 and operands[0].numel() > operands[1].numel())
    within = _within(equation, small)
    if within is not None:
        behind, turned, order = within
        table, tensor = operands[small], operands[1 - small]
        if behind == tensor.ndim and (behind == 2 or tensor.is_contiguous()):
            return torch.matmul(tensor, table if turned else table.t()).permute(order)
        if tensor.shape[behind:].numel() >= WIDE:
            result = torch.matmul(table.t() if turned else table, tensor.flatten(behind))
            return result.unflatten(-1, tensor.shape[behind:]).permute(order)
    return torch.einsum(equation, *operands)


@lru_cache(maxsize=1024)
def _pair(equation: str) -> tuple[list[str], str, set[str]] | None:
    """The terms of two operands, the output and the letters that are summed; None of other einsums."""
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if len(terms) != 2 or any(len(set(term)) < len(term) for term in terms):
        return None
    return terms, output, {*terms[0], *terms[1]}.difference(output)


@lru_cache(maxsize=1024)
def _outer(equation: str) -> tuple[list[tuple[list[int], tuple[slice | None, ...]]], int] | None:
    """Return how two operands lie in the output of an einsum that sums nothing; None of other einsums.

    Returns:
        For each operand the order of its modes in the output, and an index with a mode of size 1 for each that it
        lacks; and from which mode on both are written out before, since torch is slow where short ones repeat.
    """
    pair = _pair(equation)
    if pair is None or pair[2]:
        return None
    terms, output, _ = pair
    lying, lacked = list[tuple[list[int], tuple[slice | None, ...]]](), list[int]()
    for term in terms:
        order = [term.index(c) for c in output if c in term]
        lying.append((order, tuple([slice(None) if c in term else None for c in output])))
        lacked.append(next((n for n, c in enumerate(output) if c not in term), len(output)))
    return lying, min(len(output), max(lacked) + 1)


@lru_cache(maxsize=1024)
def _within(equation: str, small: int) -> tuple[int, bool, list[int]] | None:
    """Return how a matrix, the operand of this number, is multiplied into a mode of the other; None if it cannot be.

    Returns:
        The modes up to that one, whether the matrix is transposed, and the order of the result's modes.
    """
    pair = _pair(equation)
    if pair is None:
        return None
    terms, output, summed = pair
    matrix, letters = terms[small], terms[1 - small]
    shared = set(matrix) & set(letters)
    if len(matrix) != 2 or len(shared) != 1 or shared != summed:
        return None
    (mode,) = shared
    result = letters.replace(mode, matrix.replace(mode, ""))
    return letters.index(mode) + 1, matrix[1] != mode, [result.index(c) for c in output]


# -- operands ---------------------------------------------------------------------------------------------------------


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
