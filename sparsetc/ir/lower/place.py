"""The placement of computations in a tile program: inside which loops, and before or after others.

In: statements in an order of data flow, without loops and zeros. Out: the body of a program, by one rule:

- A computation stands at the depth where its inputs are known, inside as few loops as that takes. A coordinate is known
  at its level, a position along a tile in the loop that takes it, and a stored value inside all loops.
- An accumulator is zeroed where it lives, before the loop that adds it up, and is read after that loop.
- The computations of one depth keep their order. Those listed before an accumulation that lives there stand before the
  loop, and the others after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.ir.nest.axes import LEVELS
from sparsetc.ir.program.tile import Decode, Loop, Product, Statement, Zero, flow


def place(statements: Iterable[Statement], around: Sequence[Loop]) -> tuple[Statement, ...]:
    """The statements where they stand, with the loops around them and the zeros of their accumulators.

    Args:
        statements: in an order of data flow, without loops and zeros. A product that accumulates makes an accumulator,
            which lives at the level of its tile.
        around: the loops, outermost first.

    Raises:
        PlanError: a statement reads what none before it makes, or what is complete only after a loop that the
            statement stands in, or adds up over no loop.
    """
    before = defaultdict[int, list[Statement]](list)  # inside the first n loops
    zeros = defaultdict[int, list[Statement]](list)
    after = defaultdict[int, list[Statement]](list)
    turn = {loop.axis.letter: n + 1 for n, loop in enumerate(around) if loop.axis.letter}
    levels = [loop.axis.level for loop in around]
    loops_around = [sum(map(level.__ge__, levels)) for level in range(len(LEVELS))]
    depths = dict[str, int]()  # the depth at which each name is known
    late = set[str]()  # names that are known only after the loop at their depth
    for statement in statements:
        output, inputs, level = flow(statement)
        name = output or "add"
        if unknown := {*inputs} - depths.keys():
            raise PlanError(f"{name}: {', '.join(sorted(unknown))} is not made before it")
        turns = [turn.get(c, 0) for c in statement.along] if isinstance(statement, Decode) else ()
        depth = max([loops_around[level], *turns, *map(depths.__getitem__, inputs)])
        for read in late.intersection(inputs):
            if depths[read] < depth:
                raise PlanError(f"{name} stands in a loop after which {read} is complete")
        behind = bool(zeros[depth])
        (after if behind else before)[depth].append(statement)
        if isinstance(statement, Product) and statement.accumulate:
            home = loops_around[statement.out.level]
            if home >= depth:
                raise PlanError(f"{statement.out} adds up over no loop: what it adds is known where it lives")
            if Zero(statement.out) not in zeros[home]:
                zeros[home].append(Zero(statement.out))
            depth, behind = home, True
        depths[name] = depth
        late |= {name} if behind else set()
    body: tuple[Statement, ...] = ()
    for n in reversed(range(len(around) + 1)):
        inside = (replace(around[n], body=body),) if n < len(around) else ()
        body = (*before[n], *zeros[n], *inside, *after[n])
    return body
