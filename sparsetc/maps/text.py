"""The inputs of a walk's generated text: names of arguments, sizes, loads, and the comment at its head.

In: a `Walk` and a `Layout`. Out: what `printer.Printer` and `native_walk.NativeText` put beside their statements.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from sparsetc.backends import Backend
from sparsetc.maps.body import SIDES, Walk
from sparsetc.maps.elementwise import number_text
from sparsetc.support import NamedInts, Names

LOWEST = "-1e30"
"""The initial maximum of a row: finite, so that its difference from a score of minus infinity is no NaN."""
LEAST_DOT = 16
"""Rows from which tiles are multiplied by dots; a side of a dot has so many positions at least."""


NUMBERS = ("item_count", "rows", "columns", "parts", "windows", "pattern_head", "part_head", "longest")
KINDS = ("head", "row", "step", "size", "batch", "heads")
ARRAYS = ("items", "full_col", "full_base", "part_col", "bits", "part_base", "ptr", "far", "order")
"""Arguments of a walk's text: numbers; numbers of each tensor, as `number_arguments` has them; and index arrays."""


@dataclass(frozen=True)
class Layout:
    """The sides of a walk's tiles, how its loop runs, and the properties of data that its generated text depends on.

    Attributes:
        height: rows of a window.
        width: columns of a tile.
        warps: of a program.
        stages: tiles that are on their way at once.
        gathered: whether tiles hold any columns, and not neighbouring ones.
        lines: how many pairs of a window and a head a program takes side by side, where a window is one row.
        sizes: of each table's rows.
        ordered: whether the numbers of entries are brought to the pattern's order.
        even: whether no tile reaches past the last column.
        full: whether there are full tiles.
        in_runs: whether the full tiles of a window are neighbours, so that their numbers are not read.
        part: whether there are partial tiles.
        cut: whether some windows are several items.
        wide: whether addresses in a table pass 32 bits.
        precision: of dots of float32.
        group: heads of rows that share a head of columns.
        stacked: whether heads have patterns of their own, whose windows follow one another.
        apart: tables whose heads lie in two groups, as a layer's do behind rows: a batch and its heads.
        stepped: vectors by row or column whose numbers are not next to one another.
        whole: vectors of whole numbers, which are not converted to floats.
        units: of tables whose rows begin at multiples of so many elements, and not of 16, which Triton sees by itself:
            the numbers of elements between heads and rows are in units of these.
        ptx: whether the target has instructions of PTX.
    """

    height: int = 1
    width: int = 1
    warps: int = 0
    stages: int = 0
    gathered: bool = False
    lines: int = 1
    sizes: NamedInts = ()
    ordered: bool = False
    even: bool = True
    full: bool = False
    in_runs: bool = False
    part: bool = True
    cut: bool = False
    wide: bool = False
    precision: str = ""
    group: int = 1
    stacked: bool = False
    apart: Names = ()
    stepped: Names = ()
    whole: Names = ()
    units: NamedInts = ()
    ptx: bool = False

    def heads(self, mode: int) -> tuple[str, str, str]:
        """Return the names of the variables that number heads: of the other mode's tables, of rows, and of entries."""
        far = "head"
        if self.group > 1:
            far = "reader" if mode else "shared"
        of_rows = far if mode else "head"
        return far, of_rows, "part" if self.stacked else of_rows


def padded(size: int, dots: bool) -> int:
    """Return how many positions a tile has along a row of a table of this size."""
    least = 1 << max(size - 1, 0).bit_length()
    return max(least, LEAST_DOT) if dots else least


def argument_names(walk: Walk, lines: Iterable[str]) -> Names:
    """Return the arguments that lines name: numbers, index arrays, slots, the seed and tensors, written ones last.

    Slots have the sums of the items that a long window is cut into.
    """
    less = [name for *_, name in walk.sums.values() if name]
    shared = [row for _, row in walk.inner.values()]
    tensors = list(dict.fromkeys([*walk.own, *walk.other, *walk.vectors, *less, *shared, *walk.written]))
    apart = [f"{tensor}_{kind}" for tensor in tensors for kind in KINDS]
    slots = [f"{name}_slots" for name in ("top", "sum", *walk.targets)]
    used = {*re.findall(r"\w+", "\n".join(lines))}
    return tuple([name for name in (*NUMBERS, *apart, *ARRAYS, *slots, "seed", *tensors) if name in used])


