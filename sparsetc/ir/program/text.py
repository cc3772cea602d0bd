"""Tile programs -> the text that people read: at the top of a generated file, above its functions, and in errors.

In: a `TileProgram`. Out: lines in the notation that `ir.program.tile` gives as its grammar; and the body of a file's
docstring: what it computes, how the operand is stored, what a call costs. Who has that file alone must understand it.
`Lines` are those of a function, as every printer puts them down.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from sparsetc.ir.nest import HEAD, ITEM, PAIRED, Writer
from sparsetc.ir.program import names
from sparsetc.ir.program.cost import cost_of
from sparsetc.ir.program.operands import Stored
from sparsetc.ir.program.tile import (
    LANES,
    Decode,
    DenseAxis,
    Gather,
    Loop,
    Product,
    Reduce,
    Scale,
    Statement,
    Tile,
    TileProgram,
    Value,
    Zero,
)
from sparsetc.support import among, outside

LEGEND = "N nonzeros stored, L fibers, tiles or pairs of tiles, P work items, R rows of the result, w bytes a value."
"""The symbols of costs."""
NOTES = {"rounded": "cast to bfloat16", "split": "to be split", "halves": "as float16 halves"}
"""Notes on an operand, by what is true of it."""


class Lines:
    """The lines of a function in the making, and the names of its variables."""

    def __init__(self, indent: int = 1) -> None:
        self.out: list[str] = []
        self.indent, self.variables = indent, 0

    def put(self, *lines: str) -> None:
        self.out += ["    " * self.indent + line for line in lines]

    def block(self, head: str) -> AbstractContextManager[None]:
        """Print a head and indent the lines of this block; without a head they are not indented."""
        return self._indented(head) if head else nullcontext()

    @contextmanager
    def _indented(self, head: str) -> Iterator[None]:
        self.put(head)
        self.indent += 1
        yield
        self.indent -= 1

    def visit(self, body: Iterable[object], head: str = "") -> None:
        """Print statements, in the block of a head: each by the method that has its name in small letters."""
        with self.block(head):
            for s in body:
                getattr(self, type(s).__name__.lower())(s)

    def variable(self, called: str, text: str = "") -> str:
        """Return a new variable name, and print the assignment of `text` to it."""
        self.variables += 1
        name = f"{called}{self.variables}"
        if text:
            self.put(f"{name} = {text}")
        return name


def lines(p: TileProgram) -> list[str]:
    """The program, a statement a line, indented by loops."""
    head = f'tile program  "{p.equation}"  part {p.number}: {p.format}, {p.view}'
    axes = ", ".join(map(_axis, p.axes))
    lines = [head, f"  item over {p.view.items}"]
    if axes:
        lines.append(f"  axes {axes}")
    return [*lines, *["  " * (depth + 1) + line(p, s) for s, depth in p.statements]]


TileProgram.printed = lines


def comments(p: TileProgram) -> list[str]:
    """The program as comments above a generated function."""
    return [f"# {line}" for line in lines(p)]


def _axis(a: DenseAxis) -> str:
    letters = f" ({' '.join(f'{c}:{n}' for c, n in a.fold)})" if len(a.fold) > 1 else ""
    slowest = ", slowest on the grid" if a.slowest else ""
    blocks = f" in blocks of {a.block}{slowest}" if a.programs > 1 and not a.fold else ""
    return f"{a.letter} = {a.size}{letters}{blocks}" + (f" as {' + '.join(map(str, a.lengths))}" if a.lengths else "")


def line(p: TileProgram, s: Statement) -> str:
    """One statement."""
    match s:
        case Loop():
            return f"loop {s.axis.describe(p.schedule.unroll)}"
        case Decode():
            return f"{Tile(s.name, (*p.view.beside[s.level], *s.along), s.level)} = {_coordinate(p, s)}"
        case Value():
            stored = p.stored(s.operand)
            tile = f"{s.operand.upper()}.tile[pair_{s.operand}]"
            if not stored.values.held:
                return f"{s.out} = 1"
            how = "expand" if stored.name and stored.values.bitmap else "load"
            note = "  # high and low parts" if stored.values.halves else ""
            return f"{s.out} = {how} {tile if stored.name else 'X.values'}{note}"
        case Scale():
            most = f"{s.operand.upper()}.most[item_{s.operand}]" if s.out.axes else p.largest(s)
            if s.rows:
                blocks = (f"block of {a.letter}" for o in p.operands if o.name == s.operand for a in p.blocks_of(o))
                most += f"[{', '.join((*map(names.at, s.rows), *blocks))}]"
            exponent = f"exponent of {most}"
            return f"{s.out} = 2 ** ({f'{HEAD} - {exponent}' if s.into else f'{exponent} - {HEAD}'})"
        case Gather(operand=o):
            how = "gather" if o.rows else "load"
            note = next((f"  # {note}" for made, note in NOTES.items() if getattr(o, made)), "")
            return f"{s.out} = {how} {o.name}[{', '.join((*map(names.at, o.rows), *o.axes))}]{note}"
        case Zero():
            return f"{s.out} = 0"
        case Reduce():
            return f"{s.out} = sum {', '.join(outside(s.source.axes, s.out.axes))} of {s.source.name}"
        case Product():
            factors = ", ".join(t.name for t in s.inputs)
            over = ", ".join("the lanes" if a == LANES else a for a in s.contracted)
            summed = f"sum over {', '.join(s.summed)}" if s.summed else "multiply"
            how = f"dot over {over}, {p.schedule.precision}" if s.dot else summed
            return f'{s.out} {"+=" if s.accumulate else "="} einsum "{tile_einsum(s)}" {factors}  # {how}'
    key = s.key
    if key.kind == "row":
        terms = zip(map(names.at, key.letters), key.strides, strict=True)
        row = " + ".join(f"{at}*{stride}" if stride != 1 else at for at, stride in terms) or "0"
    else:
        row = key.array or ("item" if key.level == ITEM else "position")
    keyed = p.read_along(key.letters) if key.kind == "row" else ()
    late = [a for a in s.source.axes if a not in {*s.axes, *keyed} and not (a == LANES and key.level != ITEM)]
    notes = [f"{', '.join(late)} summed once, here"] if late else []
    notes += [f"in one of {s.copies} copies"] if s.copies > 1 else []
    note = f"  # {'; '.join(notes)}" if notes else ""
    return f"{'store' if s.owned else 'add'} {p.output}[{', '.join((row, *s.axes))}] {s.source}{note}"


def _coordinate(p: TileProgram, s: Decode) -> str:
    position = p.view.positions[s.level]
    notes = [f"{field.width} bits of each {position}" for field in s.coordinate.fields]
    notes += [f"a base every {lookup.every}" for lookup in s.coordinate.lookups if lookup.every > 1]
    text = s.coordinate.text(Writer([p.read.get(c, c) for c in p.letters], position, "decode {array}"))
    return f"{text}  # {', '.join(notes)}" if notes else text


def tile_einsum(s: Product) -> str:
    """A product in letters; n stands for the lanes."""
    *inputs, output = ("".join(map(_short, t.axes)) for t in (*s.inputs, s.out))
    return f"{','.join(inputs)}->{output}"


def _short(axis: str) -> str:
    if axis == LANES:
        return "n"
    return "" if "_" in axis else axis  # an axis that stands for no letter


def header(programs: tuple[TileProgram, ...], backend: str, about: tuple[str, ...] = ()) -> str:
    """Equation, operands, and each part's layout and cost.

    `about` is what the programs are for where that is more than their equation: the equation they serve, then what a
    reader should know of it, a line each.
    """
    first = programs[0]
    equation, *rest = about or (first.equation,)
    lines = [f"{equation}, generated by sparsetc for {backend}.", "", *rest, *([""] if rest else [])]
    lines.append(_pairs(first) if first.view.pairs else _parts(first))
    for p in programs:
        lines += ["", f"Part {p.number}, {p.format}: {p.view}.", *["    " + line for line in sketch(p)]]
        lines += ["    " + line for line in cost_of(p).describe()]
    if any("*w" in line for line in lines):
        lines += ["", LEGEND]
    return docstring("\n".join(lines) + "\n")


def docstring(text: str) -> str:
    """Escape text so that between three double quotes it is a string of exactly these lines."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"') if "\\" in text or '"""' in text else text
    odd = {c for c in {*escaped} - {"\n"} if not c.isprintable()}
    return escaped.translate({ord(c): c.encode("unicode_escape").decode() for c in odd})


def _parts(p: TileProgram) -> str:
    indices = {"X": p.letters} | {o.name: (*o.rows, *o.axes) for o in p.operands}
    product = " ".join(f"{name}[{', '.join(letters)}]" for name, letters in indices.items())
    kept = p.equation.partition("->")[2]
    summed = dict.fromkeys(c for letters in indices.values() for c in letters if not {*c} <= {*kept})
    sums = f"sum over {', '.join(summed)} of " if summed else ""
    kind = p.result.key.kind
    row = among(p.letters, kept) if kind == "row" else (kind,)
    values = "is sparse" if p.view.values.held else "is sparse, of ones"
    output = f"{p.output}[{', '.join((*row, *p.output_axes))}]"
    return f"{output} = {sums}{product}; X {values}; a part adds its nonzeros' share."


def _pairs(p: TileProgram) -> str:
    names = [f"{o.name.upper()}[{', '.join(o.letters)}]" for o in map(p.stored, PAIRED)]
    output = f"{p.output}[{', '.join(('item', *p.output_axes))}]"
    return f"{output} = the sum, over the item's pairs of tiles, of the product of {' and '.join(names)} (BCB-SpTC)."


def stored_tiles(operand: Stored) -> str:
    """Describe where a tile's values lie."""
    tiles, names = operand.values, [operand.letters[m] for m in operand.values.sequence]
    sizes = "x".join(str(tiles.sides[m]) for m in tiles.sequence)
    order = f"row-major over {(', ' if operand.name else '').join(names)} = {sizes}"
    return tiles.describe(operand.array, order)


