"""The header of a file of packed chunks: the stream's description, and every array by its program's name for it.

In: a `Recipe` and a `StreamCut`. Out: the header of a safetensors file; or the other way round, everything compared
with what the programs take. Programs are not stored: they are lowered again from the parts of plans, and compared with
a digest.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch

from sparsetc.codegen.programs import stored_dtype
from sparsetc.contraction.request import check_form
from sparsetc.errors import OutOfMemoryError, PlanError
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.plan import RECORDS, Plan, verify
from sparsetc.ir.program.tile import TileProgram
from sparsetc.options import Options, with_settings
from sparsetc.packing.base import Packed
from sparsetc.packing.stored import check_arrays, check_coordinates, counts, require
from sparsetc.packing.words import WORDS
from sparsetc.streaming.compiler import Compiler, Variant
from sparsetc.streaming.cutting import NAMES, Chunk, StoredPart, StreamCut
from sparsetc.streaming.store import MALFORMED, ChunkFile, Put, writing
from sparsetc.support import FilePath, Ints, Names, outside
from sparsetc.tensor.coords import check_range, checked_shape, is_coalesced
from sparsetc.tensor.dtypes import NAMED
from sparsetc.tuning.record import as_data, plan_of

MOST_ELEMENTS = 1 << 59
ROWS = "rows"
"""The name of the coordinates of the result's rows."""


@dataclass(frozen=True)
class Recipe:
    """The full description of a stream: everything that chunks and programs depend on beside the nonzeros.

    Attributes:
        shapes: shapes of all operands, the streamed one first.
        output: the form of the result that was asked for.
        numbered: whether chunks number the rows of the result that they have.
    """

    equation: str
    shapes: tuple[Ints, ...]
    dtype: str
    precision: str
    backend: str
    output: str
    numbered: bool
    drop_zeros: bool


@dataclass(frozen=True)
class Contents:
    """The metadata of a file of chunks.

    Attributes:
        digests: of the programs of each variant.
        checksums: of the blocks of each chunk, and of the coordinates of rows.
    """

    recipe: Recipe
    variants: tuple[Variant, ...]
    digests: Names
    chunks: tuple[Chunk, ...]
    checksums: tuple[Ints, ...]


KINDS = {**RECORDS, **{kind.__name__: kind for kind in (Contents, Recipe, Variant, Chunk, StoredPart)}}


def parsed(text: str) -> Any:
    """Return the `Contents` in the metadata of a file; raises one of `MALFORMED` where it is damaged."""
    return plan_of(json.loads(text), KINDS)


def write(path: FilePath, recipe: Recipe, compiler: Compiler, fill: Callable[[Put], StreamCut]) -> None:
    """Write a file: chunks, which `fill` puts there, the coordinates of the result's rows, and the header.

    Raises:
        PlanError: programs cannot be made again from the parts of plans, or there are too many chunks.
    """
    with writing(path) as (put, checksums, header):
        made = fill(put)
        for one in made.variants:
            if compiler.lowered(one) != one.programs:
                name = one.parts[0].format
                raise PlanError(f"chunks in format {name!r} cannot be saved: what its view is depends on the nonzeros")
        put(made.coords.contiguous().reshape(-1).view(torch.uint8))
        variants = tuple([replace(one, programs=()) for one in made.variants])  # they are lowered again
        contents = Contents(recipe, variants, tuple(map(_digest, made.variants)), made.chunks, tuple(checksums))
        text = json.dumps(as_data(contents, KINDS), separators=(",", ":"))
        header |= {"__metadata__": {"stream": text, "crc32": str(zlib.crc32(text.encode()))}} | _arrays(made)


def _digest(variant: Variant) -> str:
    """Return what tells programs apart: all of their fields, since a program's own `repr` names it and no more."""
    every = [[(f.name, getattr(p, f.name)) for f in fields(p)] for p in variant.programs]
    return hashlib.sha256(repr(every).encode()).hexdigest()


def _arrays(made: StreamCut) -> dict[str, Any]:
    """Return the header's entries of all arrays, and of the gaps between them, which safetensors must not have."""
    listed, at = {}, 0
    for number, chunk in enumerate(made.chunks):
        programs = enumerate(made.variants[chunk.variant].programs)
        names = [f"{number}.{part}.{name}" for part, program in programs for name in (*_index(program), "values")]
        for name, (dtype, count), (begin, end, after) in zip(names, chunk.arrays, chunk.offsets, strict=True):
            listed[name] = _entry(dtype, [count], at + begin, at + end)
            if end < after:
                listed[f"{name}.gap"] = _entry("U8", [after - end], at + end, at + after)
        at += chunk.nbytes
    listed[ROWS] = _entry("I64", list(made.coords.shape), at, at + made.coords.nbytes)
    return listed


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    if dtype.startswith("C"):  # of which not all readers know; pairs of floats
        dtype, shape = f"F{int(dtype[1:]) // 2}", [*shape, 2]
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _index(program: TileProgram) -> Names:
    """Return the names of the arrays that a program reads beside values."""
    return outside(program.arrays, program.view.packed)


