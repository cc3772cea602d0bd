"""Tile programs -> the text that people read: the comment above a generated function, and what errors quote.

In: a `TileProgram`. Out: lines in the notation that `ir.program.tile` gives as its grammar.
"""

from __future__ import annotations

from sparsetc.ir.nest.coordinates import Readable
from sparsetc.ir.nest.nest import ITEM, LEVELS
from sparsetc.ir.nest.values import HEAD
from sparsetc.ir.program import names
from sparsetc.ir.program import tile as ir


def lines(p: ir.TileProgram) -> list[str]:
    """The program, a statement a line, indented by loops."""
    head = f'tile program  "{p.equation}"  part {p.number}: {p.format}, {p.view}'
    axes = ", ".join(map(_axis, p.axes))
    lines = [head, f"  item over {p.view.items}"]
    if axes:
        lines.append(f"  axes {axes}")
    return [*lines, *("  " * (depth + 1) + line(p, s) for s, depth in p.statements)]


def _axis(a: ir.DenseAxis) -> str:
    if a.fold:
        letters = " ".join(f"{c}:{n}" for c, n in a.fold)
        return f"{a.letter} = {a.size}" + (f" ({letters})" if len(a.fold) > 1 else "")
    blocks = f" in {'slabs' if a.slab else 'blocks'} of {a.block}" if a.programs > 1 else ""
    return f"{a.letter} = {a.size}{blocks}" + (f" as {' + '.join(map(str, a.pieces))}" if a.pieces else "")


def line(p: ir.TileProgram, s: ir.Statement) -> str:
    """One statement."""
    if isinstance(s, ir.Loop):
        return f"loop {s.axis.describe(p.schedule.unroll)}"
    if isinstance(s, ir.Decode):
        axes = (*p.view.beside[s.level], *s.along)
        lanes = f"[{','.join(axes)}]" if axes else ""
        return f"{s.name}{lanes} = {_coordinate(p, s)}"
    if isinstance(s, ir.Value):
        stored = p.stored(s.operand)
        tile = f"{s.operand.upper()}.tile[pair_{s.operand}]"
        how, where = ("expand", tile) if stored.name else ("load", "X.values")
        return f"{s.out} = {stored.values.loads.format(how=how, where=where)}"
    if isinstance(s, ir.Scale):
        if s.by_row:
            return f"{s.out} = load {s.operand.upper()}.scale[item_{s.operand}]"
        exponent = f"exponent of {p.largest(s)}"
        return f"{s.out} = 2 ** ({f'{HEAD} - {exponent}' if s.into else f'{exponent} - {HEAD}'})"
    if isinstance(s, ir.Gather):
        how = "gather" if s.operand.rows else "load"
        note = "  # bf16" if s.operand.rounded else "  # to be split" if s.operand.split else ""
        return f"{s.out} = {how} {s.operand.name}[{', '.join((*map(names.at, s.operand.rows), *s.operand.axes))}]{note}"
    if isinstance(s, ir.Zero):
        return f"{s.out} = 0"
    if isinstance(s, ir.Sum):
        return f"{s.out} = sum {', '.join(a for a in s.source.axes if a not in s.out.axes)} of {s.source.name}"
    if isinstance(s, ir.Product):
        spec = ",".join("".join(_short(a) for a in t.axes) for t in s.inputs) + "->" + "".join(map(_short, s.out.axes))
        factors = ", ".join(t.name for t in s.inputs)
        over = ", ".join("the lanes" if a == ir.LANES else a for a in s.contracted)
        present = dict.fromkeys(a for t in s.inputs for a in t.axes if a != ir.LANES)
        summed = ", ".join(a for a in present if a not in s.out.axes)
        how = f"dot over {over}, {p.schedule.precision}" if s.dot else f"sum over {summed}" if summed else "multiply"
        return f'{s.out} {"+=" if s.accumulate else "="} einsum "{spec}" {factors}  # {how}'
    key = s.key
    if isinstance(key, ir.Row):
        terms = [(names.at(letter), stride) for letter, stride in key.terms]
        row = " + ".join(f"{at}*{stride}" if stride != 1 else at for at, stride in terms) or "0"
    else:
        row = key.array if isinstance(key, ir.Slot) else "item" if key.level == ITEM else "position"
    keyed = p.read_along(key.letters) if isinstance(key, ir.Row) else ()
    late = [a for a in s.source.axes if a not in {*s.axes, *keyed} and not (a == ir.LANES and key.level != ITEM)]
    notes = [f"{', '.join(late)} summed here, once"] if late else []
    notes += [f"in one of {s.copies} copies"] if s.copies > 1 else []
    note = f"  # {'; '.join(notes)}" if notes else ""
    return f"{'store' if s.owned else 'add'} {p.output}[{', '.join((row, *s.axes))}] {s.source}{note}"


def _coordinate(p: ir.TileProgram, s: ir.Decode) -> str:
    level = "tile" if p.view.positions[s.level] == "tile" else LEVELS[s.level]
    notes = [f"{field.width} bits, {level}" for field in s.coordinate.fields]
    notes += [f"a base every {lookup.every}" for lookup in s.coordinate.lookups if lookup.every > 1]
    text = s.coordinate.text(Readable([p.read.get(c, c) for c in p.letters], p.view.positions[s.level]))
    return f"{text}  # {', '.join(notes)}" if notes else text


def _short(axis: str) -> str:
    if axis == ir.LANES:
        return "n"
    return "" if "_" in axis else axis  # an axis that stands for no letter
