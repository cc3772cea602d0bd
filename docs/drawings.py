"""Draw how each storage keeps one small tensor: the SVG files of `docs/how/formats.md` and of `docs/how/index.md`.

`python docs/drawings.py` writes them. Everything that is drawn is read from kernels: the arrays that their programs
read, under the names that the generated source has for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from svg import (
    ARRAYS,
    CELL,
    COLUMN,
    FAINT,
    GREY,
    HIGH,
    LEFT,
    MARGIN,
    NONE,
    Block,
    Cell,
    Page,
    Row,
    draw_cells,
    draw_rows,
)

import sparsetc as stc

FOLDER = Path(__file__).resolve().parent / "how"
EQUATION, LETTERS, RANK = "ijk,jr,kr->ir", "ijk", 16
NONZEROS = "000 001 010 011 022 111 130 131 132 133 200 201 211 222 311 330 331 333"
"""i, j and k of the nonzeros. Rows 0 and 2 are similar, as are rows 1 and 3; fibers along i and along k are long."""
CALL = "ijk,jt,tr,kr->ir"
COLOURS = ("#9ecae1", "#fdae6b", "#a1d99b", "#fa9fb5", "#bcbddc", "#ffe08a", "#8dd3c7", "#d9b99b", "#c7e9f1", "#e6b0aa")


# -- the example ------------------------------------------------------------------------------------------------------
def example() -> stc.SparseTensor:
    """Return the tensor: 4 x 4 x 4, whose nonzeros are numbered from 1 by their values."""
    coords = torch.tensor([[int(digit) for digit in nonzero] for nonzero in NONZEROS.split()]).T
    return stc.SparseTensor(coords, torch.arange(1.0, coords.shape[1] + 1), (4, 4, 4))


def compiled(plan: str | stc.plans.Plan) -> stc.Kernel:
    """Return the kernel of the example for a GPU, by a plan; nothing runs."""
    return stc.compile(EQUATION, example(), *(torch.ones(4, RANK) for _ in "bc"), plan=plan, backend="triton")


def in_small(name: str, **sizes: Any) -> stc.Kernel:
    """Return the kernel by a named plan whose storage has smaller sizes, so that the example fills several blocks."""
    plan = compiled(name).plan
    parts = [
        replace(p, storage=replace(p.storage, **sizes), schedule=replace(p.schedule, unroll=1)) for p in plan.parts
    ]
    return compiled(replace(plan, parts=tuple(parts)))


def in_tiles() -> stc.Kernel:
    """Return the kernel of tiles of 2 x 2 x 2 with 4 nonzeros or more, and of runs of the others."""
    sides = tuple((f"side_{mode}", 2) for mode in range(3))
    (tiles,), (runs,) = compiled(stc.plans.plan_hls(threshold=0)).plan.parts, compiled("coo").plan.parts
    tiles = replace(tiles, storage=replace(tiles.storage, params=sides))
    runs = replace(runs, schedule=replace(runs.schedule, warps=tiles.schedule.warps, stages=tiles.schedule.stages))
    return compiled(stc.plans.Plan("hls", (tiles, runs), partition="threshold", options=(("threshold", 4), *sides)))


def in_bitmaps() -> stc.Kernel:
    """Return the kernel of a product of the example with itself, whose blocks are read as bitmaps."""
    plan = stc.plans.plan_bcb(i=4, l=4, j=4, k=2, storage="bitmap")
    return stc.compile("ijk,ljk->il", example(), example(), plan=plan, backend="triton")


def draw_tensor(page: Page, colours: Sequence[str], legend: Sequence[str]) -> None:
    """Draw the tensor as four slices of i, side by side in two rows, and what the colours are."""
    x, y, size = example(), 62, 4 * CELL
    numbers = {tuple(c): n for n, c in enumerate(x.coords.T.tolist())}
    page.text(LEFT, y - 18, "the tensor, a slice an i", 11, FAINT)
    for i in range(4):
        left, top = LEFT + i % 2 * (size + 26), y + 16 + i // 2 * (4 * HIGH + 52)
        page.text(left, top - 18, f"i = {i}", 11)
        found = [[numbers.get((i, j, k)) for k in range(4)] for j in range(4)]
        draw_cells(page, left, top, [[_of_tensor(n, colours) for n in row] for row in found])
        for at in range(4):
            page.text(left + (at + 0.5) * CELL, top - 4, f"{at}", 8, FAINT, "middle")
            page.text(left - 4, top + at * HIGH + 13, f"{at}", 8, FAINT, "end")
    page.text(LEFT - 24, y + 16 + 14, "j", 11, FAINT)
    page.text(LEFT + size + 8, y + 12, "k", 11, FAINT)
    for number, line in enumerate(legend):
        page.text(LEFT, page.bottom + (20 if not number else 11), line, 11, FAINT)


def _of_tensor(number: int | None, colours: Sequence[str]) -> Cell:
    return Cell("") if number is None else Cell(f"{number + 1}", colours[number])


# -- arrays of a kernel's parts ---------------------------------------------------------------------------------------
ABOUT = {
    "item_word": "{item} of each work item",
    "lane_word": "{lane} of each lane",
    "lane_len": "nonzeros of each lane",
    "block_ptr": "where each block begins",
    "block_full": "steps in which no lane is padding",
    "tile_word": "{lane} of each tile, in tiles",
    "rows": "{item} of each row of a window",
    "word": "{leaf} of each nonzero",
}
"""What an element of an array is."""


def modes_of(name: str, part: Any) -> tuple[int, ...]:
    """Return the modes whose coordinates a word of an array has."""
    storage = part.packed.storage
    if name.startswith("columns"):
        return (storage.lane[int(name[8:] or 0)],)
    level = {"item_word": storage.item, "rows": storage.item, "word": storage.leaf}
    return level.get(name, storage.lane if name in ("lane_word", "tile_word") else ())


def note_of(name: str, part: Any) -> str:
    """Return what an element of an array is, with the letters of this part."""
    levels = zip(("item", "lane", "leaf"), part.packed.storage.levels, strict=True)
    letters = {level: ", ".join(LETTERS[m] for m in modes) for level, modes in levels}
    if name == "item_ptr":
        of_item = "positions" if part.packed.format == "dense" else f"{part.packed.view.loops[0].name}s"
        return f"where each work item's {of_item} begin"
    if name == "item_word" and part.packed.format == "dense_tile":
        return f"{letters['item']} of each work item, in tiles"
    if name.startswith("columns"):
        return f"{LETTERS[modes_of(name, part)[0]]} of each column of a tile; {part.packed.shape[1]} for none"
    return ABOUT[name].format(**letters)


def nonzeros_of(name: str, part: Any) -> list[int]:
    """Return a nonzero that each element of an array describes, -1 for none."""
    packed = part.packed
    items, lanes = packed.representatives
    if name.startswith("columns"):
        tiles = packed.positions.view(lanes.numel(), -1, packed.storage.param("width"))
        numbers = tiles.amax(1).flatten()
    elif name == "rows":
        tiles = packed.positions.view(lanes.numel(), packed.storage.param("height"), -1).amax(2)
        numbers = tiles[packed.arrays["item_ptr"][:-1].long()].flatten()
    elif name.startswith("item"):
        numbers = items
    elif name in ("lane_word", "lane_len", "tile_word"):
        numbers = lanes
    else:
        numbers = torch.arange(packed.stored) if packed.positions is None else packed.positions
    return packed.in_whole(numbers).tolist()


def cells_of(name: str, elements: Sequence[Any], part: Any, colours: Sequence[str]) -> list[Cell]:
    """Return the cells of an array, coloured as the nonzeros that they describe."""
    if name.endswith(("_ptr", "_full")):
        return [Cell(f"{element:g}") for element in elements]
    coords, sides = example().coords.tolist(), getattr(part.packed.view.values, "sides", ()) or (1, 1, 1)
    modes, cells = modes_of(name, part), []
    for element, nonzero in zip(elements, nonzeros_of(name, part), strict=True):
        caption = ",".join(str(coords[m][nonzero] // sides[m]) for m in modes) if len(modes) > 1 else ""
        colour = NONE if nonzero < 0 or (name == "item_word" and several(part, colours)) else colours[nonzero]
        cells.append(Cell(f"{element:g}", colour, caption if nonzero >= 0 else "", nonzero < 0))
    return cells


def several(part: Any, colours: Sequence[str]) -> bool:
    """Return True if fibers are coloured, of which a work item has several."""
    return part.packed.format == "fiber" and len(set(colours)) > part.packed.items


def blocks_of(name: str, cells: list[Cell], part: Any) -> list[Block]:
    """Put the cells of an array into blocks, as the part's nonzeros are walked."""
    packed, arrays = part.packed, part.packed.arrays
    if name.endswith(("_ptr", "_full")) or name == "item_word":
        return [[cells]]
    if "block_ptr" in arrays and name in ("word", "values"):
        ends, lanes = arrays["block_ptr"].tolist(), packed.storage.lanes
        return [in_lines(cells[start:end], lanes) for start, end in pairwise(ends)]
    if packed.format == "coo" and name in ("word", "values"):
        return [[cells[start:end]] for start, end in pairwise(arrays["item_ptr"].tolist())]
    if packed.format == "window":
        height, width = packed.storage.param("height"), packed.storage.param("width")
        size, line = {"rows": (height, height), "values": (height * width, width)}.get(name, (width, width))
    elif packed.format == "dense_tile":
        size = line = part.packed.view.values.volume if name == "values" else len(cells)
    elif packed.format == "dense":
        size, line = len(cells), 16
    else:
        size = line = packed.storage.lanes
    return [in_lines(cells[start : start + size], line) for start in range(0, len(cells), size)]


