"""Layers for torch.nn with sparse weights or on graphs: `SparseLinear`, `GraphConv`, `GATConv`, `GATv2Conv`, `collate`.

In: dense activations, and sparse tensors as weights or adjacency matrices. Out: dense activations. Coordinates are
buffers, so they are saved in a ``state_dict`` and move with ``.to()``; weights are parameters, one for each nonzero or
each element of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Unpack

from sparsetc.api import compile, einsum
from sparsetc.contraction.kernel import Kernel
from sparsetc.errors import CoordinateError, DtypeError, KeywordError, ShapeError
from sparsetc.maps.body import Body, Side
from sparsetc.maps.pairs import Pairs
from sparsetc.message_passing import fuse
from sparsetc.options import Settings, current, of_call
from sparsetc.pairwise import traceable
from sparsetc.support.entry import traced_by_modes
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import checked, without_blocks
from sparsetc.tensor.creation import block_diag
from sparsetc.tensor.graphs import graph_matrix
from sparsetc.tensor.groups import gathered
from sparsetc.tensor.inputs import as_tensor
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import accumulator

__all__ = ["GATConv", "GATv2Conv", "GraphConv", "SparseLinear", "batch_of", "collate", "fuse", "normalized", "sparsify"]

EQUATION = "oi,bi->bo"
KERNELS = 16
"""Kernels that a layer holds, one for each number of rows of its activations. Not measured."""


def _known(settings: Settings) -> Settings:
    """Settings of `einsum`; `KeywordError` for others, when a layer is made and not when it is called first."""
    of_call(settings)
    return settings


def _share(dropout: float) -> float:
    """Return dropout. Raise `ShapeError` unless it is a share, from 0 to 1."""
    if not 0 <= dropout <= 1:
        raise ShapeError(f"dropout is a share, from 0 to 1, found {dropout!r:.80}")
    return dropout


class SparseLinear(nn.Module):
    """Apply a linear layer with weights at fixed positions: ``x @ W.T + bias`` for (*, inputs) activations.

    A weight in blocks, as `SparseTensor.from_blocks` and torch's BSR store it, stays in blocks: all elements of the
    blocks are parameters, and on a GPU products use the matrix units. Packed storage and kernels are kept until the
    positions change: when the module moves to another device, or a ``state_dict`` with other positions is loaded.

    Args:
        weight: sparse (outputs, inputs), or anything `SparseTensor.coerce` takes. Its entries, stored zeros too, or
            all elements of its blocks, are the parameters.
        bias: (outputs,), or None for no bias.
        settings: of `einsum`, for each call.

    Attributes:
        values: (nnz,) parameter, in lexicographic order of `coords`; (nnz, *blocksize) for a weight in blocks.
        coords: (2, nnz) buffer: the positions of nonzeros, or of blocks; int32, or int64 for sizes beyond it.

    Raises:
        ShapeError: the weight is not a matrix.

    Examples:
        >>> linear = torch.nn.Linear(4, 3)
        >>> stc.nn.SparseLinear.from_dense(linear.weight * torch.eye(3, 4), linear.bias)
        SparseLinear(in_features=4, out_features=3, nnz=3, bias=True)
        >>> stc.nn.SparseLinear.from_dense(torch.eye(4), blocksize=(2, 2))
        SparseLinear(in_features=4, out_features=4, nnz=2, blocksize=(2, 2), bias=False)
    """

    coords: Tensor

    def __init__(self, weight: Any, bias: Tensor | None = None, **settings: Unpack[Settings]) -> None:
        super().__init__()
        sparse = SparseTensor.coerce(weight)
        if sparse is None or sparse.order != 2:
            raise ShapeError(f"SparseLinear takes a sparse matrix (outputs, inputs), found {weight!r:.200}")
        sparse = (sparse.expand_dense() if sparse.dense_order else sparse).coalesce()
        self.out_features, self.in_features = sparse.shape
        self.settings = _known(settings)
        self.register_buffer("coords", crd.narrowed(sparse.coords.clone(), max(sparse.shape)))
        self.values = nn.Parameter(sparse.values.detach().clone())
        self._place()
        self._kernels: dict[Any, Kernel] = {}
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        blocksize: tuple[int, int] | None = None,
        **settings: Unpack[Settings],
    ) -> SparseLinear:
        """Make the layer of a dense weight: its nonzero elements are kept, or the positions of a mask.

        Args:
            weight: (outputs, inputs).
            bias: (outputs,), or None for no bias.
            mask: (outputs, inputs): keep exactly the positions where it is not 0, zeros too.
            blocksize: sides (s, t): keep every block of s outputs and t inputs that holds such a position. The
                block's other elements start at 0 and are trained too. The sides need not divide the sizes of the
                weight.
            settings: of `einsum`, for each call.
        """
        return cls(SparseTensor.from_dense(weight.detach(), mask=mask, blocksize=blocksize), bias, **settings)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, blocksize: tuple[int, int] | None = None, **settings: Unpack[Settings]
    ) -> SparseLinear:
        """Make the layer of a `torch.nn.Linear`; of one pruned by `torch.nn.utils.prune`, the weights its mask leaves.

        Args:
            linear: the dense layer.
            blocksize: as for `from_dense`.
            settings: of `einsum`, for each call.
        """
        mask: Any = getattr(linear, "weight_mask", None)
        weight: Any = linear.weight if mask is None else linear.weight_orig
        return cls.from_dense(weight, linear.bias, mask, blocksize, **settings)

    @property
    def weight(self) -> SparseTensor:
        """The weight as a SparseTensor (out_features, in_features), with its present values."""
        if self._places is not self.coords and not traced_by_modes():  # which put stand-ins without numbers here
            self._place()
        return SparseTensor._make(self._weight.pattern, self.values)

    def _place(self) -> None:
        self._places = self.coords
        self._weight = SparseTensor._make(self._pattern(self.coords.long(), self.values), self.values.detach())

    def _pattern(self, coords: Tensor, values: Tensor) -> Pattern:
        """Return the pattern of places; values with sides are in blocks."""
        shape = self.out_features, self.in_features
        blocks = checked(values.shape[1:], shape) if values.ndim > 1 else None
        return Pattern(coords, shape if blocks is None else blocks.grid, True, blocks)

    def _apply(self, *args: Any, **settings: Any) -> SparseLinear:
        """Move the places at once, as a graph may be traced before the next call."""
        super()._apply(*args, **settings)
        self._weight = self.weight
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Multiply (*, in_features) activations to (*, out_features)."""
        if x.shape[-1:] != (self.in_features,):
            raise ShapeError(f"SparseLinear takes (*, {self.in_features}) activations, found {tuple(x.shape)}")
        flat = x if x.ndim == 2 else x.reshape(prod(x.shape[:-1]), self.in_features)
        product = self._product(flat)
        product = product if x.ndim == 2 else product.reshape(*x.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias

    def _product(self, flat: Tensor) -> Any:
        """Return the product with (rows, in_features) activations, by a kernel that is held for their shape."""
        values, weight = self.values, self._weight
        # What a graph traces, autocast converts, or a transform puts in a parameter's place is no kernel's.
        held = type(values) is nn.Parameter and flat.dtype is values.dtype and self._places is self.coords
        if not held or torch.compiler.is_compiling() or traced_by_modes():
            return einsum(EQUATION, self.weight, flat, output="dense", **self.settings)
        key = flat.shape, flat.dtype, current(), torch.get_float32_matmul_precision()
        kernel = self._kernels.get(key)
        if kernel is None or kernel.operand._values is not values or kernel.operand._pattern is not weight._pattern:
            if kernel is not None or len(self._kernels) >= KERNELS:
                self._kernels.clear()
            kernel = self._kernels[key] = compile(EQUATION, self.weight, flat, output="dense", **self.settings)
        return kernel(flat)

    def __getstate__(self) -> dict[str, Any]:
        """Leave kernels behind, which are compiled again where the layer is loaded."""
        return {**self.__dict__, "_kernels": {}}

    def extra_repr(self) -> str:
        """Return sizes, number of nonzeros and bias for printing."""
        nnz, *blocksize = self.values.shape
        blocks = f", blocksize={tuple(blocksize)}" if blocksize else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, nnz={nnz}{blocks}, "
            f"bias={self.bias is not None}"
        )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Take other places too, of any number and in any blocks: the shape of the matrix is what must agree."""
        coords, values = state_dict.get(f"{prefix}coords"), state_dict.get(f"{prefix}values", self.values)
        if isinstance(coords, Tensor) and coords.shape[:1] == (2,):
            coords = coords.long()
            pattern = self._pattern(coords, values)
            crd.check_range(coords, pattern.shape, "nonzero" if pattern.blocks is None else "block")
            if not crd.is_sorted_unique(crd.sort_keys(coords, pattern.shape)):
                raise CoordinateError(f"{prefix}coords must be in lexicographic order and without duplicates")
            shape = pattern.values_shape(())
            if shape != self.values.shape:
                self.coords = self.coords.new_empty(coords.shape)
                self.values.data = self.values.new_empty(shape)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[no-untyped-call]
        self._place()


def sparsify(
    model: nn.Module,
    masks: Mapping[str, Tensor] | float | None = None,
    blocksize: tuple[int, int] | None = None,
    **settings: Unpack[Settings],
) -> nn.Module:
    """Put a `SparseLinear` in the place of each linear layer of a model that is pruned.

    Layers of a subclass of `torch.nn.Linear`, whose weights others may read, stay as they are.

    Args:
        model: changed in place, unless it is a linear layer itself.
        masks: a mask of the weight by the name of each layer, as ``named_modules`` has it; or a number: weights of a
            larger magnitude stay, in all layers. None: what `torch.nn.utils.prune` left, of layers that it pruned.
        blocksize: of blocks that hold a weight that stays; see `SparseLinear.from_dense`.
        settings: of `einsum`, for each call.

    Returns:
        The model; of a linear layer the new one.

    Raises:
        KeywordError: a name that no linear layer has.

    Examples:
        >>> stc.nn.sparsify(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), {"0": torch.eye(3, 4)})
        Sequential(
          (0): SparseLinear(in_features=4, out_features=3, nnz=3, bias=True)
          (1): ReLU()
        )
    """
    places = [*model.named_modules(remove_duplicate=False)]
    linear = {name: module for name, module in places if type(module) is nn.Linear}
    if isinstance(masks, Mapping) and (unknown := sorted(masks.keys() - linear.keys())):
        raise KeywordError(f"no linear layer is called {unknown[0]!r}; there are {', '.join(map(repr, linear))[:200]}")
    layers: dict[nn.Module, SparseLinear] = {}
    for name, module in linear.items():
        mask: Any = masks.get(name) if isinstance(masks, Mapping) else getattr(module, "weight_mask", None)
        if isinstance(masks, int | float):
            mask = module.weight.detach().abs() > masks
        if mask is not None and module not in layers:
            weight: Any = getattr(module, "weight_orig", module.weight)
            layer = SparseLinear.from_dense(weight, module.bias, mask, blocksize, **settings)
            layers[module] = layer.train(module.training)
    for name, module in linear.items():  # one that stands in two places stands there again
        if module in layers and name:
            model.set_submodule(name, layers[module])
    return layers.get(model, model)


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
        self.linear, self.settings = nn.Linear(in_channels, out_channels, bias=False), _known(settings)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def forward(self, adjacency: SparseTensor, x: Tensor) -> Tensor:
        """Map (sources, in_channels) features by a (targets, sources) adjacency to (targets, out_channels)."""
        graph = graph_matrix(SparseTensor, adjacency, into_rows=True)
        adjacency = adjacency if graph is None else graph
        narrow = self.linear.in_features <= self.linear.out_features  # neighbours are added up at the smaller width
        out = einsum("ij,jr->ir", adjacency, x if narrow else self.linear(x), output="dense", **self.settings)
        out = self.linear(out) if narrow else out
        return out if self.bias is None else out + self.bias


class GATConv(nn.Module):
    """Apply graph attention (Veličković et al. 2018): sums over neighbours, weighted by a softmax of learned scores.

    Computes the same numbers as PyG's GATConv with the same weights, if no edge is given twice.

    Args:
        in_channels: features of a node.
        out_channels: features of a node and a head.
        heads: number of heads, each with its own weights; their results are concatenated.
        negative_slope: of the leaky ReLU of scores.
        dropout: share of weights set to 0 in training; the other weights are divided by ``1 - dropout``.
        add_self_loops: add an edge from node i to node i wherever it is missing. If sources and targets are different
            nodes, this joins source i with target i, as in PyG; that is right only if the targets are the first
            sources.
        edge_dim: features of an edge, if scores depend on them. A self loop has the mean features of the other edges to
            its node, as in PyG, where `add_self_loops` is set.
        settings: of `einsum`.

    Examples:
        >>> stc.nn.GATConv(4, 2, heads=3)(stc.eye(5), torch.ones(5, 4)).shape
        torch.Size([5, 6])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels, heads * out_channels, bias=False)
        self.of_source, self.of_target = (nn.Parameter(torch.empty(heads, out_channels)) for _ in range(2))
        self.edge_dim = edge_dim
        if edge_dim is not None:
            self.edge_linear = nn.Linear(edge_dim, heads * out_channels, bias=False)
            self.of_edge = nn.Parameter(torch.empty(heads, out_channels))
            nn.init.xavier_uniform_(self.of_edge)
        self.bias = nn.Parameter(torch.zeros(heads * out_channels))
        self.negative_slope = negative_slope
        self.dropout = _share(dropout)
        self.add_self_loops = add_self_loops
        self.settings = _known(settings)
        nn.init.xavier_uniform_(self.of_source)
        nn.init.xavier_uniform_(self.of_target)

    def forward(
        self, adjacency: SparseTensor, x: Tensor | tuple[Tensor, Tensor], edge_attr: Tensor | None = None
    ) -> Tensor:
        """Apply the layer; returns (targets, heads * out_channels).

        Args:
            adjacency: (targets, sources); its values are read only as features of edges.
            x: (nodes, in_channels), or a pair ``(sources, targets)`` of such tensors if these are different nodes.
            edge_attr: (edges, edge_dim) features of edges, or (edges,) of one feature, in lexicographic order of
                (target, source); by default the values of the adjacency, with a dense mode for features.

        Raises:
            ShapeError: features do not fit the adjacency.
        """
        graph, sources, targets = _of_graph(adjacency, x, self.linear.in_features, "GATConv")
        pattern = _with_loops(graph.pattern)[0] if self.add_self_loops else graph.pattern
        of_sources = self._mixed(sources)
        of_targets = of_sources if targets is sources else self._mixed(targets)
        wide = accumulator(of_sources.dtype)
        scores = self.of_target, self.of_source
        if targets is sources:  # one product for both
            by_target, by_source = torch.bmm(of_sources.to(wide), torch.stack(scores, 2).to(wide)).unbind(2)
        else:
            by_target, by_source = (
                torch.bmm(one.to(wide), score[:, :, None].to(wide)).squeeze(2)
                for one, score in zip((of_targets, of_sources), scores, strict=True)
            )
        tensors = [of_sources, by_target, by_source]
        features = _of_edges(graph, edge_attr, self.edge_dim, "GATConv")
        if features is not None:
            heads = self.edge_linear.weight.unflatten(0, self.of_edge.shape).to(wide) * self.of_edge[:, :, None]
            scores = features.to(wide) @ heads.sum(1).T
            tensors.append((_with_means(graph, scores) if self.add_self_loops else scores).T)
        body = _gat(self.negative_slope, self.dropout if self.training else 0.0, features is not None)
        return _of_heads(body, pattern, tensors, self.settings, "GATConv", self.bias)

    def _mixed(self, x: Tensor) -> Tensor:
        """Return the (heads, nodes, out_channels) products with the weight."""
        return self.linear(x).view(-1, *self.of_source.shape).transpose(0, 1)  # type: ignore[no-any-return]


