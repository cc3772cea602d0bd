"""Functions that generated torch programs call: sums over runs of rows, products, einsums of integers, bitmap tiles.

Runs are given by offsets (runs + 1,), and a sum has one row a run. The fastest torch call was chosen by measurement on
two x86 cores (`benchmarks/results/kernel_probes.json`): FBGEMM's embedding bag for rows of float32, MKL's sparse
product for float64 and for single elements of float32 (1.1 to 2.3 times faster there), a sorted index_add for every
other type and on a GPU.

Torch has no matrix product of integers on a GPU. There `integer_einsum` multiplies and adds up pieces. Sums wrap modulo
2**64, as torch's do, so they have one value in any order; in float64 they would not be exact.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsetc.errors import DtypeError
from sparsetc.support import among
from sparsetc.support.checks import LARGE, room
from sparsetc.support.entry import matmul_precision as matmul_precision
from sparsetc.tensor import dtypes
from sparsetc.tensor.coords import set_bits
from sparsetc.tensor.dtypes import LONG

WIDE = 8
"""Elements a row from which torch's sampled product of matrices beats products of gathered rows, and..."""
SAMPLED = 1 << 16
"""...elements in all (2 cores)."""
PIECE = 3 << 18
"""Elements of rows that are gathered at a time."""

LONG_SUM = 16
"""Pieces of `LONG` positions from which a product on a CPU is summed by pieces, if `FEW_SUMS` allows it."""
FEW_SUMS = 64
"""Most results of a product that is summed by pieces: for 1,000 a piece's product took five times as long as its
share of the whole (one core)."""
LONG_RUN = 32
"""Mean rows a run from which one matrix product a run beats outer products and a sum (2 cores, R = 16)."""


