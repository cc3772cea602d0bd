"""What a tile program must be: everything read is made before, sums are where they may be, tiles fit a program.

In: a `TileProgram`. Out: nothing, or a `PlanError` that names the statement and the fault.
"""

from __future__ import annotations

from math import prod

from sparsetc.errors import PlanError
from sparsetc.ir import names
from sparsetc.ir.nest.axes import ITEM, LANE
from sparsetc.ir.plan import F16X3
from sparsetc.ir.tile import (
    LANES,
    Add,
    Decode,
    Gather,
    Loop,
    Position,
    Product,
    Scale,
    Sum,
    TileProgram,
    Value,
    Zero,
    made,
    reads,
)
from sparsetc.ir.tile_text import line
from sparsetc.ir.view import PAIRED

MOST_ELEMENTS = 1 << 20
"""Elements of the largest tensor that a Triton program may have."""


def verify(program: TileProgram) -> None:
    """Raise `PlanError` naming the statement that reads what was not made, or adds what it should not."""
    scopes: list[set[str]] = []  # what has been made so far, by loop: what a loop makes is gone after it
    adds = 0
    for statement, depth in program.statements:
        del scopes[depth + 1 :]
        scopes += [set() for _ in range(depth + 1 - len(scopes))]
        inputs = reads(statement)
        if isinstance(statement, Product):
            if statement.accumulate:
                inputs += (statement.out.name,)
            if statement.dot and not statement.out.folded:
                raise PlanError(f"{statement.out}: a dot folds in two the axes that it does not contract")
            summed = {a for t in statement.inputs for a in t.axes} - set(statement.out.axes)
            if summed and not statement.dot:
                raise PlanError(f"{statement.out}: a product sums no axis, found {sorted(summed)}")
        elif isinstance(statement, Add):
            adds += 1
            missing = set(statement.axes) - set(statement.source.axes)
            if missing:
                raise PlanError(f"add of {statement.source}: it has no axis {', '.join(sorted(missing))}")
        elif isinstance(statement, Sum):
            summed = set(statement.source.axes) - set(statement.out.axes)
            if not summed or not summed <= {LANES, *program.letters}:
                raise PlanError(
                    f"{statement.out}: a sum of {statement.source} is over the lanes, or a tile's positions"
                )
        elif isinstance(statement, Decode):
            c = statement.coordinate
            lacking = [lookup.array for lookup in c.lookups if lookup.array not in program.view.arrays]
            if lacking:
                raise PlanError(f"decode {statement.letter}: the view has no array {lacking[0]!r}")
            called = names.tile if program.view.sides else names.at
            inputs = tuple(called(program.letters[mode]) for mode in c.modes)
        unknown = [name for name in inputs if not any(name in scope for scope in scopes)]
        if unknown:
            raise PlanError(f"{line(program, statement).strip()}: {', '.join(unknown)} is not made before it")
        scopes[depth].add(made(statement))
    if adds != 1:
        raise PlanError(f"a tile program adds to its output once, found {adds}")
    if program.view.pairs:
        _verify_pairs(program)
    elif program.precision == F16X3:
        raise PlanError(f"{F16X3} multiplies halves, which only the tiles of a task list are stored in")


def check_sizes(p: TileProgram) -> None:
    """Raise `PlanError` where a tile of the program holds more elements than Triton's tensors may (`MOST_ELEMENTS`)."""
    for statement, _ in p.statements:
        if not isinstance(statement, Value | Gather | Zero | Product | Sum):
            continue
        tiles = (statement.out, *(statement.inputs if isinstance(statement, Product) else ()))
        for tile in tiles:
            elements = prod(p.view.lanes if a == LANES else p.axis(a).block for a in tile.axes)
            if elements > MOST_ELEMENTS:
                raise PlanError(
                    f'part {p.number} ({p.format}) of "{p.equation}": {tile} would hold {elements:,} elements, and a '
                    f"program's tile at most {MOST_ELEMENTS:,}; give the schedule smaller blocks"
                )


def _verify_pairs(p: TileProgram) -> None:
    """Raise `PlanError` unless tiles are read whole, in the loop over pairs, and blocks are stored at their items."""
    if [len(term) for term in p.terms] != [len(tiles.sides) for tiles in p.view.pairs]:
        raise PlanError(f"the operands {p.terms} do not have the modes of {p.view}")
    for operand in map(p.stored, PAIRED):
        sizes = tuple(p.axis(c).size for c in operand.letters)
        if sizes != operand.tiles.sides:
            raise PlanError(f"{operand.name}: a tile has {operand.tiles.sides} positions, its axes have {sizes}")
        if operand.tiles.halves != (p.precision == F16X3) or (operand.tiles.halves and not p.dots):
            raise PlanError(f"{operand.name}: tiles in halves are multiplied by dots in {F16X3}, and only they")
    loops: list[Loop] = []
    for statement, depth in p.statements:
        del loops[depth:]
        if isinstance(statement, Loop):
            loops.append(statement)
        elif isinstance(statement, Value):
            letters = p.stored(statement.operand).letters
            taken = [*statement.out.axes, *(loop.letter for loop in loops if loop.letter in letters)]
            if not any(loop.level == LANE for loop in loops) or sorted(taken) != sorted(letters):
                raise PlanError(
                    f"{statement.out}: in the loop over pairs, a tile of {statement.operand} is read along "
                    f"{', '.join(letters)}, each an axis or a loop; found {', '.join(taken) or 'none'}"
                )
        elif isinstance(statement, Scale):
            own = p.stored(statement.operand)
            if not own.tiles.halves or loops or statement.out.axes != own.letters[:1]:
                raise PlanError(
                    f"{statement.out}: scales are of the rows of tiles in halves, and the same for all pairs"
                )
        elif isinstance(statement, Add) and (statement.key != Position(ITEM) or not statement.owned):
            raise PlanError(f"{line(p, statement).strip()}: a block of the result is stored at its item's number")