class GATv2Conv(nn.Module):
    """Apply graph attention with scores ``a @ leaky_relu(W1 x_i + W2 x_j + W3 e_ij)`` (Brody et al. 2022).

    Computes the same numbers as PyG's GATv2Conv with the same weights, if no edge is given twice.

    Args:
        in_channels: features of a node.
        out_channels: features of a node and a head.
        heads: number of heads, each with its own weights; their results are concatenated.
        negative_slope: of the leaky ReLU.
        dropout: share of weights set to 0 in training, as for `GATConv`.
        add_self_loops: add an edge from node i to node i wherever it is missing, as `GATConv` does.
        edge_dim: features of an edge, if scores depend on them, as for `GATConv`. Scores are computed in steps then,
            with ``heads * out_channels`` numbers for each edge in memory.
        settings: of `einsum`.

    Examples:
        >>> stc.nn.GATv2Conv(4, 2, heads=3)(stc.eye(5), torch.ones(5, 4)).shape
        torch.Size([5, 6])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__()
        self.of_source, self.of_target = (nn.Linear(in_channels, heads * out_channels) for _ in range(2))
        self.edge_dim = edge_dim
        if edge_dim is not None:
            self.edge_linear = nn.Linear(edge_dim, heads * out_channels, bias=False)
        self.score = nn.Parameter(torch.empty(heads, out_channels))
        self.bias = nn.Parameter(torch.zeros(heads * out_channels))
        self.negative_slope = negative_slope
        self.dropout = _share(dropout)
        self.add_self_loops = add_self_loops
        self.settings = _known(settings)
        nn.init.xavier_uniform_(self.score)

    def forward(
        self, adjacency: SparseTensor, x: Tensor | tuple[Tensor, Tensor], edge_attr: Tensor | None = None
    ) -> Tensor:
        """Apply the layer; returns (targets, heads * out_channels). Arguments and errors as for `GATConv.forward`."""
        graph, *nodes = _of_graph(adjacency, x, self.of_source.in_features, "GATv2Conv")
        pattern = _with_loops(graph.pattern)[0] if self.add_self_loops else graph.pattern
        source, target = (
            linear(one).unflatten(1, self.score.shape)
            for linear, one in zip((self.of_source, self.of_target), nodes, strict=True)
        )
        dropout = self.dropout if self.training else 0.0
        features = _of_edges(graph, edge_attr, self.edge_dim, "GATv2Conv")
        if features is None:
            tensors = [target.transpose(0, 1), source.transpose(0, 1), self.score]
            body = _gat2(self.negative_slope, dropout)
        else:
            wide = accumulator(source.dtype)
            if self.add_self_loops:
                features = _with_means(graph, features.to(wide)).to(features.dtype)
            by_edge = self.edge_linear(features)
            rows, columns = pattern.coords
            terms = gathered(target, rows) + gathered(source, columns) + by_edge.view(-1, *self.score.shape)
            scores = functional.leaky_relu(terms, self.negative_slope).to(wide) * self.score
            tensors = [source.transpose(0, 1), scores.sum(-1).T]
            body = _of_scores(dropout)
        return _of_heads(body, pattern, tensors, self.settings, "GATv2Conv", self.bias)


def _of_edges(graph: SparseTensor, features: Tensor | None, width: int | None, name: str) -> Tensor | None:
    """Return (edges, width) features of edges, those of the adjacency by default; None for a layer that reads none."""
    if width is None and features is not None:
        raise ShapeError(f"{name} reads features of edges if it is made with edge_dim=, the number of features")
    if width is None:
        return None
    features = graph.values if features is None else features
    if features.ndim == 1:
        features = features[:, None]
    if features.shape != (graph.nnz, width):
        raise ShapeError(
            f"{name} of {graph.nnz:,} edges takes features ({graph.nnz}, {width}) of edges, found "
            f"{tuple(features.shape)}"
        )
    return features


def _with_means(graph: SparseTensor, features: Tensor) -> Tensor:
    """Return (entries, width) features of edges and of all self loops, which have the mean of a node's other edges."""
    rows, columns = graph.pattern.coords
    others = (rows != columns).to(features.dtype)
    total, count = (
        SparseTensor._make(graph.pattern, values).sum(1, output="dense")
        for values in (features * others[:, None], others)
    )
    pattern, order = _with_loops(graph.pattern)
    whole = torch.cat((features, features.new_zeros(pattern.nnz - graph.nnz, features.shape[1])))[order]
    rows, columns = pattern.coords
    means = total / count.clamp(min=1)[:, None]
    return torch.where((rows == columns)[:, None], means[rows], whole)