def in_lines(cells: Sequence[Cell], length: int) -> Block:
    """Cut cells into lines of one length."""
    return [cells[start : start + length] for start in range(0, len(cells), length)]


def rows_of(part: Any, values: torch.Tensor, colours: Sequence[str]) -> Iterator[Row]:
    """Yield the arrays that a part's program reads, the values last."""
    for name, array in (*part.arrays.named(part.program).items(), ("values", values)):
        cells = cells_of(name, array.tolist(), part, colours)
        note = value_note(part) if name == "values" else note_of(name, part)
        yield Row(name, str(array.dtype).removeprefix("torch."), note, blocks_of(name, cells, part))


def value_note(part: Any) -> str:
    """Return in which order a part's values lie."""
    packed, sequence = part.packed, part.packed.storage.sequence
    if packed.format == "dense_tile":
        return f"every position of each tile: {', then '.join(LETTERS[m] for m in sequence)}"
    named = {
        "coo": "a run a work item",
        "window": "every position of each tile",
        "dense": "every position: i, then j, then k",
    }
    return named.get(packed.format, "a column a lane, a line a step")


# -- the drawings -----------------------------------------------------------------------------------------------------
def by(numbers: Sequence[int]) -> list[str]:
    """Return the colour of each nonzero, by the number of what it belongs to."""
    return [COLOURS[n % len(COLOURS)] for n in numbers]


