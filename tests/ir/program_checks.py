"""Checks of a tile program: everything is made before it is read, sums stand where they may. Tests check all programs.

In: a `TileProgram`. Out: nothing, or a `PlanError` that names the statement and the fault.
"""

from __future__ import annotations

from sparsetc.errors import PlanError
from sparsetc.ir.nest.axes import ITEM
from sparsetc.ir.plan import F16X3
from sparsetc.ir.program import names
from sparsetc.ir.program import tile as ir
from sparsetc.ir.program.text import line
from sparsetc.support import among, outside


def verify(program: ir.TileProgram) -> None:
    """Raise `PlanError` naming the first statement with an unknown input or a wrong sum."""
    scopes: list[set[str]] = []  # what has been made so far, by loop: what a loop makes is gone after it
    adds = 0
    for statement, depth in program.statements:
        del scopes[depth + 1 :]
        scopes += [set() for _ in range(depth + 1 - len(scopes))]
        output, inputs, _ = ir.flow(statement)
        if isinstance(statement, ir.Product):
            if statement.accumulate:
                inputs += (statement.out.name,)
            left, right = ({a for t in side for a in t.axes} for side in (statement.left, statement.right))
            brought = left | right
            if unknown := outside(statement.out.axes, brought):
                raise PlanError(f"{statement.out}: no factor has axis {', '.join(unknown)}")
            summed = brought - {*statement.out.axes}
            if statement.dot and not program.at_once and (summed != left & right or not statement.out.folded):
                raise PlanError(f"{statement.out}: a dot contracts the axes of both sides and folds the others in two")
            if summed and not statement.dot and not program.at_once:
                raise PlanError(f"{statement.out}: a product sums no axis, found {sorted(summed)}")
        elif isinstance(statement, ir.Add):
            adds += 1
            if missing := set(statement.axes) - set(statement.source.axes):
                raise PlanError(f"add of {statement.source}: it has no axis {', '.join(sorted(missing))}")
        elif isinstance(statement, ir.Reduce):
            summed = set(statement.source.axes) - set(statement.out.axes)
            whole = [a.letter for a in program.axes if a.programs == 1 and not program.view.innermost.lanes]
            if not summed or not summed <= {ir.LANES, *program.letters, *whole}:
                raise PlanError(
                    f"{statement.out}: a sum of {statement.source} is over the lanes, or a tile's positions"
                )
        elif isinstance(statement, ir.Decode):
            c = statement.coordinate
            if lacking := [lookup.array for lookup in c.lookups if lookup.array not in program.view.arrays]:
                raise PlanError(f"decode {statement.letter}: the view has no array {lacking[0]!r}")
            letters = [program.letters[mode] for mode in c.modes]
            inputs = tuple([program.read.get(letter, names.at(letter)) for letter in letters])
        if unknown := outside(inputs, set[str]().union(*scopes)):
            raise PlanError(f"{line(program, statement).strip()}: {', '.join(unknown)} is not made before it")
        scopes[depth].add(output)
    if adds != 1:
        raise PlanError(f"a tile program adds to its output once, found {adds}")
    for axis in program.axes:
        if axis.slowest and (axis not in program.split or axis.letter in program.letters):
            raise PlanError(f"axis {axis.letter}: only a dense axis that is split can be slowest on the grid")
    _verify_stored(program)


def _verify_stored(p: ir.TileProgram) -> None:
    """Raise `PlanError` unless the program's axes are those of the storage."""
    if p.view.pairs and [len(o.letters) for o in p.sparse] != [len(tiles.sides) for tiles in p.view.pairs]:
        raise PlanError(f"the operands {p.sparse} do not have the modes of {p.view}")
    for operand in p.sparse:
        halves = operand.values.halves or any(o.halves for o in p.operands)
        if halves != (p.schedule.precision == F16X3) or (halves and not p.dots):
            raise PlanError(f"{operand.name or 'X'}: tiles in halves are multiplied by dots in {F16X3}, and only they")
        sizes, sides = tuple(p.axis(c).size for c in operand.letters if c in p.along), operand.values.sides
        if sizes != sides:
            raise PlanError(f"{operand.name or 'X'}: a tile has {sides} positions, its axes have {sizes}")
    loops: list[ir.Loop] = []
    for statement, depth in p.statements:
        del loops[depth:]
        if isinstance(statement, ir.Loop):
            loops.append(statement)
        elif isinstance(statement, ir.Value):
            _verify_value(p, statement, loops)
        elif isinstance(statement, ir.Scale):
            _verify_scale(p, statement, loops)
        elif isinstance(statement, ir.Add) and p.along & {*statement.axes}:
            if statement.key == ir.Key("position", ITEM) and statement.owned:
                continue
            raise PlanError(f"{line(p, statement).strip()}: a block of the result is stored at its item's number")


def _verify_scale(p: ir.TileProgram, s: ir.Scale, loops: list[ir.Loop]) -> None:
    """Raise `PlanError` unless scales are of an operand of split fp16 dots, and known where they are read."""
    dense = [(o.split or o.halves, o.rows if o.halves else ()) for o in p.operands if o.name == s.operand]
    ((halves, rows),) = dense or [(p.stored(s.operand).values.halves, ())]
    axes = p.stored(s.operand).letters[:1] if p.view.pairs else ()
    if not halves or bool(loops) != bool(rows) or (s.rows, s.out.axes) != (rows, axes):
        raise PlanError(
            f"{s.out}: a scale is of an operand that dots take in halves, or of the rows of paired tiles, and the same "
            "for all pairs; of what is made halves of before, it is of the rows that are gathered"
        )


def _verify_value(p: ir.TileProgram, s: ir.Value, loops: list[ir.Loop]) -> None:
    """Raise `PlanError` unless stored values are read in the innermost loop and along all sides of their tile."""
    operand, over = p.stored(s.operand), p.view.innermost.name
    wanted = among(operand.letters, p.along)
    alone = {c for c in wanted if p.axis(c).block == 1} - p.looped  # a position of these is a program's
    turned = [loop.axis.letter for loop in loops if loop.axis.letter]
    read_along = dict.fromkeys((*s.out.within, *turned, *alone))
    if all(loop.axis.name != over for loop in loops) or read_along.keys() != {*wanted}:
        raise PlanError(
            f"{s.out}: in the loop over {over}s, a tile of {operand.name or 'X'} is read along "
            f"{', '.join(wanted) or 'none'}, each an axis or a loop; found {', '.join(read_along) or 'none'}"
        )
