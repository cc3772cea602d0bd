"""Graph attention: `GATConv` and `GATv2Conv`, whose scores and sums over neighbours are one generated kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Unpack

from sparsetc.errors import ShapeError
from sparsetc.maps.body import Body, Side
from sparsetc.maps.pairs import Pairs
from sparsetc.nn.graphs import adjacency_of, check_sizes, with_loops
from sparsetc.options import Settings, checked_settings
from sparsetc.pairwise import traceable
from sparsetc.support.checks import checked_number, checked_share, found_shape
from sparsetc.tensor.dtypes import accumulator
from sparsetc.tensor.groups import gathered
from sparsetc.tensor.inputs import as_tensor
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor

Edges = tuple[SparseTensor, Tensor] | None
"""A graph, and features of its edges, for layers that read them."""


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

    of_source: Any
    of_target: Any

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
        check_sizes(self, in_channels=in_channels, out_channels=out_channels, heads=heads, edge_dim=edge_dim or 0)
        self.in_channels = in_channels
        self.negative_slope = checked_number(negative_slope, "negative_slope")
        self.dropout = checked_share(dropout, "dropout")
        self.add_self_loops = add_self_loops
        self.edge_dim = edge_dim
        self.settings = checked_settings(settings)
        self._add_weights(heads, out_channels)
        self.bias = nn.Parameter(torch.zeros(heads * out_channels))

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
        name = type(self).__name__
        graph, sources, targets = _of_graph(adjacency, x, self.in_channels, name)
        pattern = with_loops(graph.pattern)[0] if self.add_self_loops else graph.pattern
        features = _of_edges(graph, edge_attr, self.edge_dim, name)
        edges = None if features is None else (graph, features)
        share = self.dropout if self.training else 0.0
        body, tensors = self._scored(pattern, sources, targets, edges, share)
        pairs = Pairs(pattern, (pattern.shape[0], pattern.shape[1]), pattern.device)
        seed = torch.randint(1 << 31, (1,), device=pattern.device) if share else None
        sums: Tensor = traceable(body, pairs, tensors, self.settings, name, seed).transpose(0, 1)
        return sums.flatten(1).to(self.bias.dtype) + self.bias

    def _add_weights(self, heads: int, width: int) -> None:
        self.linear = nn.Linear(self.in_channels, heads * width, bias=False)
        self.of_source, self.of_target = (nn.Parameter(torch.empty(heads, width)) for _ in range(2))
        if self.edge_dim is not None:
            self.edge_linear = nn.Linear(self.edge_dim, heads * width, bias=False)
            self.of_edge = nn.Parameter(torch.empty(heads, width))
            nn.init.xavier_uniform_(self.of_edge)
        nn.init.xavier_uniform_(self.of_source)
        nn.init.xavier_uniform_(self.of_target)

    def _scored(
        self, pattern: Pattern, sources: Tensor, targets: Tensor, edges: Edges, share: float
    ) -> tuple[Body, list[Tensor]]:
        """Return attention as a body, and its tensors.

        Args:
            pattern: of the graph, with self loops.
            sources: (sources, in_channels).
            targets: (targets, in_channels).
            edges: the graph, and features of its edges, if scores depend on them.
            share: of weights that are dropped.
        """
        scores = self.of_target, self.of_source
        of_sources = self.linear(sources)
        if targets is sources:
            by_target, by_source = _by_head(of_sources, *scores)
        else:
            by_target, by_source = (
                _by_head(one, score)[0] for one, score in zip((self.linear(targets), of_sources), scores, strict=True)
            )
        tensors = [of_sources.view(-1, *self.of_source.shape).transpose(0, 1), by_target, by_source]
        if edges is not None:
            graph, features = edges
            wide = accumulator(of_sources.dtype)
            heads = self.edge_linear.weight.unflatten(0, self.of_edge.shape).to(wide) * self.of_edge[:, :, None]
            of_edges = features.to(wide) @ heads.sum(1).T
            tensors.append((_with_means(graph, of_edges) if self.add_self_loops else of_edges).T)
        return _gat(self.negative_slope, share, edges is not None), tensors


class GATv2Conv(GATConv):
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

    def _add_weights(self, heads: int, width: int) -> None:
        self.of_source, self.of_target = (nn.Linear(self.in_channels, heads * width) for _ in range(2))
        if self.edge_dim is not None:
            self.edge_linear = nn.Linear(self.edge_dim, heads * width, bias=False)
        self.score = nn.Parameter(torch.empty(heads, width))
        nn.init.xavier_uniform_(self.score)

    def _scored(
        self, pattern: Pattern, sources: Tensor, targets: Tensor, edges: Edges, share: float
    ) -> tuple[Body, list[Tensor]]:
        source, target = (
            linear(one).unflatten(1, self.score.shape)
            for linear, one in ((self.of_source, sources), (self.of_target, targets))
        )
        if edges is None:
            tensors = [target.transpose(0, 1), source.transpose(0, 1), self.score]
            return _gat2(self.negative_slope, share), tensors
        (graph, features), wide = edges, accumulator(source.dtype)
        if self.add_self_loops:
            features = _with_means(graph, features.to(wide)).to(features.dtype)
        rows, columns = pattern.coords
        of_edges = self.edge_linear(features).view(-1, *self.score.shape)
        terms = gathered(target, rows) + gathered(source, columns) + of_edges
        scores = functional.leaky_relu(terms, self.negative_slope).to(wide) * self.score
        return _of_scores(share), [source.transpose(0, 1), scores.sum(-1).T]


def _by_head(x: Tensor, *scores: Tensor) -> Sequence[Tensor]:
    """Return the (heads, nodes) products of (nodes, heads * width) features with each of some (heads, width) rows.

    They are one product with a matrix that is 0 between heads, whose gradient is one too: the gradient of a product of
    each head sums over all nodes in one program a head (R-MAT 16 x 16, H200: 2 ms).
    """
    wide = accumulator(x.dtype)
    rows = torch.stack(scores).mT.diag_embed(dim1=1, dim2=2).view(-1, x.shape[1])
    return functional.linear(rows.to(wide), x.to(wide)).split(len(scores[0]))


def _of_edges(graph: SparseTensor, features: Tensor | None, width: int | None, name: str) -> Tensor | None:
    """Return (edges, width) features of edges, those of the adjacency by default; None for a layer that reads none."""
    if width is None and features is not None:
        raise ShapeError(f"{name} reads features of edges if it is made with edge_dim=, the number of features")
    if width is None:
        return None
    features = graph.values if features is None else as_tensor(features, f"{name}: edge_attr")
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
    pattern, order = with_loops(graph.pattern)
    whole = torch.cat((features, features.new_zeros(pattern.nnz - graph.nnz, features.shape[1])))[order]
    rows, columns = pattern.coords
    means = total / count.clamp(min=1)[:, None]
    return torch.where((rows == columns)[:, None], means[rows], whole)


def _of_graph(
    adjacency: SparseTensor, x: Tensor | tuple[Tensor, Tensor], width: int, name: str
) -> tuple[SparseTensor, Tensor, Tensor]:
    """Return a graph, coalesced, and features of sources and of targets, whose sizes fit."""
    adjacency = adjacency_of(adjacency, name)
    nodes: Any = x if isinstance(x, Sequence) else (x, x)
    rows, columns = adjacency.shape[:2]
    if [getattr(one, "shape", ()) for one in nodes] != [(columns, width), (rows, width)]:
        raise ShapeError(
            f"{name} of an adjacency of {rows} targets and {columns} sources takes features ({columns}, {width}) "
            f"of sources and ({rows}, {width}) of targets, as a pair unless they are the same nodes; found "
            f"{' and '.join(map(found_shape, nodes))}"
        )
    return adjacency, *nodes


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
