"""SparseTensor to and from other libraries' tensors and dense ones, and in other forms of its own.

In: a strided tensor, one of torch.sparse, torch_sparse, scipy.sparse, pydata/sparse or pyttb, a graph, or a table. Out:
a SparseTensor, a tensor of torch, scipy or pydata/sparse, or a SparseTensor with modes permuted, or dense modes and
blocks expanded. No library is imported until one of its own is asked for; what an object is, is first read off its
type's module name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import DtypeError, FormatError, ShapeError
from sparsetc.support import required
from sparsetc.support.checks import check_memory
from sparsetc.support.entry import without_autocast
from sparsetc.tensor import coords as crd
from sparsetc.tensor.attributes import Attributes, Sparse
from sparsetc.tensor.blocks import Blocks, checked
from sparsetc.tensor.dtypes import computable, resolved
from sparsetc.tensor.duplicates import coalescing_bytes
from sparsetc.tensor.inputs import as_tensor, as_values, check_plain, comes_from
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.readings import reading

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def to_dense(x: Attributes, memory_limit: int | str | None = None) -> Tensor:
    """See SparseTensor.to_dense."""
    blocks, values = x.pattern.blocks, x.values
    # blocks are laid out with what they hold past the end
    whole = x.shape if blocks is None else (*blocks.grid, *values.shape[1:])
    scratch = (8 if x.sparse_order > 1 else 0) * x.nnz
    if not x.is_coalesced:
        scratch += coalescing_bytes(x.pattern.shape, x.nnz, values)
    what = f"a dense tensor of shape {x.shape} and {x.dtype}"
    check_memory(what, math.prod(whole) * x.dtype.itemsize + scratch, x.device, memory_limit)
    if 0 in x.shape:
        return x.values.sum().to(x.dtype) * x.values.new_zeros(x.shape)  # empty, yet a function of the values
    return laid_out(x.coalesce())  # so that float16 duplicates are summed in float32


def laid_out(x: Attributes, again: bool = False) -> Tensor:
    """Return a dense tensor of the values of a coalesced one, unchecked: (*sizes, *dense sizes).

    Where other values will be laid out `again`, and autocast is off, the entries' places are kept with the pattern.
    """
    values, blocks = x._values, x._pattern.blocks
    sizes = (*x._pattern.shape, *values.shape[1:])
    if again and blocks is None:
        entries = values.new_zeros(math.prod(x._pattern.shape), *values.shape[1:])
        return entries.index_copy_(0, x._pattern.places, values).view(sizes)
    with without_autocast(values.device):
        dense = values.new_zeros(sizes) if blocks is None else blocks.zeros(sizes, values)
        dense.index_put_(x.coords.unbind(), values)
    return dense if blocks is None else blocks.laid_out(dense)


def to_torch(x: Attributes, layout: torch.layout | None = None, blocksize: tuple[int, int] | None = None) -> Tensor:
    """Convert to a torch.sparse tensor: COO of any order (hybrid if semi-sparse); CSR, CSC, BSR or BSC of order 2.

    Args:
        x: the tensor.
        layout: by default BSR for a matrix in blocks that divide its shape, else COO.
        blocksize: of BSR and BSC; by default the tensor's own. Other layouts expand blocks.
    """
    blocks = x.pattern.blocks
    if layout is None:
        whole = x.order == 2 and blocks is not None and not blocks.ragged and blocksize is None
        layout = torch.sparse_bsr if whole else torch.sparse_coo
    is_coo = layout == torch.sparse_coo
    if not is_coo and layout not in _COMPRESSED:
        raise FormatError(f"layout must be torch.sparse_coo, _csr, _csc, _bsr or _bsc, found {layout}")
    if math.prod(x.shape) >= crd.INT64_SIZES:
        raise ShapeError(f"torch.sparse cannot hold shape {x.shape}: the product of its sizes is 2**63 or more")
    blocked = layout in (torch.sparse_bsr, torch.sparse_bsc)
    if blocked and blocksize is None and len(x.blocksize) == 2:
        blocksize = (x.blocksize[0], x.blocksize[1])
    if blocked != (blocksize is not None):
        raise FormatError(
            f"blocksize= goes with torch.sparse_bsr and _bsc only, and is needed there; layout is {layout}"
        )
    if not is_coo and (x.order != 2 or x.dense_order):
        raise ShapeError(f"{layout} holds matrices; {_not_a_matrix(x)}")
    if blocksize is not None and any(b < 1 or s % b for s, b in zip(x.shape, blocksize, strict=True)):
        raise ShapeError(f"blocksize {tuple(blocksize)} must divide the shape {x.shape}")
    if not is_coo:
        pointers = 8 * (1 + x.shape[int(layout in (torch.sparse_csc, torch.sparse_bsc))])
        check_memory(
            f"the pointers of {layout} of shape {x.shape}", pointers, x.device, instead="take torch.sparse_coo"
        )
        x = x.coalesce()
    if blocks is not None:
        if blocksize is not None and not any(o % n for o, n in zip(blocks.sides, blocksize, strict=True)):
            return _compressed_blocks(x, blocks, layout, (blocksize[0], blocksize[1]))
        x = expand_dense(x)
    coo = torch.sparse_coo_tensor(
        x.coords, x.values, x.shape, device=x.device, is_coalesced=x.is_coalesced or None, check_invariants=False
    )
    return coo if is_coo else coo.to_sparse(layout=layout, blocksize=blocksize)


def _compressed_blocks(x: Attributes, blocks: Blocks, layout: torch.layout, blocksize: tuple[int, int]) -> Tensor:
    """Return a BSR or BSC tensor, with blocks cut to this size, which must divide the shape."""
    pattern, source = x.pattern.cut(blocksize)
    values, outer = blocks.cut_values(x.values, blocksize, source), 0 if layout == torch.sparse_bsr else 1
    if outer:
        pattern, order = pattern.permuted((1, 0))
        values = crd.picked(values, order)
    lines, inner = pattern.coords
    starts = torch.searchsorted(lines, torch.arange(pattern.shape[0] + 1, device=x.device))
    compressed: Any = torch.sparse_compressed_tensor  # whose stub lacks the index arrays
    return compressed(starts, inner, values, x.shape, layout=layout, device=x.device, check_invariants=False)  # type: ignore[no-any-return]


def to_numpy(x: Attributes) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return ``(coords, values, shape)`` as ndarrays on the host.

    Raises:
        DtypeError: values are bfloat16, which numpy lacks.
    """
    x = expand_dense(x) if x.blocksize else x
    if x.dtype == torch.bfloat16:
        raise DtypeError("numpy has no bfloat16; convert with .to(torch.float32) first")
    return x.coords.cpu().numpy(), resolved(x.values.detach()).cpu().numpy(), x.shape


