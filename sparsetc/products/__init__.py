"""Values of a join: the products of what meets, added up by entry of the result, in one of four ways.

In: a `Join`, a request for a plan. Out: programs that take both operands' values. `contraction/pair.py` makes a
contraction of them, by `WAYS`::

    problem.py       what a way is chosen by, and what each has to say
    tasks.py         tasks made, grouped by the entry of the result they add to, and as a sparse operand of ones
    scalar.py        a product a task: einsums with ``T[p, q, z]``, one for the result and one for each gradient
    dense.py         one matrix product of operands that are unfolded
    blocks.py        one matrix product a pair of blocks (BCB-SpTC)
    hybrid.py        blocks of x by how many nonzeros they hold, the rest by tasks
"""

from sparsetc.ir.plan import JOINS
from sparsetc.products.blocks import BlockPath
from sparsetc.products.dense import DensePath
from sparsetc.products.hybrid import HybridPath
from sparsetc.products.problem import JoinPath
from sparsetc.products.scalar import TaskSums

WAYS: dict[str, type[JoinPath]] = dict(zip(JOINS, (TaskSums, DensePath, BlockPath, HybridPath), strict=True))
"""The ways by the names of their plans, in the order in which they are considered: fewest launches first."""
