"""Aggregation for PyG: `fuse` lets layers add up what their neighbours send by one einsum, without a message an edge.

In: a model with layers of PyG. Out: the model, whose layers call `einsum` in `propagate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsetc.api import einsum
from sparsetc.options import Settings, current
from sparsetc.support import Lru, cached_property
from sparsetc.tensor import coords as crd
from sparsetc.tensor.duplicates import Merge, coalesced
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor

WEIGHTS = {"edge_weight", "alpha", "norm"}
"""Arguments of PyG's messages that are a factor of each edge."""
REDUCES: dict[str, Any] = {"add": "sum", "sum": "sum", "mean": "sum", "max": "amax", "min": "amin"}
"""Names of einsum for PyG's reductions; a mean is a sum that is divided by counts of edges."""
HOOKS = [f"{step}_forward{when}" for step in ("propagate", "message", "aggregate") for when in ("", "_pre")]
"""Hooks of a layer that would see no message."""


def fuse(model: torch.nn.Module) -> torch.nn.Module:
    """Let the PyG layers in a model aggregate by `einsum`, in place; outputs, gradients and state_dicts stay the same.

    A layer is changed where its message is the neighbour's features, or these times a weight or a score of the edge, as
    those of GCN, SAGE, GIN, GAT, GATv2, RGCN and GraphConv are, and where it takes their sum, mean, maximum or minimum.
    The product reads the features of each edge once and writes none. All other layers stay as they are, and so do
    calls with torch's sparse tensors, with hooks on messages, in an explanation, or with edges that were not seen
    before: a graph that comes once, as a mini-batch, is not worth sorting.

    Args:
        model: a layer, or a module that has some.

    Returns:
        The model.

    Examples:
        >>> from torch_geometric.nn import SAGEConv
        >>> stc.nn.fuse(SAGEConv(4, 2))(torch.ones(3, 4), torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 2])
    """
    from torch_geometric.nn import MessagePassing

    for layer in model.modules():
        if isinstance(layer, MessagePassing) and _is_linear(layer, MessagePassing):
            layer.propagate = partial(_propagate, layer)
    return model


def _is_linear(layer: Any, base: Any) -> bool:
    """Return True if the layer reduces neighbours' features times a weight of the edge, as far as names tell."""
    kind = type(layer)
    inherited = all(getattr(kind, name) is getattr(base, name) for name in ("aggregate", "update"))
    supported = kind.message.__module__.startswith("torch_geometric.") and layer.aggr in [*REDUCES]
    factors = _arguments(layer) - {"x_j", "edge_type_ptr"}
    return inherited and supported and "x_j" in _arguments(layer) and factors <= WEIGHTS and len(factors) <= 1


def _arguments(layer: Any) -> set[str]:
    return {*layer.inspector.get_param_names("message")}


@dataclass(frozen=True)
class Edges:
    """A list of edges that may come again; its pattern is made when it does.

    Attributes:
        index: (2, edges).
        sizes: targets and sources.
        into: which row of the index has targets.
    """

    index: Tensor
    sizes: tuple[int, int]
    into: int

    @cached_property
    def sorted(self) -> tuple[Pattern, Merge | None]:
        """The pattern (targets, sources), and the map from weights of edges to its values; None if they are equal."""
        with lasting():
            coords = torch.stack((self.index[self.into], self.index[1 - self.into])).long()
            crd.check_range(coords, self.sizes, "edge")
            unique, merge = coalesced(coords, self.sizes)
            return Pattern(unique, self.sizes, True), merge

    @cached_property
    def degree(self) -> Tensor:
        """The number of edges into each target, (targets,), at least 1."""
        with lasting():
            return torch.bincount(self.index[self.into], minlength=self.sizes[0]).clamp(min=1)

    def values(self, reduce: str, dtype: torch.dtype) -> Tensor:
        """Return values for edges without weights, kept so that they are packed once; for a mean 1 / degree."""
        pattern, merge = self.sorted

        def made() -> Tensor:
            once = REDUCES[reduce] != "sum"  # how often an edge is named makes no difference
            ones = torch.ones(pattern.nnz if once else self.index.shape[1], dtype=dtype, device=self.index.device)
            counts = ones if once or merge is None else merge.values(ones)
            return counts / self.degree[pattern.coords[0]].to(dtype) if reduce == "mean" else counts

        return pattern._once((dtype, reduce), made)


