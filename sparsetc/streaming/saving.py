"""Packed chunks and what a file says of them: the end of a file, and its beginning where it is opened.

In: a writer that has the chunks, with their recipe; or an open file and its compiler. Out: the file's description; or
the `Cut` that it describes.
"""

from __future__ import annotations

import torch

from sparsetc.errors import PlanError
from sparsetc.streaming import description
from sparsetc.streaming.compiler import Compiler
from sparsetc.streaming.cutting import Cut
from sparsetc.streaming.description import Recipe
from sparsetc.streaming.file import Chunks, Writer
from sparsetc.streaming.layout import host_bytes


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
    """What a file has of chunks; raises `IOFormatError` for what does not fit together."""
    known = file.description
    try:
        variants = tuple(description.variant(v, compiler) for v in known["variants"])
        rows = int(known["rows"])
        chunks = tuple(description.chunk(c, len(variants), rows) for c in known["chunks"])
        if any(c.nbytes != b.nbytes for c, b in zip(chunks, file.blobs, strict=False)):
            raise ValueError("sizes of chunks")
        coords, kept = None, len(compiler.canonical.kept)
        if rows:
            blob = len(chunks)
            if file.blobs[blob].nbytes != kept * rows * 8:
                raise ValueError("coordinates of rows")
            held = host_bytes(file.blobs[blob].nbytes)
            file.read(blob, held)
            coords = held.view(torch.long).view(kept, rows)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise file.fault(
            f"its chunks were packed for other programs than this version of sparsetc makes ({error}); pack them again"
        ) from None
    return Cut(chunks, variants, rows, coords)
