"""Layers for torch.nn with sparse weights or on graphs: `SparseLinear`, `GraphConv`, `GATConv`, and `collate`.

In: dense activations, and sparse tensors as weights or adjacency matrices. Out: dense activations. Coordinates are
buffers, so they are saved in a ``state_dict`` and move with ``.to()``; weights are parameters, one a nonzero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import Unpack

from sparsetc.api import einsum
from sparsetc.errors import CoordinateError, ShapeError
from sparsetc.options import Settings
from sparsetc.support.entry import traced_by_modes
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.groups import gathered
from sparsetc.tensor.softmax import softmax
from sparsetc.tensor.sparse_tensor import SparseTensor

__all__ = ["GATConv", "GraphConv", "SparseLinear", "batch_of", "collate", "normalized"]


class SparseLinear(nn.Module):
    """A linear layer whose weight has nonzeros at fixed places: ``x @ W.T + bias`` for (*, inputs) activations.

    What is made of the places, as packed storages and kernels, is kept and made again only where they change: when the
    module moves to another device, or a ``state_dict`` with other places is loaded.

    Args:
        weight: sparse (outputs, inputs), or what `SparseTensor` takes for one. Its entries are the parameters, zeros
            among them too.
        bias: (outputs,); None for none.
        settings: of `einsum`, for each call.

    Attributes:
        values: (nnz,) parameter, in lexicographic order of `coords`.
        coords: (2, nnz) int64 buffer.

    Raises:
        ShapeError: a weight that is no matrix.

    Examples:
        >>> linear = torch.nn.Linear(4, 3)
        >>> stc.nn.SparseLinear.from_dense(linear.weight * torch.eye(3, 4), linear.bias)
        SparseLinear(in_features=4, out_features=3, nnz=3, bias=True)
    """

    coords: torch.Tensor

    def __init__(self, weight: Any, bias: torch.Tensor | None = None, **settings: Unpack[Settings]) -> None:
        super().__init__()
        sparse = SparseTensor.coerce(weight)
        if sparse is None or sparse.order != 2:
            raise ShapeError(f"SparseLinear takes a sparse matrix (outputs, inputs), found {weight!r:.200}")
        sparse = without_blocks(sparse)
        self.out_features, self.in_features, self.settings = *sparse.shape, settings
        self.register_buffer("coords", sparse.coords.clone())
        self.values = nn.Parameter(sparse.values.detach().clone())
        self._weight = self._at_places()
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @classmethod
    def from_dense(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        **settings: Unpack[Settings],
    ) -> SparseLinear:
        """The layer of a dense weight (outputs, inputs): of what is not 0 in it, or of the places of a mask."""
        kept = (weight if mask is None else mask).detach() != 0
        places = kept.nonzero().T
        return cls(SparseTensor(places, weight.detach()[kept], tuple(weight.shape)), bias, **settings)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **settings: Unpack[Settings]) -> SparseLinear:
        """The layer of a dense one; where `torch.nn.utils.prune` pruned it, of the weights that its mask leaves."""
        mask: Any = getattr(linear, "weight_mask", None)
        weight: Any = linear.weight if mask is None else linear.weight_orig
        return cls.from_dense(weight, linear.bias, mask, **settings)

    @property
    def weight(self) -> SparseTensor:
        """The weight, (out_features, in_features), of the values as they are."""
        if self._weight.coords is not self.coords and not traced_by_modes():  # which put stand-ins without numbers here
            self._weight = self._at_places()
        return self._weight.with_values(self.values)

    def _at_places(self) -> SparseTensor:
        return SparseTensor._of(self.coords, self.values.detach(), (self.out_features, self.in_features), True)

    def _apply(self, *args: Any, **settings: Any) -> SparseLinear:
        """Move the places at once, as a graph may be traced before the next call."""
        super()._apply(*args, **settings)
        self._weight = self.weight
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply (*, in_features) activations to (*, out_features)."""
        flat = x.reshape(-1, x.shape[-1])
        found = einsum("oi,bi->bo", self.weight, flat, output="dense", **self.settings)
        found = found.reshape(*x.shape[:-1], self.out_features)
        return found if self.bias is None else found + self.bias  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """What is printed of the layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, nnz={self.values.numel()}, "
            f"bias={self.bias is not None}"
        )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Take other places too, of any number: the shape of the matrix is what must agree."""
        found = state_dict.get(f"{prefix}coords")
        if isinstance(found, torch.Tensor) and found.shape[:1] == (2,):
            shape = self.out_features, self.in_features
            crd.check_range(found, shape)
            if not crd.is_sorted_unique(crd.sort_keys(found, shape)):
                raise CoordinateError(f"{prefix}coords must be in lexicographic order and without duplicates")
            if found.shape != self.coords.shape:
                self.coords = self.coords.new_empty(found.shape)
                self.values.data = self.values.new_empty(found.shape[1])
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[no-untyped-call]
        self._weight = self._at_places()


