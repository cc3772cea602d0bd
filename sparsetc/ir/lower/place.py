"""Where each computation of a tile program stands: in which loops, and before or after which.

In: statements in an order of data flow, without loops and zeros. Out: the body of a program, by one rule:

- A computation stands at the depth where its inputs are known, inside as few loops as that takes. A coordinate is known
  at its level, a position along a tile in the loop that takes it, and a stored value inside all loops.
- An accumulator is zeroed where it lives, before the loop that adds it up, and is read after that loop.
- The computations of one depth keep their order. Those listed before an accumulation that lives there stand before the
  loop, and the others after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.ir.nest.nest import LEVELS
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
    placement = _Placement(around)
    for statement in statements:
        placement.add(statement)
    return placement.body()


class _Placement:
    """Statements that have been placed; depth n is inside the first n loops.

    Attributes:
        depth: the loops around what is known at each level.
        known: the depth at which each name is known.
        late: names that are known only after the loop at their depth.
    """

    def __init__(self, around: Sequence[Loop]) -> None:
        self.around = around
        self.before: list[list[Statement]] = [[] for _ in (None, *around)]
        self.zeros, self.after = [[list(at) for at in self.before] for _ in range(2)]
        self.turn = {loop.axis.letter: n + 1 for n, loop in enumerate(around) if loop.axis.letter}
        levels = [loop.axis.level for loop in around]
        self.depth = [sum(map(level.__ge__, levels)) for level in range(len(LEVELS))]
        self.known: dict[str, int] = {}
        self.late: set[str] = set()

    def add(self, statement: Statement) -> None:
        """Places one statement after all that were placed before it."""
        made, inputs, level = flow(statement)
        name = made or "add"
        if unknown := {*inputs} - self.known.keys():
            raise PlanError(f"{name}: {', '.join(sorted(unknown))} is not made before it")
        turns = [self.turn.get(c, 0) for c in statement.along] if isinstance(statement, Decode) else ()
        depth = max([self.depth[level], *turns, *map(self.known.__getitem__, inputs)])
        for read in self.late.intersection(inputs):
            if self.known[read] < depth:
                raise PlanError(f"{name} stands in a loop after which {read} is complete")
        after = bool(self.zeros[depth])
        (self.after if after else self.before)[depth].append(statement)
        if isinstance(statement, Product) and statement.accumulate:
            home = self.depth[statement.out.level]
            if home >= depth:
                raise PlanError(f"{statement.out} adds up over no loop: what it adds is known where it lives")
            if Zero(statement.out) not in self.zeros[home]:
                self.zeros[home].append(Zero(statement.out))
            depth, after = home, True
        self.known[name] = depth
        self.late |= {name} if after else set()

    def body(self) -> tuple[Statement, ...]:
        """The statements, nested."""
        body: tuple[Statement, ...] = ()
        for n in reversed(range(len(self.before))):
            inner = (replace(self.around[n], body=body),) if n < len(self.around) else ()
            body = (*self.before[n], *self.zeros[n], *inner, *self.after[n])
        return body
