"""The ways to run a contraction of two sparse operands, one a file.

Each says what it is expected to take and what its plan is, and prepares the path that runs a plan::

    nonzero_pairs.py   scalar       a product a pair of nonzeros
    matmul.py          dense        torch's product of the operands, unfolded
    block_pairs.py     bcb          a matrix product a pair of blocks
    by_blocks.py       bcb+scalar   blocks of x by one method, its other nonzeros by another
"""

from sparsetc.pair.method import NumericPath, PairMethod
from sparsetc.pair.methods.block_pairs import BlockPairs
from sparsetc.pair.methods.by_blocks import ByBlocks
from sparsetc.pair.methods.matmul import Matmul
from sparsetc.pair.methods.nonzero_pairs import NonzeroPairs

__all__ = ["HYBRID", "METHODS", "SCALAR", "NumericPath"]

SCALAR = NonzeroPairs()
BLOCKS = BlockPairs()
HYBRID = ByBlocks(BLOCKS, SCALAR)
METHODS: dict[str, PairMethod] = {method.name: method for method in (SCALAR, Matmul(), BLOCKS, HYBRID)}
"""Every method, by the name of its plan."""