class GraphConv(nn.Module):
    """A graph convolution: ``adjacency @ (x @ W) + bias`` (Kipf and Welling 2017), by the cheaper order of products.

    Args:
        in_features: of a node.
        out_features: of a node.
        bias: whether one is added.
        settings: of `einsum`.

    Examples:
        >>> graph = stc.nn.normalized(stc.eye(5))
        >>> stc.nn.GraphConv(4, 2)(graph, torch.ones(5, 4)).shape
        torch.Size([5, 2])
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **settings: Unpack[Settings]) -> None:
        super().__init__()
        self.linear, self.settings = nn.Linear(in_features, out_features, bias=False), settings
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, adjacency: SparseTensor, x: torch.Tensor) -> torch.Tensor:
        """Give (targets, out_features), of an adjacency (targets, sources) and (sources, in_features) features."""
        narrow = self.linear.in_features <= self.linear.out_features  # neighbours are added up at the smaller width
        out = einsum("ij,jr->ir", adjacency, x if narrow else self.linear(x), output="dense", **self.settings)
        out = self.linear(out) if narrow else out
        return out if self.bias is None else out + self.bias


class GATConv(nn.Module):
    """Graph attention (Veličković et al. 2018): sums over neighbours, weighted by a softmax of learned scores.

    Args:
        in_features: of a node.
        out_features: of a node and a head.
        heads: each of which has weights of its own; their results stand side by side.
        slope: of the leaky ReLU of scores.
        settings: of `einsum`.

    Examples:
        >>> stc.nn.GATConv(4, 2, heads=3)(stc.eye(5), torch.ones(5, 4)).shape
        torch.Size([5, 6])
    """

    def __init__(
        self, in_features: int, out_features: int, heads: int = 1, slope: float = 0.2, **settings: Unpack[Settings]
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, heads * out_features, bias=False)
        self.of_source, self.of_target = (nn.Parameter(torch.empty(heads, out_features)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(heads * out_features))
        self.slope, self.settings = slope, settings
        nn.init.xavier_uniform_(self.of_source)
        nn.init.xavier_uniform_(self.of_target)

    def forward(self, adjacency: SparseTensor, x: torch.Tensor) -> torch.Tensor:
        """Give (targets, heads * out_features), of an adjacency whose values are not read and (nodes, in_features)."""
        adjacency = without_blocks(adjacency)
        mixed, (target, source) = self.linear(x).unflatten(1, self.of_source.shape), adjacency.coords
        scores = gathered((mixed * self.of_source).sum(-1), source) + gathered((mixed * self.of_target).sum(-1), target)
        weights = softmax(adjacency.with_values(functional.leaky_relu(scores, self.slope)), 1)
        found = einsum("ijh,jhr->ihr", weights, mixed, output="dense", **self.settings)
        return found.flatten(1) + self.bias  # type: ignore[no-any-return]


def normalized(adjacency: SparseTensor, loops: bool = True) -> SparseTensor:
    """An adjacency whose entry (i, j) is divided by the roots of d_i and d_j, the sums of its rows (GCN's rule).

    Args:
        adjacency: (nodes, nodes), nonnegative.
        loops: whether 1 is added to each diagonal entry first. Otherwise a row whose sum is 0 counts as of sum 1.

    Raises:
        ShapeError: a matrix that is not square.

    Examples:
        >>> stc.nn.normalized(stc.full((2, 2), 1.0), loops=False).values
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    adjacency = without_blocks(adjacency)
    nodes, other = adjacency.shape
    if nodes != other:
        raise ShapeError(f"an adjacency has a row and a column a node, found {adjacency.shape}")
    if loops:
        loop = torch.arange(nodes, device=adjacency.device).expand(2, nodes)
        coords = torch.cat((adjacency.coords, loop), 1)
        adjacency = SparseTensor(
            coords, torch.cat((adjacency.values, adjacency.values.new_ones(nodes))), (nodes, nodes)
        )
    degree = adjacency.values.new_zeros(nodes).index_add(0, adjacency.coords[0], adjacency.values)
    root = torch.where(degree > 0, degree, 1.0).rsqrt()
    divided = adjacency.with_values(adjacency.values * root[adjacency.coords[0]] * root[adjacency.coords[1]])
    return divided if divided.requires_grad else divided._own()  # values that no call has to read again


def collate(samples: Sequence[Any]) -> Any:
    """A batch of samples for `torch.utils.data.DataLoader`: graphs side by side in one, other tensors joined.

    Args:
        samples: SparseTensors of one order, dense tensors, numbers, or tuples of these, all alike. Sparse matrices of
            graphs become blocks of one block-diagonal matrix; dense tensors are joined along their first mode, in which
            a graph has a row a node, and those without modes, as labels, are stacked.

    Returns:
        A SparseTensor, a tensor, or a tuple of these. ``batch_of(sizes)`` tells which node is of which sample.

    Examples:
        >>> graphs, labels = stc.nn.collate([(stc.eye(2), 0), (stc.eye(3), 1)])
        >>> graphs.shape, labels
        ((5, 5), tensor([0, 1]))
    """
    first = samples[0]
    if isinstance(first, tuple):
        return tuple(map(collate, zip(*samples, strict=True)))
    if isinstance(first, SparseTensor):
        samples = [without_blocks(x) for x in samples]
        if len({(x.sparse_order, x.shape[x.sparse_order :]) for x in samples}) > 1:
            raise ShapeError(f"collate takes SparseTensors of one order, found shapes {[x.shape for x in samples]}")
        modes, dense = samples[0].sparse_order, samples[0].shape[samples[0].sparse_order :]
        starts = torch.tensor([(0,) * modes, *(x.shape[:modes] for x in samples)]).cumsum(0)
        coords = [x.coords + start[:, None].to(x.device) for x, start in zip(samples, starts, strict=False)]
        return SparseTensor(
            torch.cat(coords, 1), torch.cat([x.values for x in samples]), (*starts[-1].tolist(), *dense)
        )
    tensors = [torch.as_tensor(x) for x in samples]
    return torch.cat(tensors) if tensors[0].ndim else torch.stack(tensors)


def batch_of(sizes: Sequence[int]) -> torch.Tensor:
    """(sum of sizes,) int64: the number of the sample that each row of a joined tensor is of.

    Examples:
        >>> stc.nn.batch_of([2, 3])
        tensor([0, 0, 1, 1, 1])
    """
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
