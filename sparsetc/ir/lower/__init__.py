"""Level 2 to level 3: an einsum and the view of a packed part -> the tile program of one work item.

In: a `Bound` einsum with one sparse operand whose letters are distinct, the `Nest` of its packed part and a `Schedule`;
or, for `lower_pairs`, what two operands of tiles and a task list are. Out: a `TileProgram`. The tree of the
schedule says what is computed, in an order of data flow (`lowering`); one rule says where each computation stands
(`place`). A schedule without a tree is completed by the default rule (`ir.lower.default_tree`).
"""

# ruff: noqa: F401
from sparsetc.ir.lower.default_tree import drafted, lower, lower_pairs
from sparsetc.ir.lower.inner import Fold, Target