def _of_graph(
    adjacency: SparseTensor, x: Tensor | tuple[Tensor, Tensor], width: int, name: str
) -> tuple[SparseTensor, Tensor, Tensor]:
    """Return a graph, coalesced, and features of sources and of targets, whose sizes fit."""
    adjacency = _adjacency(adjacency, name)
    sources, targets = (x, x) if isinstance(x, Tensor) else x
    rows, columns = adjacency.shape[:2]
    if sources.shape != (columns, width) or targets.shape != (rows, width):
        raise ShapeError(
            f"{name} of an adjacency of {rows} targets and {columns} sources takes features ({columns}, {width}) "
            f"of sources and ({rows}, {width}) of targets, as a pair unless they are the same nodes; found "
            f"{tuple(sources.shape)} and {tuple(targets.shape)}"
        )
    return adjacency, sources, targets


def _of_heads(
    body: Body, pattern: Pattern, tensors: Sequence[Tensor], settings: Settings, name: str, bias: Tensor
) -> Tensor:
    """Return the (targets, heads * width) sums that a body gives by head, with a bias."""
    pairs = Pairs(pattern, (pattern.shape[0], pattern.shape[1]), pattern.device)
    seed = torch.randint(1 << 31, (1,), device=pattern.device) if body.dropout else None
    sums: Tensor = traceable(body, pairs, tensors, settings, name, seed).transpose(0, 1)
    return sums.flatten(1).to(bias.dtype) + bias


