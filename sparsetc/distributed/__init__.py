"""Sparse tensors over the ranks of a DeviceMesh: `shard` makes one, and `einsum`, `compile` and `cp_als` take it.

In: a sparse tensor, or a packed file, on processes that `torchrun` started. Out: `Sharded` tensors, and results that
are those of one process, to rounding. What runs on each rank is the compiler's own kernel, on that rank's share.
"""

from sparsetc.api import compile, einsum
from sparsetc.decomposition.cp import cp_als
from sparsetc.distributed.cut import Cut
from sparsetc.distributed.kernel import DistributedKernel
from sparsetc.distributed.shard import Sharded, shard

__all__ = ["Cut", "DistributedKernel", "Sharded", "compile", "cp_als", "einsum", "shard"]