_edges: Lru[Any, Edges] = Lru(16)


def _seen(index: Tensor, sizes: tuple[int, int], into: int) -> Edges | None:
    """Return edges that came before, else None. They are found by their numbers, as layers copy them at each call."""
    key = index.shape, sizes, into, index.dtype, index.device, int(index.sum())  # relations may have as many edges
    edges = _edges.get(key)
    if edges is not None and torch.equal(edges.index, index):
        return edges
    _edges.pop(key)
    with lasting():
        _edges.put(key, Edges(index.clone(), sizes, into))
    return None


def _propagate(layer: Any, edge_index: Any, size: Any = None, **inputs: Any) -> Tensor:
    """Reduce the features of neighbours, or leave it to the layer's own `propagate`."""
    into = int(layer.flow == "source_to_target")
    x = inputs["x"]
    sides = (x, x) if isinstance(x, Tensor) else x
    sources = sides[1 - into]
    weights = [inputs[name] for name in _arguments(layer) & WEIGHTS if inputs.get(name) is not None]
    plain = partial(type(layer).propagate, layer, edge_index, size=size, **inputs)
    if not _is_simple(layer, edge_index, sources, weights) or inputs.get("edge_type_ptr") is not None:
        return plain()  # type: ignore[no-any-return]
    if hasattr(edge_index, "sparse_size"):
        size = edge_index.sparse_size()
    targets = size[into] if size else None
    if targets is None:
        targets = (sources if sides[into] is None else sides[into]).shape[0]
    edges = _seen(getattr(edge_index, "_data", edge_index), (targets, sources.shape[0]), into)
    repeated = edges is not None and edges.sorted[0].nnz < edge_index.shape[1]
    if edges is None or (repeated and weights and REDUCES[layer.aggr] != "sum"):
        return plain()  # type: ignore[no-any-return]
    return _reduced(edges, layer.aggr, sources, weights)


def _is_simple(layer: Any, edge_index: Any, sources: Tensor, weights: list[Tensor]) -> bool:
    """Return True if a call has edges in a tensor, features a row a node, and nobody who wants to see messages."""
    hooks = [getattr(layer, f"_{name}_hooks") for name in HOOKS]
    watched = any(hooks) or layer.explain or layer.decomposed_layers > 1
    edges = isinstance(edge_index, Tensor) and edge_index.layout == torch.strided
    rows = layer.node_dim % sources.ndim == 0
    fitting = all(w.dtype == sources.dtype and w.ndim == sources.ndim - 1 for w in weights)
    return not watched and edges and rows and fitting and not torch.compiler.is_compiling()


def _reduced(edges: Edges, reduce: str, sources: Tensor, weights: list[Tensor]) -> Tensor:
    heads = "h" if weights and weights[0].ndim == 2 else ""
    pattern, merge = edges.sorted
    if not weights:
        values = edges.values(reduce, sources.dtype)
    else:
        values = weights[0] if merge is None else merge.values(weights[0])
    features = sources if heads else sources.flatten(1)
    graph = SparseTensor._make(pattern, values)
    equation = f"ij{heads},j{heads}r->i{heads}r"
    loops = current().has_loops(sources.device)
    # Edges that came again come often, so native loops are worth the second that they compile in, once for a machine.
    settings: Settings = {"backend": "numba"} if loops else {}
    sums = einsum(equation, graph, features, output="dense", reduce=REDUCES[reduce], **settings)
    sums = sums.reshape(sums.shape[0], *sources.shape[1:])
    return sums / edges.degree.view(-1, *[1] * (sums.ndim - 1)) if reduce == "mean" and weights else sums