def _not_a_matrix(x: Attributes) -> str:
    """Why a tensor is no sparse matrix, and what makes it one where its dense modes alone are in the way."""
    hint = "; call expand_dense() first" if x.order == 2 else ""
    return f"this tensor has shape {x.shape}, {x.dense_order} modes dense{hint}"


def to_scipy(x: Attributes) -> Any:
    """Convert a matrix to a ``scipy.sparse.coo_array``, or a ``bsr_array`` if whole blocks fill it; on the CPU.

    Raises:
        DtypeError: values are float16 or bfloat16, which scipy lacks.
    """
    if x.order != 2 or x.dense_order:
        raise ShapeError(f"scipy.sparse takes matrices; {_not_a_matrix(x)}")
    if x.dtype in (torch.float16, torch.bfloat16):
        raise DtypeError(f"scipy.sparse has no {x.dtype}; convert with .to(torch.float32) first")
    sparse = required("scipy.sparse", 'to_scipy needs scipy: pip install "sparsetc[io]"')
    if x.pattern.blocks is not None and not x.pattern.blocks.ragged:
        bsr = to_torch(x, torch.sparse_bsr, None).detach().cpu()
        values = resolved(bsr.values()).numpy()
        return sparse.bsr_array((values, bsr.col_indices().numpy(), bsr.crow_indices().numpy()), shape=x.shape)
    coords, values, shape = to_numpy(x)
    return sparse.coo_array((values, (coords[0], coords[1])), shape=shape)


def to_pydata(x: Attributes) -> Any:
    """Convert to a ``sparse.COO`` of pydata/sparse."""
    sparse = required("sparse", "to_pydata needs pydata/sparse: pip install sparse")
    coords, values, shape = to_numpy(expand_dense(x))
    return sparse.COO(coords, values, shape=shape, has_duplicates=not x.is_coalesced, sorted=x.is_coalesced)


def from_torch(cls: type[Sparse], tensor: Tensor) -> Sparse:
    """Convert a torch tensor: sparse COO (hybrid too), CSR, CSC, BSR, BSC, or strided (see `from_dense`).

    BSR and BSC keep their blocks. Of batches of compressed layouts, batch modes come first.

    Examples:
        >>> stc.SparseTensor.from_torch(torch.eye(2).to_sparse_csr()).nnz
        2
    """
    if not isinstance(tensor, Tensor):
        raise FormatError(f"from_torch takes a torch.Tensor, found {type(tensor).__name__}")
    check_plain(tensor, "the tensor")
    if tensor.layout == torch.strided:
        return from_dense(cls, tensor)
    if tensor.layout in _COMPRESSED:
        return _from_compressed(cls, tensor)
    if tensor.layout != torch.sparse_coo:
        raise FormatError(f"from_torch cannot read layout {tensor.layout}")
    if tensor.sparse_dim() == 0:
        raise FormatError("a tensor with no sparse mode is not sparse; use its values")
    shape, indices = tuple(tensor.shape), tensor._indices()
    coordinates = reading(torch.sparse_coo, shape, [indices], lambda own: own[0].contiguous())
    if tensor.requires_grad:  # autograd follows values(), which only a coalesced tensor has
        return cls._make(coordinates.pattern, tensor.coalesce().values())
    return cls._make(coordinates.pattern, coordinates.values(tensor._values()))


