"""Graphs and sparse tensors of other libraries as SparseTensors: whatever is sparse, by what it is.

In: an object of torch, scipy, pydata/sparse, torch_sparse, pyttb, PyG or networkx, or edges in a tensor. Out: a
SparseTensor; of a graph (sources, targets) as an operand and (targets, sources) by `from_graph`. No library is imported
but networkx, and this by a graph of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import FormatError, ShapeError
from sparsetc.tensor.attributes import Sparse
from sparsetc.tensor.convert import from_dense, from_pydata, from_scipy, from_torch, is_pydata, is_scipy
from sparsetc.tensor.inputs import as_tensor, comes_from, not_plain


def from_graph(cls: type[Sparse], graph: Any, weight: Any = None, nodes: int | tuple[int, int] | None = None) -> Sparse:
    """Return the adjacency matrix of a graph, (targets, sources), as ``"ij,jr->ir"`` and graph layers take it.

    The values of repeated edges are summed to one entry.

    Args:
        cls: SparseTensor.
        graph: an ``edge_index`` (2, edges) of (sources, targets), as a tensor, an ndarray or PyG's EdgeIndex; a
            PyG Data; a networkx graph, whose undirected edges count both ways; or an adjacency matrix of (targets,
            sources), dense or in any form that `SparseTensor.coerce` takes, bools too.
        weight: (edges,) or (edges, features), of an ``edge_index`` or Data; or the name of an edge attribute of
            networkx, by default "weight". Without it Data's ``edge_weight``, else 1.
        nodes: the number of nodes, or the numbers of sources and targets; by default from the graph, else the largest
            node + 1.

    Raises:
        FormatError: the object is no graph.
        CoordinateError: an edge to or from a node past the last.

    Examples:
        >>> stc.SparseTensor.from_graph(torch.tensor([[0, 1], [2, 2]]), nodes=3).to_dense()
        tensor([[0., 0., 0.],
                [0., 0., 0.],
                [1., 1., 0.]])
    """
    if isinstance(graph, cls):
        return graph
    matrix = graph_matrix(cls, graph, weight, nodes, into_rows=True)
    if matrix is not None:
        return matrix
    if _is_index(graph):
        return _of_edges(cls, graph, weight, nodes, into_rows=True)
    if weight is not None or nodes is not None:
        raise FormatError(f"weight= and nodes= go with edges, found {type(graph).__name__}, which has these")
    sparse = coerce(cls, graph)
    if sparse is None and getattr(graph, "ndim", 0) == 2:
        sparse = from_dense(cls, graph)
    if sparse is None or sparse.sparse_order != 2:
        raise FormatError(
            "from_graph takes an edge_index (2, edges), a graph of PyG or networkx, or an adjacency matrix (targets, "
            f"sources); found {graph!r:.200}"
        )
    return sparse.to(torch.get_default_dtype()) if sparse.dtype == torch.bool else sparse


def graph_matrix(
    cls: type[Sparse],
    graph: Any,
    weight: Any = None,
    nodes: int | tuple[int, int] | None = None,
    into_rows: bool = False,
) -> Sparse | None:
    """Return the adjacency (sources, targets) of a graph object, transposed if `into_rows`; None for others."""
    if comes_from(graph, "networkx") and hasattr(graph, "adj"):
        from networkx import to_scipy_sparse_array

        matrix = to_scipy_sparse_array(graph, dtype=np.float32, weight=weight or "weight")
        return from_scipy(cls, matrix.T if into_rows else matrix)
    if not comes_from(graph, "torch_geometric"):
        return None
    if hasattr(graph, "edge_index"):
        weight = getattr(graph, "edge_weight", None) if weight is None else weight
        return _of_edges(cls, graph.edge_index, weight, graph.num_nodes if nodes is None else nodes, into_rows)
    return _of_edges(cls, graph, weight, nodes, into_rows) if hasattr(graph, "get_sparse_size") else None


def _is_index(graph: Any) -> bool:
    if not (isinstance(graph, np.ndarray) or (isinstance(graph, Tensor) and graph.layout == torch.strided)):
        return False
    numbers = getattr(graph.dtype, "name", str(graph.dtype))  # numpy's text of another byte order is ">i8"
    return graph.ndim == 2 and graph.shape[0] == 2 and "int" in numbers


def _of_edges(
    cls: type[Sparse], edges: Any, weight: Any, nodes: int | tuple[int, int] | None, into_rows: bool
) -> Sparse:
    if not _is_index(edges):
        raise FormatError(f"an edge_index is (2, edges) integers, found {edges!r:.200}")
    sizes = edges.sparse_size() if hasattr(edges, "sparse_size") else (None, None)
    edges = as_tensor(edges, "an edge_index")
    if nodes is not None:
        sizes = (nodes, nodes) if isinstance(nodes, int) else nodes
    if None in sizes:
        largest = int(edges.max()) + 1 if edges.numel() else 0
        sizes = [largest if size is None else size for size in sizes]
    values = torch.ones(edges.shape[1], device=edges.device) if weight is None else as_tensor(weight, "weight")
    if values.shape[:1] != edges.shape[1:]:
        number = "" if values.ndim else "; how many nodes there are is nodes="
        counts = f"found {tuple(values.shape)}{number}"
        raise ShapeError(f"weight must have a row for each of {edges.shape[1]} edges, {counts}")
    if into_rows:
        edges, sizes = edges.flip(0), sizes[::-1]
    return cls(edges, values, (*sizes, *values.shape[1:]))


def coerce(cls: type[Sparse], obj: Any) -> Sparse | None:
    """Convert any sparse tensor or graph of a known library; None for other objects, which are not sparse.

    Examples:
        >>> stc.SparseTensor.coerce(torch.ones(2)) is None
        True
    """
    if isinstance(obj, cls):
        return obj
    graph = None if type(obj) in (Tensor, np.ndarray) else graph_matrix(cls, obj)
    if graph is not None:
        return graph
    if isinstance(obj, Tensor):
        if not_plain(obj):
            return None  # its layout may say anything
        return None if obj.layout == torch.strided else from_torch(cls, obj)
    if is_scipy(obj):
        return from_scipy(cls, obj)
    if is_pydata(obj):
        return from_pydata(cls, obj)
    if comes_from(obj, "pyttb") and hasattr(obj, "subs"):
        shape = tuple(obj.shape)
        coords = np.asarray(obj.subs, dtype=np.int64).reshape(-1, len(shape))  # of no nonzeros it is (1, 0)
        return cls(coords.T, np.asarray(obj.vals).reshape(-1), shape)
    if comes_from(obj, "torch_sparse") and hasattr(obj, "coo"):
        rows, columns, values = obj.coo()
        values = torch.ones(rows.shape, device=rows.device) if values is None else values
        return cls(torch.stack((rows, columns)), values, obj.sizes())
    return None
