"""Sparse tensors over the ranks of a torch.distributed process group: `shard`, `einsum`, `compile` and `cp_als`.

In: a sparse tensor, or a packed file, on processes that `torchrun` started. Out: `Sharded` tensors, and results that
are those of one process, to rounding. What runs on each rank is the compiler's own kernel, on that rank's share.
"""

from sparsetc.distributed.combine import Block
from sparsetc.distributed.cp import cp_als
from sparsetc.distributed.cut import Cut
from sparsetc.distributed.kernel import DistributedKernel, compile, einsum
from sparsetc.distributed.ranks import Ranks
from sparsetc.distributed.shard import Sharded, shard

__all__ = ["Block", "Cut", "DistributedKernel", "Ranks", "Sharded", "compile", "cp_als", "einsum", "shard"]