@lru_cache(maxsize=64)
def _gat(slope: float, dropout: float = 0.0, with_edges: bool = False) -> Body:
    """Return graph attention as a body; kernels are kept by it."""
    sides: dict[str, Side] = {"target": "rows", "source": "columns"}
    if with_edges:
        sides["edge"] = "entries"

    def score(**terms: Tensor) -> Tensor:
        return functional.leaky_relu(sum(terms.values()), slope)  # type: ignore[arg-type]

    return Body({}, sides, score, True, "features", dropout=dropout)


@lru_cache(maxsize=64)
def _of_scores(dropout: float) -> Body:
    """Return attention by given scores as a body."""
    return Body({}, {"logit": "entries"}, lambda logit: logit, True, "features", dropout=dropout)


@lru_cache(maxsize=64)
def _gat2(slope: float, dropout: float = 0.0) -> Body:
    def inner(target: Tensor, source: Tensor, score: Tensor) -> Tensor:
        return functional.leaky_relu(target + source, slope) * score

    products, inners = {"s": ("target", "source")}, {"s": (inner, "mixing")}
    return Body(products, {}, lambda s: s, True, "source", dropout=dropout, inner=inners)


def _adjacency(given: Any, name: str) -> SparseTensor:
    """Return a coalesced matrix of single entries, maybe with dense modes; raise `ShapeError` for anything else."""
    dense = type(given) is Tensor and given.layout == torch.strided
    single = None if dense else without_blocks(SparseTensor.from_graph(given))
    if single is None or single.sparse_order != 2:
        edges = "; SparseTensor.from_graph makes one of an edge_index" if dense else ""
        raise ShapeError(f"{name} takes a sparse matrix (targets, sources), found {given!r:.200}{edges}")
    return single.coalesce()


def _with_loops(pattern: Pattern) -> tuple[Pattern, Tensor]:
    """Return the pattern with all diagonal entries, and the number of each entry; missing ones come last."""

    def made() -> tuple[Pattern, Tensor]:
        rows, columns = pattern.coords
        missing = torch.ones(min(pattern.shape), dtype=torch.bool, device=pattern.device)
        missing[rows[rows == columns]] = False
        coords = torch.cat((pattern.coords, missing.nonzero().T.expand(2, -1)), 1)
        order = crd.lexsort(coords, pattern.shape)
        return pattern.like(coords[:, order].contiguous(), True), order

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
    adjacency = _adjacency(adjacency, "normalized")
    nodes, other, *dense = adjacency.shape
    if nodes != other:
        raise ShapeError(f"an adjacency has a row and a column a node, found {adjacency.shape}")
    if adjacency.dtype.is_complex:
        raise DtypeError(f"normalized takes real values, found {adjacency.dtype}")
    pattern, values = adjacency.pattern, adjacency.values
    if add_self_loops:
        pattern, order = _with_loops(pattern)
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