def einsum(file: ChunkFile, settings: Options, target: torch.device) -> tuple[Recipe, Compiler]:
    """Return the recipe and the compiler of a file. Raise `IOFormatError` if the file does not hold them."""
    try:
        recipe = file.stream.recipe
        settings = with_settings(settings, {"precision": recipe.precision})
        shapes = list(map(checked_shape, recipe.shapes))
        bound = parse(recipe.equation, shapes, [True] + [False] * (len(shapes) - 1))
        form = "sparse" if recipe.numbered else recipe.output
        for one in (recipe.output, form):
            check_form(one, bound.einsum)
        if max(map(prod, shapes[1:]), default=0) >= MOST_ELEMENTS:
            raise ValueError("dense operands of more elements than any memory has")
        compiler = Compiler(bound, NAMED[recipe.dtype], settings, form, target)
        if recipe.numbered != compiler.template.output.sparse:
            raise ValueError("rows are numbered where the result is sparse, and nowhere else")
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{file.path}: {error}") from None
    except MALFORMED as error:
        raise file.fault(f"its metadata has no einsum ({error!s:.200})") from None
    return recipe, compiler


def read(file: ChunkFile, compiler: Compiler) -> StreamCut:
    """Return the chunks of a file; raises `IOFormatError` where it has other arrays than the programs take.

    What arrays hold is checked when a chunk is first read: programs read nothing outside what is there.
    """
    try:
        contents, output = file.stream, compiler.template.output
        variants = tuple([_lowered(one, compiler) for one in contents.variants])
        if tuple(map(_digest, variants)) != contents.digests:
            raise ValueError("other programs")
        chunks, end = contents.chunks, 0
        for chunk in chunks:
            programs = variants[chunk.variant].programs
            if not all(_reads(compiler, *one) for one in zip(programs, chunk.parts, strict=True)):
                raise ValueError("a chunk's arrays are not those that its programs read")
            # Its first row may be the last of the chunk before.
            if not max(end - 1, 0) <= chunk.first <= end or (chunk.rows > 0) != output.sparse or chunk.rows < 0:
                raise ValueError("rows of chunks")
            end = chunk.first + chunk.rows
        kept = output.kept_shape
        file.expect([*(c.nbytes for c in chunks), 8 * len(kept) * end], contents.checksums)
        made = StreamCut(chunks, variants, torch.zeros((len(kept), end), dtype=torch.long, device="cpu"))
        if _arrays(made) != file.arrays:
            raise ValueError("its arrays do not lie one after the other")
        file.read(len(chunks), made.coords.view(-1).view(torch.uint8))
        check_range(made.coords, kept)
        if end and not is_coalesced(made.coords, kept):
            raise ValueError("rows that are not in order")
    except MALFORMED as error:
        raise file.fault(
            f"its chunks were packed for other programs than this version of sparsetc makes ({error!s:.200}); "
            "pack them again"
        ) from None
    file.check = lambda number, buffer: _check(made, compiler, number, buffer)
    return made


def _lowered(variant: Variant, compiler: Compiler) -> Variant:
    """Return a variant with its programs; `PlanError` or `ValueError` where the parts do not fit the einsum."""
    verify(Plan("stream", variant.parts, variant.fused))
    if any(fault := p.storage.level_fault(compiler.problem.order) for p in variant.parts):
        raise ValueError(fault)
    return replace(variant, programs=compiler.lowered(variant))


def _reads(compiler: Compiler, program: TileProgram, part: StoredPart) -> bool:
    """True if a part has the arrays that its program reads, in number and types."""
    words = {"I32", "I64", "U8", "I16", "U16"} if compiler.backend.narrow else {"I32", "I64"}
    kinds = [{NAMES[WORDS[program.view.values.word]]} if name == "bits" else words for name in _index(program)]
    kinds.append({NAMES[stored_dtype(program, compiler.dtype, compiler.backend)]})
    fits = len(kinds) == len(part.arrays) and all(
        name in kind and count >= 0 for kind, (name, count) in zip(kinds, part.arrays, strict=True)
    )
    return fits and part.items >= 0


def _check(made: StreamCut, compiler: Compiler, number: int, buffer: torch.Tensor) -> None:
    """Raise `FormatError` unless programs read nothing outside a chunk's arrays, operands and rows of the result."""
    chunk = made.chunks[number]
    variant, (arrays, values) = made.variants[chunk.variant], chunk.views(buffer)
    for part, program, located, stored in zip(variant.parts, variant.programs, arrays, values, strict=True):
        view, named = program.view, located.named(program) | {"values": stored}
        shape = compiler.problem.shape
        packed = Packed(part.format, part.storage, shape, chunk.nnz, view, named, None, located.stored, located.items)
        check_arrays(packed)
        check_coordinates(packed)
        if "block_full" in named:
            within = (named["block_full"] % program.schedule.unroll).any()
            require(not bool(within), "steps of a block end within an unrolling")
        key = program.result.key
        if key.kind == "row":  # of coordinates, which were looked at
            continue
        count = counts(view, named, located.items, located.stored)[view.positions[key.level]]
        if key.kind == "slot":
            sides = prod(view.values.sides[program.letters.index(letter)] for letter in key.letters)
            slot, least = named[key.array], -1 if key.letters else 0
            require(slot.numel() == count * sides, f"{key.array} has {slot.numel()} rows, expected {count * sides}")
            require(bool(((slot >= least) & (slot < chunk.rows)).all()), f"{key.array} has a row outside the result")
        else:
            require(count <= chunk.rows, f"{count} rows are added to {chunk.rows}")
