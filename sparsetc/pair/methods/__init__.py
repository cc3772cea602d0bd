"""The ways to run a contraction of two sparse operands, one a file.

Each says what it is expected to take and what its plan is, and prepares the path that runs a plan::

    nonzero_pairs.py   scalar       a product a pair of nonzeros
    matmul.py          dense        torch's product of the operands, unfolded
    block_pairs.py     bcb          a matrix product a pair of blocks
    hybrid.py          bcb+scalar   blocks of x by one method, its other nonzeros by another
"""

from sparsetc.pair.method import Method, NumericPath
from sparsetc.pair.methods.block_pairs import BlockPairs
from sparsetc.pair.methods.hybrid import Hybrid
from sparsetc.pair.methods.matmul import Matmul
from sparsetc.pair.methods.nonzero_pairs import NonzeroPairs

__all__ = ["HYBRID", "METHODS", "SCALAR", "NumericPath"]

SCALAR = NonzeroPairs()
BLOCKS = BlockPairs()
HYBRID = Hybrid(BLOCKS, SCALAR)
METHODS: dict[str, Method] = {method.name: method for method in (SCALAR, Matmul(), BLOCKS, HYBRID)}
"""Every method, by the name of its plan."""
