"""Layers for torch.nn with sparse weights or on graphs: `SparseLinear`, `GraphConv`, `GATConv`, `GATv2Conv`, `collate`.

In: dense activations, and sparse tensors as weights or adjacency matrices. Out: dense activations. Coordinates are
buffers, so they are saved in a ``state_dict`` and move with ``.to()``; weights are parameters, one for each nonzero or
each element of a block.
"""

from sparsetc.message_passing import fuse
from sparsetc.nn.attention import GATConv, GATv2Conv
from sparsetc.nn.graphs import GraphConv, batch_of, collate, normalized
from sparsetc.nn.linear import SparseLinear, sparsify

__all__ = ["GATConv", "GATv2Conv", "GraphConv", "SparseLinear", "batch_of", "collate", "fuse", "normalized", "sparsify"]