def _from_compressed(cls: type[Sparse], tensor: Tensor) -> Sparse:
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    outer = tensor.crow_indices() if by_rows else tensor.ccol_indices()
    inner = tensor.col_indices() if by_rows else tensor.row_indices()
    shape = tuple(tensor.shape)
    values = tensor.values()
    batch = outer.ndim - 1
    if not values.requires_grad:  # of a view of such a tensor Dynamo would look at the base, which has no strides,
        values = values.detach()
    elif values.is_complex():  # and torch makes no view of real numbers
        values = values.clone()
    blocks = None
    if tensor.layout in (torch.sparse_bsr, torch.sparse_bsc):
        sides = tuple(values.shape[batch + 1 : batch + 3])
        blocks = Blocks((*[1] * batch, *sides), shape[: batch + 2])
        values = values.reshape(*values.shape[: batch + 1], *[1] * batch, *values.shape[batch + 1 :])
    coords_of = partial(_compressed_coordinates, by_rows=by_rows)
    coordinates = reading((tensor.layout, blocks), shape, [outer, inner], coords_of, blocks)
    return cls._make(coordinates.pattern, coordinates.values(values.flatten(0, batch)))


def _compressed_coordinates(arrays: tuple[Tensor, ...], by_rows: bool) -> Tensor:
    """Return (order, nnz) coordinates from the index arrays of compressed rows or columns, batches included."""
    starts, inner = arrays
    lines = starts.shape[-1] - 1
    each = starts.diff(dim=-1).flatten().long()
    at = torch.repeat_interleave(torch.arange(each.numel(), device=starts.device), each)
    rows = [at % lines if lines else at, inner.flatten()[: at.numel()].long()]
    at = at // lines if lines else at
    for size in reversed(starts.shape[:-1]):
        rows.insert(0, at % size)
        at = at // size
    if not by_rows:
        rows[-2:] = rows[:-3:-1]
    return torch.stack(rows)


def from_dense(cls: type[Sparse], tensor: Any, *, mask: Any = None, blocksize: Sequence[int] | None = None) -> Sparse:
    """Take the nonzeros (NaN included) of a strided tensor or ndarray, or the blocks that hold one; differentiable.

    Args:
        cls: SparseTensor.
        tensor: of order 1 or more.
        mask: of the same shape: take exactly the elements where it is not 0, zeros too.
        blocksize: a side for each mode: store each block that holds an element to take, as `from_blocks` does; its
            other elements are 0. The sides need not divide the shape.

    Raises:
        FormatError: the tensor is not strided, or has no mode.
        ShapeError: a mask of another shape, or sides that are not one for each mode, 1 or more.
        DtypeError: an unsupported dtype.
        OutOfMemoryError: blocks reach far past the end, to which the tensor is padded.

    Examples:
        >>> stc.SparseTensor.from_dense(torch.eye(4), blocksize=(2, 2)).values
        tensor([[[1., 0.],
                 [0., 1.]],
        <BLANKLINE>
                [[1., 0.],
                 [0., 1.]]])
    """
    strided = as_tensor(tensor, "the tensor")
    if strided.layout != torch.strided:
        raise FormatError(f"from_dense takes a strided tensor, found {strided.layout}; see from_torch")
    if strided.ndim == 0:
        raise FormatError("from_dense needs at least one mode, found a single number")
    strided = computable(strided, tensor)
    chosen = strided if mask is None else as_tensor(mask, "the mask").to(strided.device)
    if chosen.shape != strided.shape:
        raise ShapeError(
            f"the mask of a tensor {tuple(strided.shape)} must have its shape, found {tuple(chosen.shape)}"
        )
    blocks = None if blocksize is None else checked(blocksize, strided.shape)
    if blocks is not None:
        nbytes = math.prod(blocks.grid) * math.prod(blocks.sides) * strided.itemsize if blocks.ragged else 0
        check_memory(f"a tensor {tuple(strided.shape)} padded to blocks of {blocks.sides}", nbytes, strided.device)
        strided = blocks.cut_out(strided if mask is None else strided.masked_fill(chosen == 0, 0))
    with lasting():
        taken = chosen.detach() != 0
        if blocks is not None:
            taken = blocks.cut_out(taken).flatten(len(blocks.sides)).any(-1)
        coords = torch.nonzero(taken).T.contiguous()
    return cls._make(Pattern(coords, tuple(taken.shape), True, blocks), strided[tuple(coords)])