def by_modes(*modes: int) -> list[str]:
    """Return the colour of each nonzero, one for each coordinate along these modes."""
    return by(torch.unique(example().coords[list(modes)], dim=1, return_inverse=True)[1].tolist())


def by_parts(kernel: stc.Kernel, last: str = "") -> list[str]:
    """Return the colour of each nonzero, one a part, or one a tile of the first; the last part's may be given."""
    colours = [""] * example().nnz
    for number, part in enumerate(kernel.step.parts):
        packed, positions = part.packed, part.packed.positions
        stored = torch.arange(packed.stored) if positions is None else positions
        tile = packed.stored // packed.representatives[1].numel() if last and positions is not None else packed.stored
        for place, nonzero in enumerate(packed.in_whole(stored).tolist()):
            if nonzero >= 0:
                colours[nonzero] = last if last and positions is None else COLOURS[number + place // tile]
    return colours


def bytes_of(kernel: stc.Kernel) -> str:
    """Return the bytes of arrays and values, and how many these are for each nonzero."""
    parts = kernel.plan.parts
    index = sum(p.nbytes for p in parts)
    return f"{index} bytes with values, {index / sum(p.nnz for p in parts):.1f} a nonzero"


def draw(title: str, kernel: stc.Kernel, colours: Sequence[str], *legend: str) -> str:
    """Draw the example and the arrays of a kernel of one sparse operand."""
    page = Page()
    page.text(MARGIN, 26, title, 14)
    draw_tensor(page, colours, legend)
    y, parts = 40.0, kernel.step.parts
    packed_values = kernel.step.packed_values(example().values)
    columns = [list(rows_of(part, v, colours)) for part, v in zip(parts, packed_values, strict=True)]
    heads = [f"part {n}: {part.packed.format}" if len(parts) > 1 else "" for n, part in enumerate(parts)]
    if len({tuple(row.name for row in rows) for rows in columns}) == 1:
        for n, head in enumerate(heads):
            page.text(ARRAYS + n * COLUMN, y + 10, head, 12)
        y = draw_rows(page, y + 18 * bool(heads[0]), columns)
    else:
        for head, rows in zip(heads, columns, strict=True):
            page.text(ARRAYS, y + 10, head, 12)
            y = draw_rows(page, y + 18, [rows])
    page.text(ARRAYS, y + 12, bytes_of(kernel), 11)
    return page.svg(title)


def draw_bitmaps() -> str:
    """Draw the blocks of one operand of a product, and the list of pairs of blocks."""
    kernel, page, title = in_bitmaps(), Page(), "bcb: bitmap blocks, in pairs"
    numeric, x = kernel.step.numeric, example()
    blocks, tasks, (stored, _) = numeric.blocking.x, numeric.tasks, numeric.program.view.pairs
    colours, places = by(blocks.block.tolist()), dict(zip(blocks.at.tolist(), range(x.nnz), strict=True))
    first, bits, values = blocks.tile_arrays(x.values, stored.word)
    page.text(MARGIN, 26, title, 14)
    draw_tensor(page, colours, ("a colour a block of 4 x 4 x 2",))

    def row(name: str, array: torch.Tensor, note: str, cells: Sequence[Block]) -> Row:
        return Row(name, str(array.dtype).removeprefix("torch."), note, cells)

    def plain(array: torch.Tensor, of_blocks: bool = False) -> list[Block]:
        return [[[Cell(f"{n:g}", COLOURS[n] if of_blocks else NONE) for n in array.tolist()]]]

    by_bits = []
    for block, word in enumerate(bits.flatten().tolist()):
        found = [places.get(block * blocks.volume + n, -1) for n in range(blocks.volume)]
        cells = [Cell(str(word >> n & 1), colours[z] if z >= 0 else NONE, "", z < 0) for n, z in enumerate(found)]
        by_bits.append(in_lines(cells, stored.sides[-1]))
    packed = [Cell(f"{n:g}", colours[int(n) - 1]) for n in values.tolist()]
    ends = [*first.tolist(), len(packed)]
    rows = [
        row("pair_ptr", tasks.ptr, "where the pairs of each block of the result begin", plain(tasks.ptr)),
        row("pair_x", tasks.x, "the block of X of each pair", plain(tasks.x, True)),
        row("pair_y", tasks.y, "the block of Y of each pair; Y is the same tensor", plain(tasks.y, True)),
        row("x_value_ptr", first, "where the values of each block begin", plain(first)),
        row("x_bits", bits, "a word a block, lowest bit first; a line an i: j, then k", by_bits),
        row("x_values", values, "in the order of the bits that are set", [[packed[a:b]] for a, b in pairwise(ends)]),
    ]
    y, part = draw_rows(page, 40, [rows]), kernel.plan.parts[0]
    said = f"{part.nbytes} bytes of words, bitmaps and values of X, {part.nbytes / part.nnz:.1f} a nonzero"
    page.text(ARRAYS, y + 12, said, 11)
    return page.svg(title)


def draw_call() -> str:
    """Draw what each step of one call makes, from the equation to the launch."""
    sizes = {"j": 4, "t": 8, "r": RANK, "k": 4}
    dense = [torch.ones(sizes[a], sizes[b]) for a, b in ("jt", "tr", "kr")]
    kernel, page, title = stc.compile(CALL, example(), *dense, backend="triton"), Page(), "The way of one call"
    bound, (part,) = kernel.step.bound, kernel.step.parts
    source = kernel.source.splitlines()
    loop = next(n for n, line in enumerate(source) if "for first in range(full" in line)
    end = next(n for n, line in enumerate(source) if "tl.store" in line)
    tables = ", ".join(f"{o.name} {bound.dense_shapes[n]}" for n, o in enumerate(part.program.operands))
    steps = {
        ("equation", "ir/equation/"): [f"{CALL}   {' '.join(f'{c}={n}' for c, n in kernel.contraction.bound.sizes)}"],
        ("rewrites", "contraction/"): [
            *(f"{text.partition('first ')[2]} by torch, at each call" for text in kernel.contraction.rewrites),
            str(bound.einsum),
        ],
        ("plan", "planner/, formats/"): str(kernel.plan).splitlines(),
        ("program", "ir/lower/"): str(kernel.programs[0]).splitlines()[1:],
        ("source", "codegen/"): ["…", *source[loop : end + 1]],
        ("launch", "runtime/"): [
            f"{part.packed.items} programs, one a work item; {tables} in, A {kernel.contraction.shape} out"
        ],
    }
    page.text(MARGIN, 26, title, 14)
    y = 42
    for number, ((name, folder), lines) in enumerate(steps.items()):
        height = max(14 * len(lines) + 12, 42)
        page.box(MARGIN, y, 140, height, COLOURS[number])
        page.box(MARGIN + 140, y, page.width - 2 * MARGIN - 140, height, NONE)
        page.text(MARGIN + 10, y + 18, name, 12)
        page.text(MARGIN + 10, y + 32, folder, 9)
        for down, line in enumerate(lines):
            page.code(MARGIN + 152, y + 17 + 14 * down, line, 9)
        if number < len(steps) - 1:
            page.arrow(MARGIN + 70, y + height, 14)
        y += height + 14
    return page.svg(title)


def drawings() -> dict[str, str]:
    """Return the text of each SVG file, by its path below `docs/how`."""
    fiber, tiles, one_copy = in_small("fiber", lanes=2), in_tiles(), in_small("mm-csf", lanes=2)
    by_similarity = compiled(stc.plans.plan_1sa(tau=60, strip=1, height=2, width=4, threshold=0))
    lanes = in_small("rows", lanes=4, max_item_nnz=4)
    similar = by([0, 1, 0, 1])
    windows = [similar[i] for i in example().coords[0].tolist()]
    files = {
        "coo": draw("coo: runs of nonzeros", compiled("coo"), by_modes(0), "a colour a work item"),
        "fiber": draw("fiber: blocks of fibers", fiber, by_modes(0, 1), "a colour a fiber"),
        "rows": draw("rows: an output row a lane", lanes, by_modes(0), "a colour an output row"),
        "hls": draw(
            "hls: dense tiles and leftovers", tiles, by_parts(tiles, GREY), "a colour a tile,", "grey leftovers"
        ),
        "mm-csf": draw("mm-csf: fibers along several modes", one_copy, by_parts(one_copy), "a colour a part"),
        "1-sa": draw("1-sa: similar rows in dense tiles", by_similarity, windows, "a colour a window"),
        "bcb": draw_bitmaps(),
        "dense": draw("dense: every position", compiled("dense"), by([0] * example().nnz), "blue: nonzeros"),
    }
    return {"call.svg": draw_call()} | {f"formats/{name}.svg": text for name, text in files.items()}


def main() -> None:
    """Write the files."""
    for name, text in drawings().items():
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
