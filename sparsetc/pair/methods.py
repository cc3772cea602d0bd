"""The ways to run a contraction of two sparse operands, and which of them one takes.

In: a `PairProblem`, with counts made before any task is. Out: a `Choice`. A method that would not fit, or that the type
has no kernel for, is left out under ``plan="auto"`` and refused by name. Each method says what it is expected to take
and what its plan is, and prepares the path that runs a plan::

    scalar.py       scalar       a product a pair of nonzeros
    dense.py        dense        torch's product of the operands, unfolded
    block_path.py   bcb          a matrix product a pair of blocks
    hybrid.py       bcb+scalar   blocks of x by one method, its other nonzeros by another
"""

from __future__ import annotations

from sparsetc.pair.block_path import BLOCK_LAUNCHES, BlockPairs
from sparsetc.pair.dense import DENSE_LAUNCHES, Matmul
from sparsetc.pair.hybrid import HYBRID_LAUNCHES, ByBlocks
from sparsetc.pair.problem import PairMethod, PairProblem, check_pairs
from sparsetc.pair.scalar import NonzeroPairs
from sparsetc.planner.candidate import Candidate, Choice, choice_of

SCALAR = NonzeroPairs()
BLOCKS = BlockPairs()
HYBRID = ByBlocks(BLOCKS, SCALAR)
METHODS: dict[str, PairMethod] = {method.name: method for method in (SCALAR, Matmul(), BLOCKS, HYBRID)}
"""Every method, by the name of its plan."""


FEW_TASKS = 4
"""Tasks a nonzero up to which the scalar path is taken unseen: it then costs no more than cutting into blocks does."""


def choose(p: PairProblem) -> Choice:
    """The plan named in the settings, or the one expected to be fastest."""
    wanted, join = check_pairs(p.wanted), p.join
    if wanted.name in METHODS:
        return choice_of([METHODS[wanted.name].candidate(p, priced=False)], "asked for by name")
    if join.tasks <= FEW_TASKS * (join.x_key.numel() + join.y_key.numel()):
        return choice_of([SCALAR.candidate(p, priced=False)], f"at most {FEW_TASKS} tasks a nonzero")
    if SCALAR.seconds(p, join.tasks) <= min(BLOCK_LAUNCHES, DENSE_LAUNCHES) * p.profile.call:
        return choice_of([SCALAR.candidate(p, priced=False)], "no other path is launched in as little time")
    return choice_of(estimates(p))


def estimates(p: PairProblem, every: bool = False) -> list[Candidate]:
    """What each method is expected to take, the hybrid one where a threshold parts blocks.

    Without `every`, a hybrid whose launches alone take longer than another method is not looked at.
    """
    found = [method.candidate(p) for method in METHODS.values() if method is not HYBRID]
    best = min(c.total for c in found if c.total is not None)
    if (every or best > HYBRID_LAUNCHES * p.profile.call) and HYBRID.split(p).pure is None:
        found.append(HYBRID.candidate(p))
    return found