def bag(index: Tensor, table: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """(runs, width): for each run, the sum of ``weights[n] * table[index[n]]`` over its elements n.

    Args:
        index: (n,) rows of the table.
        table: (rows, width).
        offsets: (runs + 1,) from 0 to n.
        weights: (n,) of the table's dtype; None where all are 1.
    """
    if table.device.type == "cpu" and index.numel() and table.shape[1]:
        if cut := _cut(offsets, len(index), table.dtype):
            return _added(bag(index, table, cut[0], weights), cut[1])
        if table.dtype == torch.float32 and (table.shape[1] > 1 or weights is None):
            index = index.to(offsets.dtype)
            return F.embedding_bag(
                index, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
            )
        if table.dtype in (torch.float32, torch.float64):
            return _csr_product(offsets, index, table.new_ones(len(index)) if weights is None else weights, table)
    rows = table.index_select(0, _wide(index))
    return run_sums(rows if weights is None else rows * weights.unsqueeze(1), offsets)


def bags(index: Tensor, table: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """(runs, k, width): for each run and position m, the sum of ``weights[n, m] * table[index[n], m]`` over its n.

    Args:
        index: (n,) rows of the table.
        table: (rows, k, width).
        offsets: (runs + 1,) from 0 to n.
        weights: (n, k) of the table's dtype.
    """
    rows, k, _ = table.shape
    wide = rows * k >= 2**31
    offsets = offsets.long() if wide else offsets
    first, flat = index.to(torch.int64 if wide else torch.int32) * k, table.flatten(0, 1)
    return torch.stack([bag(first + m, flat, offsets, weights[:, m].contiguous()) for m in range(k)], 1)


def dots(first: Tensor, left: Tensor, second: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    """Return (n, k): ``weights[n] * (left[first[n], m] @ right[second[n], m])`` for each n and position m.

    On the CPU, where rows of `left` come in few runs, torch's sampled product of matrices gathers no row of `right`.

    Args:
        first: (n,) rows of `left`.
        left: (rows, k, width).
        second: (n,) rows of `right`.
        right: (rows of its own, k, width).
        weights: (n,) of the tables' dtype.
    """
    rows, k, width = left.shape
    out = left.new_empty((len(first), k))
    at = _wide(first)
    other = _wide(second)
    if left.device.type == "cpu" and left.dtype in (torch.float32, torch.float64) and len(at) * width >= SAMPLED:
        runs, counts = torch.unique_consecutive(at, return_counts=True)
        if len(runs) <= rows and width >= WIDE:
            offsets, in_order = F.pad(counts.cumsum(0), (1, 0)).to(other.dtype), left.index_select(0, runs)
            pattern = _csr(offsets, other, left.new_zeros(len(at)), len(right))
            for m in range(k):
                product = torch.sparse.sampled_addmm(pattern, in_order[:, m].contiguous(), right[:, m].t(), beta=0)
                torch.mul(product.values(), weights, out=out[:, m])
            return out
    step = max(1, PIECE // (k * width))
    for n in range(0, len(at), step):
        part = slice(n, n + step)
        gathered = left.index_select(0, at[part]).mul_(weights[part, None, None])
        torch.sum(gathered.mul_(right.index_select(0, other[part])), 2, out=out[part])
    return out


def add_rows(out: Tensor, row: Tensor, values: Tensor) -> None:
    """Add ``values[n]`` to ``out[row[n]]`` in place; neighbours of one row are summed in pieces first."""
    if out.device.type == "cpu" and len(row) > LONG:
        fresh = row[1:] != row[:-1]
        if 2 * int(fresh.sum()) < len(row):
            starts = F.pad(fresh.nonzero()[:, 0] + 1, (1, 0))
            values, row = run_sums(values, F.pad(starts, (0, 1), value=len(row))), row.index_select(0, starts)
    dtypes.add_rows(out, row, values)


def run_sums(rows: Tensor, offsets: Tensor) -> Tensor:
    """(runs, ...): the sum of the rows of each run. rows (n, ...); offsets (runs + 1,) from 0 to n."""
    if rows.is_complex():
        return torch.view_as_complex(run_sums(torch.view_as_real(rows), offsets))
    flat = rows.reshape(rows.shape[0], prod(rows.shape[1:]))
    runs = offsets.numel() - 1
    if flat.device.type == "cpu" and flat.numel() and flat.dtype in (torch.float32, torch.float64):
        index = torch.arange(flat.shape[0], dtype=offsets.dtype, device=flat.device)
        summed = bag(index, flat, offsets, None)
    else:
        owner = torch.repeat_interleave(
            torch.arange(runs, device=flat.device), torch.diff(offsets).long(), output_size=flat.shape[0]
        )
        summed = dtypes.add_rows(flat.new_zeros((runs, flat.shape[1])), owner, flat)
    return summed.reshape(runs, *rows.shape[1:])


def run_products(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """(runs, M, N): for each run, ``left.T @ right`` over its rows. left (n, M), right (n, N)."""
    runs = offsets.numel() - 1
    if runs and left.shape[0] >= LONG_RUN * runs:
        if cut := _cut(offsets, len(left), left.dtype):
            return _added(run_products(left, right, cut[0]), cut[1])
        out = left.new_empty((runs, left.shape[1], right.shape[1]))
        bounds, integers = offsets.tolist(), not (left.is_floating_point() or left.is_complex())
        for run in range(runs):
            rows = slice(bounds[run], bounds[run + 1])
            if integers:
                out[run] = integer_einsum("nm,nr->mr", left[rows], right[rows])
            else:
                torch.mm(left[rows].t(), right[rows], out=out[run])
        return out
    return run_sums(left.unsqueeze(2) * right.unsqueeze(1), offsets)


def _added(pieces: Tensor, offsets: Tensor) -> Tensor:
    """Return the sums of the pieces of each run, which are few and are added in 64 bits."""
    return run_sums(pieces.to(dtypes.wide(pieces.dtype)), offsets).to(pieces.dtype)


def _cut(offsets: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Offsets of pieces of runs, and of the pieces of each run; None where no run is too long, or sums are exact."""
    if rows <= LONG or not (dtype.is_floating_point or dtype.is_complex) or dtype == torch.float64:
        return None
    if int(torch.diff(offsets).max()) <= LONG:
        return None
    every = torch.arange(LONG, rows, LONG, dtype=offsets.dtype, device=offsets.device)
    pieces = torch.sort(torch.cat((offsets, every))).values
    return pieces, torch.searchsorted(pieces, offsets).to(offsets.dtype)


def _wide(index: Tensor) -> Tensor:
    """Return an index in a type by which torch selects rows."""
    return index.long() if index.dtype == torch.int16 else index


def _csr_product(offsets: Tensor, index: Tensor, weights: Tensor, table: Tensor) -> Tensor:
    matrix = _csr(offsets, index.to(offsets.dtype), weights, table.shape[0])
    if table.shape[1] == 1:
        return torch.mv(matrix, table.flatten()).unsqueeze(1)
    out = table.new_empty((offsets.numel() - 1, table.shape[1]))
    return torch.addmm(out, matrix, table, beta=0, out=out)


def _csr(offsets: Tensor, columns: Tensor, values: Tensor, width: int) -> Tensor:
    """Return torch's matrix in compressed rows with `width` columns, unchecked."""
    _hush()
    size = (offsets.numel() - 1, width)
    # Even given arrays, torch makes a sparse tensor on the default device.
    return torch.sparse_csr_tensor(offsets, columns, values, size, device=values.device, check_invariants=False)


@lru_cache
def _hush() -> None:
    """Make torch's first CSR tensor where its one warning, that they are in beta, is not shown to the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        none = torch.zeros(0, dtype=torch.long, device="cpu")
        torch.sparse_csr_tensor(none.new_zeros(2), none, none, (1, 1), device="cpu")


def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write the product of two matrices of one dtype to `out`; sums are as wide as `out`.

    Args:
        left: (m, k).
        right: (k, n), of the same dtype.
        out: (m, n), of that dtype, or float32 where the matrices are of 16 bits.

    Raises:
        DtypeError: the matrices are of two dtypes.
    """
    if left.dtype != right.dtype:
        raise DtypeError(f"a product is of matrices of one dtype, found {left.dtype} and {right.dtype}")
    if left.is_cuda:
        wide = {} if left.dtype == out.dtype else {"out_dtype": out.dtype}
        torch.mm(left, right, out=out, **wide)
        return
    left, right = left.to(out.dtype), right.to(out.dtype)  # torch has products of two dtypes on GPUs alone
    pieces = left.shape[1] // LONG
    if out.dtype not in (torch.float32, torch.complex64) or pieces < LONG_SUM or out.numel() > FEW_SUMS:
        torch.mm(left, right, out=out)
        return
    # MKL adds the products of vectors one after another: 20 million ones make 16,777,216.
    in_pieces = left[:, : pieces * LONG].unflatten(1, (pieces, LONG)).transpose(0, 1)
    torch.sum(torch.bmm(in_pieces, right[: pieces * LONG].unflatten(0, (pieces, LONG))), 0, out=out)
    out.add_(left[:, pieces * LONG :] @ right[pieces * LONG :])


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices of one dtype; a large one on a CPU in `room`.

    A small one is not: torch takes longer where it is given an output.
    """
    rows, columns = left.shape[0], right.shape[1]
    if left.is_cuda or rows * columns < LARGE:
        return torch.mm(left, right)
    return torch.mm(left, right, out=room(left.device, left.dtype, rows, columns))


# -- einsums of integers -----------------------------------------------------------------------------------------------

ELEMENTS = 1 << 22
"""Elements of the largest product that is made to be summed: 32 MB. Not measured."""


def has_matrix_product(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True where torch multiplies matrices of this dtype on a device: integers on the CPU alone."""
    return device.type == "cpu" or dtype.is_floating_point or dtype.is_complex


def integer_einsum(equation: str, *operands: Tensor) -> Tensor:
    """Return `torch.einsum` of int64 operands, on any device; no more than `ELEMENTS` are made beside results.

    Args:
        equation: with an output, one letter an index, and no ellipsis.
        operands: of any sizes; 1 where another operand's is larger, as torch takes them.
    """
    if len(operands) < 2 or has_matrix_product(operands[0].dtype, operands[0].device):
        return torch.einsum(equation, *operands)
    left = list(operands)
    for places, pair in _pairs(equation, tuple(o.shape for o in operands)):
        left.append(_contracted(pair, *[left.pop(place) for place in places]))
    return left[0]


@lru_cache
def _pairs(equation: str, shapes: tuple[torch.Size, ...]) -> list[tuple[tuple[int, ...], str]]:
    """Return for each contraction of two operands their positions among the remaining ones, and its equation."""
    if len(shapes) == 2:
        return [((0, 0), equation)]
    import opt_einsum  # few products have three factors or more

    _, path = opt_einsum.contract_path(equation, *shapes, shapes=True)
    return [(step[0], step[2]) for step in path.contraction_list]


def _contracted(equation: str, *pair: Tensor) -> Tensor:
    """Return the einsum of two operands, each with a dimension for every letter that is kept or shared."""
    inputs, kept = equation.split("->")
    left, right = inputs.split(",")
    letters = [*kept, *(c for c in dict.fromkeys(left) if c in right and c not in kept)]
    first, second = (_aligned(own, operand, letters) for own, operand in zip((left, right), pair, strict=True))
    return _product(first, second, len(kept))


def _aligned(own: str, operand: Tensor, letters: list[str]) -> Tensor:
    """Return an operand with a dimension for each letter (size 1 if it lacks the letter), summed over all others."""
    ordered = torch.einsum(f"{own}->{''.join(among(letters, own))}", operand)  # of one: diagonals and sums
    sizes = iter(ordered.shape)
    return ordered.reshape([next(sizes) if c in own else 1 for c in letters])


def _product(left: Tensor, right: Tensor, kept: int) -> Tensor:
    """The product, broadcast, summed over all dimensions but the first `kept`; of halves where it is too large."""
    shape = [m if n == 1 else n for m, n in zip(left.shape, right.shape, strict=True)]
    if len(shape) == kept:
        return left * right
    if prod(shape) <= ELEMENTS:
        return (left * right).sum(tuple(range(kept, len(shape))))
    axis = max(range(len(shape)), key=shape.__getitem__)
    half = shape[axis] // 2
    parts = []
    for begin, size in ((0, half), (half, shape[axis] - half)):
        cut = [t if t.shape[axis] == 1 else t.narrow(axis, begin, size) for t in (left, right)]
        parts.append(_product(cut[0], cut[1], kept))
    return torch.cat(parts, axis) if axis < kept else parts[0] + parts[1]


# -- tiles as a bit a position, and the values of the bits that are set ------------------------------------------------


def expanded(bits: Tensor, values: Tensor, word: int, volume: int, begins: Tensor | None = None) -> Tensor:
    """(tiles, volume): the values at the positions whose bits are set, 0 at the others.

    Args:
        bits: (tiles, words) of `word` positions each, the lowest bit first; those past the tile's volume are 0.
        values: of the bits that are set, in order of tiles and positions.
        word: positions that a word stands for.
        volume: positions of a tile.
        begins: (tiles,) where the values of each begin; without it, those of the first tile begin at 0, of any other
            where those before it end.
    """
    has = set_bits(bits, word)
    tiles = values.new_zeros(has.shape)
    if begins is not None:  # the numbers from each beginning on
        counts = has.sum(1)
        ahead = torch.repeat_interleave(begins - torch.cumsum(counts, 0) + counts, counts)
        values = values[ahead + torch.arange(ahead.numel(), device=ahead.device)]
    tiles[has] = values
    return tiles if volume == has.shape[1] else tiles[:, :volume].contiguous()
