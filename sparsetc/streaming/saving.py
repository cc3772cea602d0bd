"""Packed chunks and what a file says of them: the end of a file, and its beginning where it is opened.

In: a writer that has the chunks, with their recipe; or an open file and its compiler. Out: the file's description; or
the `Cut` that it describes.
"""

from __future__ import annotations

from math import prod

import torch

from sparsetc.errors import PlanError
from sparsetc.ir.program.tile import Row, Slot
from sparsetc.packing.base import Packed
from sparsetc.packing.stored import check_arrays, check_coordinates, counts, require
from sparsetc.streaming import description
from sparsetc.streaming.compiler import Compiler
from sparsetc.streaming.cutting import Cut
from sparsetc.streaming.description import Recipe
from sparsetc.streaming.file import Chunks, Writer
from sparsetc.streaming.store import host_bytes
from sparsetc.tensor.coords import check_range, is_sorted_unique, sort_keys


def finish(writer: Writer, recipe: Recipe, compiler: Compiler, made: Cut) -> None:
    """End a file of chunks."""
    for one in made.variants:
        if compiler.lowered(one.parts, one.ordered, one.wide) != one.programs:
            raise PlanError(
                f"chunks in format {one.parts[0].format!r} cannot be saved: what its view is depends on the nonzeros"
            )
    if made.coords is not None:
        writer.put(made.coords.contiguous().reshape(-1).view(torch.uint8))
    writer.finish(
        {
            "recipe": recipe.known(),
            "variants": list(map(description.of_variant, made.variants)),
            "chunks": list(map(description.of_chunk, made.chunks)),
            "rows": made.rows,
            "blobs": [b.known() for b in writer.blobs],
        }
    )


def cut_of(file: Chunks, compiler: Compiler) -> Cut:
    """What a file has of chunks; raises `IOFormatError` for what does not fit together.

    The bytes of a chunk are checked when they are first read: programs read nothing outside what is there.
    """
    known = file.description
    try:
        variants = tuple(description.variant(v, compiler) for v in known["variants"])
        rows = known["rows"]
        chunks = tuple(description.chunk(c, variants, compiler) for c in known["chunks"])
        ends = [0, *(c.first + c.rows for c in chunks)]  # a chunk's first row may be the last of the one before
        follow = all(max(end - 1, 0) <= c.first <= end for c, end in zip(chunks, ends, strict=False))
        if ends[-1] != rows or not follow or any((c.rows > 0) != compiler.template.output.sparse for c in chunks):
            raise ValueError("rows of chunks")
        kept = compiler.template.output.kept_shape
        sizes = [c.nbytes for c in chunks] + ([len(kept) * rows * 8] if rows else [])
        if sizes != [b.nbytes for b in file.blobs]:
            raise ValueError("sizes of chunks, or of coordinates of rows")
        coords = None
        if rows:
            held = host_bytes(sizes[-1])
            file.read(len(chunks), held)
            coords = held.view(torch.long).view(len(kept), rows)
            check_range(coords, kept)
            if not is_sorted_unique(sort_keys(coords, kept)):
                raise ValueError("rows that are not in order")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise file.fault(
            f"its chunks were packed for other programs than this version of sparsetc makes ({error}); pack them again"
        ) from None
    made = Cut(chunks, variants, rows, coords)
    file.check = lambda number, buffer: _check(made, compiler, number, buffer)
    return made


def _check(made: Cut, compiler: Compiler, number: int, buffer: torch.Tensor) -> None:
    """Raise `FormatError` unless programs read nothing outside a chunk's arrays, operands and rows of the result."""
    chunk = made.chunks[number]
    variant, (arrays, values) = made.variants[chunk.variant], chunk.views(buffer)
    for part, program, own, stored in zip(variant.parts, variant.programs, arrays, values, strict=True):
        view, named = program.view, own.named(program) | {"values": stored}
        shape = compiler.canonical.shape
        packed = Packed(part.format, part.storage, shape, chunk.nnz, view, named, None, own.stored, own.items)
        check_arrays(packed)
        check_coordinates(packed)
        if "block_full" in named:
            within = (named["block_full"] % program.schedule.unroll).any()
            require(not bool(within), "steps of a block end within an unrolling")
        key = program.key
        if isinstance(key, Row):  # of coordinates, which were looked at
            continue
        count = counts(view, named, own.items, own.stored)[view.positions[key.level]]
        if isinstance(key, Slot):
            sides = prod(view.values.sides[program.letters.index(letter)] for letter in key.letters)
            slot, least = named[key.array], -1 if key.letters else 0
            require(slot.numel() == count * sides, f"{key.array} has {slot.numel()} rows, expected {count * sides}")
            require(bool(((slot >= least) & (slot < chunk.rows)).all()), f"{key.array} has a row outside the result")
        else:
            require(count <= chunk.rows, f"{count} rows are added to {chunk.rows}")