def from_scipy(cls: type[Sparse], matrix: Any) -> Sparse:
    """Convert any scipy.sparse matrix or array, 1-D and N-D coo_array too; explicit zeros and BSR blocks are kept."""
    if not is_scipy(matrix):
        raise FormatError(f"from_scipy takes a scipy.sparse matrix or array, found {type(matrix).__name__}")
    if matrix.ndim == 1 or matrix.format not in ("csr", "csc", "bsr", "coo"):
        coo = matrix.tocoo()
        return cls(np.stack(coo.coords), coo.data, tuple(coo.shape))
    memory = matrix.coords if matrix.format == "coo" else (matrix.indptr, matrix.indices)
    values, shape = as_values(matrix.data), tuple(matrix.shape)
    blocks = Blocks(tuple(values.shape[1:]), shape) if matrix.format == "bsr" else None

    def coords_of(own: tuple[Tensor, ...]) -> Tensor:
        if matrix.format == "coo":
            return torch.stack([row.long() for row in own])
        return _compressed_coordinates(own, by_rows=matrix.format != "csc")

    indices = [as_tensor(a, "an index array") for a in memory]
    coordinates = reading((matrix.format, blocks), shape, indices, coords_of, blocks, memory)
    values = values[: coordinates.coords.shape[1]]  # of compressed rows there may be room for more
    return cls._make(coordinates.pattern, coordinates.values(values))


def from_pydata(cls: type[Sparse], array: Any) -> Sparse:
    """Convert a pydata/sparse COO, GCXS or DOK.

    Raises:
        FormatError: its fill value is not 0.
    """
    if not is_pydata(array):
        raise FormatError(f"from_pydata takes a pydata/sparse array, found {type(array).__name__}")
    if array.fill_value != 0:
        raise FormatError(f"a sparse array must have fill value 0, found {array.fill_value}")
    coo = array.asformat("coo")
    return cls(np.asarray(coo.coords), np.asarray(coo.data), tuple(coo.shape))


def permute(x: Sparse, *modes: int | tuple[int, ...] | list[int]) -> Sparse:
    """Reorder modes: ``shape[n] = old.shape[modes[n]]``. Nonzeros are sorted again if they were sorted.

    Blocks are permuted with their modes. Dense modes are exchanged among themselves; if one would stand before a sparse
    mode, they become sparse first. Tensors of one pattern share one permuted pattern, which is sorted once.

    Examples:
        >>> stc.zeros(2, 3, 4).permute(2, 0, 1).shape
        (4, 2, 3)
    """
    wanted = tuple(crd.mode_of(x.order, mode, "permute") for mode in crd.flat(modes))
    if sorted(wanted) != list(range(x.order)):
        raise ShapeError(f"permute needs each of the modes 0..{x.order - 1} once, found {modes}")
    if wanted == tuple(range(x.order)):
        return x
    split, values = x.sparse_order, x._values
    if any(m >= split for m in wanted[:split]):
        return permute(expand_dense(x), wanted)
    pattern, order = x._pattern.permuted(wanted[:split])
    sides = len(x.blocksize)
    dense = (m - split + 1 + sides for m in wanted[split:])
    values = values.permute(0, *(m + 1 for m in wanted[:sides]), *dense)
    return type(x)._make(pattern, crd.picked(values, order))


def expand_dense(x: Sparse) -> Sparse:
    """Turn dense modes and blocks into coordinates, one nonzero for each stored value, zeros included; differentiable.

    Values of blocks past the end of the shape are left out. Tensors of one pattern share one expanded pattern.

    Examples:
        >>> stc.eye(2).with_values(torch.ones(2, 3)).expand_dense().nnz
        6
    """
    blocks = x._pattern.blocks
    if blocks is not None:
        ones = (1,) * x.sparse_order
        pattern, source = x._pattern.cut(ones)
        values = blocks.cut_values(x._values, ones, source)
        return expand_dense(type(x)._make(pattern, values.reshape(pattern.nnz, *values.shape[1 + x.sparse_order :])))
    if not x.dense_order:
        return x
    nbytes = 8 * x.order * x.values.numel()
    nbytes += 0 if x.values.is_contiguous() else x.values.nbytes
    check_memory(f"the coordinates of {x.values.numel():,} entries of dense modes", nbytes, x.device)
    return type(x)._make(x._pattern.expanded(tuple(x._values.shape[1:])), x._values.flatten())


def is_scipy(obj: object) -> bool:
    return comes_from(obj, "scipy.sparse") and hasattr(obj, "tocoo")


def is_pydata(obj: object) -> bool:
    return comes_from(obj, "sparse") and hasattr(obj, "fill_value")