def number_arguments(tensors: Mapping[str, Tensor], units: Mapping[str, int]) -> dict[str, int]:
    """Return the `KINDS` of numbers of each tensor: sizes, and strides; those of heads and rows are in its units."""
    numbers: dict[str, int] = {}
    for name, tensor in tensors.items():
        unit, own_batches = units.get(name, 1), int(tensor.ndim == 4)
        numbers |= {f"{name}_step": tensor.stride(-1), f"{name}_size": tensor.shape[-1]}
        numbers |= {f"{name}_head": tensor.stride(own_batches) // unit, f"{name}_heads": tensor.shape[own_batches]}
        numbers |= {f"{name}_batch": tensor.stride(0) // unit, f"{name}_row": tensor.stride(tensor.ndim - 2) // unit}
    return numbers


def header(walk: Walk, layout: Layout, name: str, backend: Backend) -> str:
    """Return the header comment of a module: its computation, and the memory layout of its arguments."""
    i, j = ("i", "j") if walk.mode == 0 else ("j", "i")
    kind = "gathered" if layout.gathered else "neighbouring"
    lines = [f"{name}, generated by sparsetc for {backend.name}.", ""]
    if not backend.loops:
        lines += [
            f"Windows of {layout.height} {SIDES[walk.mode]}, called rows, meet tiles of {layout.width} {kind} columns."
        ]
    lines += [f"For each entry ({i}, {j}) of the pattern:", ""]
    for product, (own, other) in walk.products.items():
        term = f"{own}[{i}, d] {other}[{j}, d]"
        if product in walk.inner:
            term = f"a function of {own}[{i}, d], {other}[{j}, d] and {walk.inner[product][1]}[d]"
        lines.append(f"    {product}[{i}, {j}] = sum over d of {term}")
    for name_of_sum, (left, right, less) in walk.sums.items():
        minus = f" - {less}[{i}]" if less else ""
        lines.append(f"    {name_of_sum}[{i}] = sum over d of {left}[{i}, d] {right}[{i}, d]{minus}")
    at = {"own": i, "other": j, "entries": f"{i}, {j}", "places": f"n({i}, {j})"}
    inputs = [*walk.products, *walk.sums]
    inputs += [f"{vector}[{at[side]}]" for vector, side in walk.vectors.items()]
    lines.append(f"    {', '.join(walk.weights)} = map of {', '.join(inputs)}")
    if walk.dropout:
        lines.append(
            f"    keep[{i}, {j}] = 0 for a share of {walk.dropout}, drawn by hashes of seed, head, {i} and {j}"
        )
    if walk.online:
        _, score_factor = walk.weights["p"]
        times = "" if score_factor == 1 or backend.loops else f" * {number_text(score_factor)}"
        lines.append(
            f"    p[{i}, {j}] = 2 ** (p[{i}, {j}]{times} - lse_out[{i}]), lse_out the logarithm of the sum for i"
        )
    for output, table, result in walk.accumulated:
        factor = walk.factors[result]
        times = "" if factor == 1 or backend.loops else f"{number_text(factor)} * "
        summed = f"{output}[{i}, {j}]"
        if isinstance(table, tuple):
            summed += f" times the derivative of {table[0]}'s function"
        elif table is not None:
            summed += f" {table}[{j}, d]"
        lines.append(f"    {result}[{i}{', d' if table else ''}] += {times}{summed}")
    for output, vector, result in walk.stored:
        lines.append(f"    {result}[{f'n({i}, {j})] +=' if vector else 'entry] ='} {output}[{i}, {j}]")
    lines.append("")
    if backend.loops:
        lines += ["far[n]: column of entry n; a row's entries are from ptr[row] to ptr[row + 1]"]
        lines += ["order[n]: the number of entry n in the pattern"] if layout.ordered and walk.by_entry else []
        lines.append("x_head, x_row, x_step: elements from one head, row or number of x to the next")
        return "\n".join(lines) + "\n"
    lines += ["items[item] = window, full tiles from, to, partial tiles from, to, slot of a part of a window or -1"]
    if layout.full:
        lines.append("full_col[tile]: a full tile's block of columns, by number")
    if layout.part:
        columns = "columns, some twice" if layout.gathered else "block of columns, by number"
        lines.append(f"part_col[tile]: a partial tile's {columns}")
        lines.append("bits[tile, row]: bit c is set where the row meets the tile's column c")
    if walk.by_entry:
        lines.append("full_base, part_base[tile, row]: the number of the row's first entry in the tile")
    lines.append("x_head, x_row: elements from one head of x, and from one row, to the next")
    if walk.places:
        lines.append("x_size: numbers that a head of x has; n(i, j) below 0 is counted from their end")
    lines += [f"{name}_head, {name}_row: of {unit} elements" for name, unit in layout.units]
    if layout.stepped:
        lines.append("x_step: elements from one number of x to the next")
    if layout.apart:
        lines.append("x_batch, x_heads: elements from one batch of x to the next, and its heads")
    return "\n".join(lines) + "\n"
