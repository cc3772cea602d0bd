"""A graph for tests of layers."""

from __future__ import annotations

import torch

import sparsetc as stc


def graph(nodes: int = 9, seed: int = 0) -> stc.SparseTensor:
    g = torch.Generator().manual_seed(seed)
    dense = (torch.rand(nodes, nodes, generator=g) < 0.4).double()
    return stc.SparseTensor.from_dense(torch.maximum(dense, dense.T))