def sketch(p: TileProgram) -> list[str]:
    """Return a line for each array, with the bits of its words, most significant first; lines of a pair of tiles."""
    view, letters = p.view, p.letters
    lines = []
    tiled = [o for o in p.sparse if o.letters]
    tiles = [*map(stored_tiles, tiled), *[line for o in tiled for line in o.values.scaling(o)]]
    if view.pairs:
        pair = "pair n, pair_ptr[item] <= n < pair_ptr[item + 1], is of tile pair_x[n] of X and tile pair_y[n] of Y"
        return [pair, *tiles]
    for axis, coordinates in zip(view.positions, view.levels, strict=True):
        arrays: dict[str, list[str]] = {}
        for c in coordinates:
            letter, value = letters[c.mode], view.coordinates[c.mode]
            text = value.text(Writer(letters, axis, f"{letter}:{{bits}}"))
            if value.fields:
                arrays.setdefault(value.fields[0].word.array, []).append(text)
            else:
                along = "".join(f", along {letters[mode]}" for mode in value.sides - {c.mode})
                lines.append(f"{letter} = {text}{along}{'' if value.lookups else ', not stored'}")
        lines += [f"{name}[{axis}] = | {' | '.join(bits)} |  bits a mode" for name, bits in arrays.items()]
    return [*lines, *view.innermost.where(view.values, tiles)]
