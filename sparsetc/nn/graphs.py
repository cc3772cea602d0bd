"""Graphs as layers take them: the graph convolution, normalised adjacencies, and batches of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from sparsetc.api import einsum
from sparsetc.errors import DtypeError, ShapeError
from sparsetc.options import Settings, checked_settings
from sparsetc.support.checks import found_shape
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.coerce import graph_matrix
from sparsetc.tensor.creation import block_diag
from sparsetc.tensor.dtypes import accumulator
from sparsetc.tensor.inputs import as_tensor
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor


class GraphConv(nn.Module):
    """Apply a graph convolution: ``adjacency @ (x @ W) + bias`` (Kipf and Welling 2017), in the cheaper order.

    Args:
        in_channels: features of a node before the layer.
        out_channels: features of a node after it.
        bias: add a learned bias.
        settings: of `einsum`.

    Examples:
        >>> graph = stc.nn.normalized(stc.eye(5))
        >>> stc.nn.GraphConv(4, 2)(graph, torch.ones(5, 4)).shape
        torch.Size([5, 2])
    """

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True, **settings: Unpack[Settings]) -> None:
        super().__init__()
        check_sizes(self, in_channels=in_channels, out_channels=out_channels)
        self.linear, self.settings = nn.Linear(in_channels, out_channels, bias=False), checked_settings(settings)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def forward(self, adjacency: SparseTensor, x: Tensor) -> Tensor:
        """Map (sources, in_channels) features by a (targets, sources) adjacency to (targets, out_channels)."""
        if not isinstance(adjacency, SparseTensor):
            graph = graph_matrix(SparseTensor, adjacency, into_rows=True)
            adjacency = adjacency if graph is None else graph
        width = self.linear.in_features
        if getattr(x, "shape", ())[1:] != (width,):
            raise ShapeError(f"GraphConv takes features (sources, {width}), found {found_shape(x)}")
        narrow = width <= self.linear.out_features  # neighbours are added up at the smaller width
        out = einsum("ij,jr->ir", adjacency, x if narrow else self.linear(x), output="dense", **self.settings)
        out = self.linear(out) if narrow else out
        return out if self.bias is None else out + self.bias


def check_sizes(layer: nn.Module, **sizes: object) -> None:
    """Raise `ShapeError` unless these arguments of a layer are numbers of features or heads."""
    for name, size in sizes.items():
        crd.checked_size(size, f"{type(layer).__name__}: {name}")


def adjacency_of(given: Any, name: str) -> SparseTensor:
    """Return a coalesced matrix of single entries, maybe with dense modes; raise `ShapeError` for anything else."""
    dense = type(given) is Tensor and given.layout == torch.strided
    single = None if dense else without_blocks(SparseTensor.from_graph(given))
    if single is None or single.sparse_order != 2:
        edges = "; SparseTensor.from_graph makes one of an edge_index" if dense else ""
        raise ShapeError(f"{name} takes a sparse matrix (targets, sources), found {given!r:.200}{edges}")
    return single.coalesce()


def with_loops(pattern: Pattern) -> tuple[Pattern, Tensor]:
    """Return the pattern with all diagonal entries, and the number of each entry; missing ones come last."""

    def made() -> tuple[Pattern, Tensor]:
        rows, columns = pattern.coords
        missing = torch.ones(min(pattern.shape), dtype=torch.bool, device=pattern.device)
        missing[rows[rows == columns]] = False
        coords = torch.cat((pattern.coords, missing.nonzero().T.expand(2, -1)), 1)
        order = crd.lexsort(coords, pattern.shape)
        return pattern.like(coords[:, order].contiguous()), order

    return pattern._once("with loops", made)


def normalized(adjacency: SparseTensor, add_self_loops: bool = True) -> SparseTensor:
    """Normalise an adjacency for GCN: entry (i, j) is divided by the roots of d_i and d_j, the sums of rows i and j.

    Computes the same numbers as PyG's ``gcn_norm`` of an ``edge_index``, if no self loop is given twice.

    Args:
        adjacency: (nodes, nodes), nonnegative. Each position along dense modes is normalised by itself.
        add_self_loops: first add diagonal entries of 1 where they are missing; existing ones stay.

    Returns:
        A SparseTensor. Entries of a node whose sum is 0 become 0.

    Raises:
        ShapeError: the matrix is not square.
        DtypeError: complex values.

    Examples:
        >>> stc.nn.normalized(stc.full((2, 2), 1.0), add_self_loops=False).values
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    adjacency = adjacency_of(adjacency, "normalized")
    nodes, other, *dense = adjacency.shape
    if nodes != other:
        raise ShapeError(f"an adjacency has a row and a column a node, found {adjacency.shape}")
    if adjacency.dtype.is_complex:
        raise DtypeError(f"normalized takes real values, found {adjacency.dtype}")
    pattern, values = adjacency.pattern, adjacency.values
    if add_self_loops:
        pattern, order = with_loops(pattern)
        values = torch.cat((values, values.new_ones(pattern.nnz - adjacency.nnz, *dense)))[order]
    dtype = values.dtype if values.dtype.is_floating_point else torch.get_default_dtype()
    wide = SparseTensor._make(pattern, values.to(accumulator(dtype)))
    degree, (rows, columns) = wide.sum(1, output="dense"), pattern.coords
    none = degree == 0
    root = degree.masked_fill(none, 1).rsqrt().masked_fill(none, 0)
    return wide.with_values((wide.values * root[rows] * root[columns]).to(dtype))


def collate(samples: Sequence[Any]) -> Any:
    """Join samples to a batch, for a `DataLoader`: graphs to one block-diagonal matrix, dense tensors by rows.

    Args:
        samples: sparse tensors of one order, dense tensors, numbers, or tuples of these, all alike. Dense tensors are
            concatenated along their first mode, which has a row for each node; tensors without modes, such as labels,
            are stacked.

    Returns:
        A SparseTensor, a tensor, or a tuple of these. ``batch_of(sizes)`` tells which node belongs to which sample.

    Raises:
        ShapeError: no samples, or samples that are not alike.

    Examples:
        >>> graphs, labels = stc.nn.collate([(stc.eye(2), 0), (stc.eye(3), 1)])
        >>> graphs.shape, labels
        ((5, 5), tensor([0, 1]))
    """
    kinds = sorted({_kind(x) for x in samples})
    if len(kinds) != 1:
        raise ShapeError(f"collate takes samples that are all alike, found {', '.join(kinds) or 'none'}")
    if isinstance(samples[0], tuple):
        return tuple(map(collate, zip(*samples, strict=True)))
    if kinds == ["sparse"]:
        return block_diag(*samples)
    tensors = [as_tensor(x, "a sample") for x in samples]
    return torch.cat(tensors) if tensors[0].ndim else torch.stack(tensors)


def _kind(sample: Any) -> str:
    if isinstance(sample, tuple):
        return f"a tuple of {len(sample)}"
    return "dense" if SparseTensor.coerce(sample) is None else "sparse"


def batch_of(sizes: Sequence[int]) -> Tensor:
    """Return the number of the sample that each row of a joined batch belongs to, (sum of sizes,) int64.

    Examples:
        >>> stc.nn.batch_of([2, 3])
        tensor([0, 0, 1, 1, 1])
    """
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64))
