"""What a file of packed chunks says of them, as JSON: the einsum, the parts of plans, and where every array lies.

In: a `Recipe`, a `StreamCut` and the writer that has its chunks. Out: the end of a file; or the other way round,
everything checked. Programs are not stored: they are lowered again from the parts of plans, and compared with a digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from math import prod
from typing import Any

import torch

from sparsetc.codegen.launch import PartArrays, stored_dtype
from sparsetc.errors import PlanError
from sparsetc.ir.contraction_tree import Tree, parse_tree
from sparsetc.ir.plan import Part, Plan, Schedule, Storage, verify
from sparsetc.ir.program.tile import TileProgram
from sparsetc.packing.base import Packed
from sparsetc.packing.stored import check_arrays, check_coordinates, counts, require
from sparsetc.packing.words import WORDS
from sparsetc.streaming.compiler import Compiler, Variant
from sparsetc.streaming.cutting import StreamCut
from sparsetc.streaming.file import ChunkFile, ChunkWriter
from sparsetc.streaming.store import ArrayPlace, Chunk, PartPlaces, host_bytes, placed
from sparsetc.support.pickles import misfit
from sparsetc.tensor.coords import check_range, checked_shape, is_sorted_unique, sort_keys
from sparsetc.tensor.inputs import NAMED, dtype_name

_DTYPES = NAMED | {dtype_name(d): d for d in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)}


@dataclass(frozen=True)
class Recipe:
    """What is streamed, and how: all that chunks and programs depend on beside the nonzeros.

    Attributes:
        shapes: shapes of all operands, the streamed one first.
        output: the form of the result that was asked for.
        numbered: whether chunks number the rows of the result that they have.
    """

    equation: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    precision: str
    backend: str
    output: str
    numbered: bool
    drop_zeros: bool

    def known(self) -> dict[str, Any]:
        """What JSON keeps of it."""
        return {**asdict(self), "dtype": dtype_name(self.dtype), "shapes": [list(s) for s in self.shapes]}

    @classmethod
    def of(cls, known: dict[str, Any]) -> Recipe:
        """From JSON; `ValueError`, `TypeError` or `KeyError` where it is none."""
        shapes = tuple(map(checked_shape, known["shapes"]))
        found = cls(**{**known, "dtype": dtype(known["dtype"]), "shapes": shapes})
        if fault := misfit(found):
            raise ValueError(fault)
        return found


def dtype(text: str) -> torch.dtype:
    """The dtype of a name; `KeyError` where there is none."""
    return _DTYPES[text]


# -- variants ---------------------------------------------------------------------------------------------------------
def of_variant(variant: Variant) -> dict[str, Any]:
    """A variant as JSON has it."""
    return {
        "parts": [_of_part(p) for p in variant.parts],
        "ordered": list(variant.ordered),
        "wide": list(variant.wide),
        "fused": variant.fused,
        "reads_zeros": variant.reads_zeros,
        "digest": digest(variant),
    }


def digest(variant: Variant) -> str:
    """What tells programs apart: all of their fields, since a program's own `repr` names it and no more."""
    every = [[(f.name, getattr(p, f.name)) for f in fields(p)] for p in variant.programs]
    return hashlib.sha256(repr(every).encode()).hexdigest()


def variant(known: dict[str, Any], compiler: Compiler) -> Variant:
    """A variant from JSON, lowered again.

    Raises:
        ValueError: the programs are not those that chunks were packed for.
        SparsetcError: the parts do not fit the einsum.
    """
    parts, fused = tuple(map(_part, known["parts"])), bool(known["fused"])
    verify(Plan("stream", parts, fused))
    if any(fault := p.storage.misdealt(len(compiler.canonical.letters)) for p in parts):
        raise ValueError(fault)
    ordered, wide = tuple(map(bool, known["ordered"])), tuple(map(bool, known["wide"]))
    programs = compiler.lowered(parts, ordered, wide)
    found = Variant(parts, ordered, wide, programs, fused, bool(known["reads_zeros"]))
    if digest(found) != known["digest"]:
        raise ValueError("programs")
    return found


def _of_part(part: Part) -> dict[str, Any]:
    schedule = {f.name: getattr(part.schedule, f.name) for f in fields(Schedule) if f.name != "ruled"}
    schedule["tree"] = None if part.schedule.tree is None else str(part.schedule.tree)
    return {"format": part.format, "storage": asdict(part.storage), "schedule": schedule}


def _part(known: dict[str, Any]) -> Part:
    storage = {key: _tuples(value) for key, value in dict(known["storage"]).items()}
    schedule = {key: _tuples(value) for key, value in dict(known["schedule"]).items()}
    tree: Tree | None = None if schedule["tree"] is None else parse_tree(schedule["tree"])
    return Part(str(known["format"]), Storage(**storage), Schedule(**{**schedule, "tree": tree}))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# -- chunks -----------------------------------------------------------------------------------------------------------
def of_chunk(chunk: Chunk) -> list[Any]:
    """A chunk as JSON has it."""
    parts = [[[_of_place(p) for p in own.index], _of_place(own.values), own.items, own.stored] for own in chunk.parts]
    return [chunk.nnz, chunk.nbytes, chunk.first, chunk.rows, chunk.variant, parts]


def chunk(known: list[Any], variants: Sequence[Variant], compiler: Compiler) -> Chunk:
    """A chunk from JSON; `ValueError` where its arrays are not those of its programs."""
    nnz, nbytes, first, own, number, parts = known
    places = (PartPlaces(tuple(map(_place, i)), _place(v), items, n) for i, v, items, n in parts)
    found = Chunk(nnz, nbytes, first, own, number, tuple(places))
    if fault := misfit(found) or next(filter(None, map(misfit, found.parts)), ""):
        raise ValueError(fault)
    if not 0 <= found.variant < len(variants):
        raise ValueError("a chunk's programs are not there")
    if not all(map(partial(_read_by, compiler), variants[found.variant].programs, found.parts)):
        raise ValueError("a chunk's arrays are not those that its programs read")
    empty = [(PartArrays(tuple(map(_empty, p.index)), p.items, p.stored), _empty(p.values)) for p in found.parts]
    if len(empty) != len(variants[found.variant].programs) or placed(empty) != (found.parts, found.nbytes):
        raise ValueError("a chunk's arrays do not lie one after the other")
    return found


def _read_by(compiler: Compiler, program: TileProgram, part: PartPlaces) -> bool:
    """Whether a part has the arrays that its program reads: as many, of those types, with one dimension each."""
    on_cpu = compiler.backend == "torch"
    words = {torch.int32, torch.int64} | (set() if on_cpu else {torch.uint8, torch.int16, torch.uint16})
    bits = {WORDS[program.view.values.word]}
    kinds = [bits if name == "bits" else words for name in program.arrays if name not in program.view.packed]
    return (
        len(kinds) == len(part.index)
        and all(p.dtype in own and len(p.shape) == 1 for p, own in zip(part.index, kinds, strict=True))
        and part.values.dtype == stored_dtype(program, compiler.dtype, compiler.backend)
        and part.values.shape == (part.stored,)
        and part.items >= 0
    )


def _empty(place: ArrayPlace) -> torch.Tensor:
    return torch.empty(place.shape, dtype=place.dtype, device="meta")


def _of_place(place: ArrayPlace) -> list[Any]:
    return [dtype_name(place.dtype), list(place.shape), place.offset]


def _place(known: list[Any]) -> ArrayPlace:
    of, shape, offset = known
    found = ArrayPlace(dtype(of), checked_shape(shape), offset)
    if prod(found.shape) > 1 << 59:
        raise ValueError("an array of more bytes than there are")
    return found


# -- files ------------------------------------------------------------------------------------------------------------
def finish(writer: ChunkWriter, recipe: Recipe, compiler: Compiler, made: StreamCut) -> None:
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
            "variants": list(map(of_variant, made.variants)),
            "chunks": list(map(of_chunk, made.chunks)),
            "rows": made.rows,
            "blobs": [b.known() for b in writer.blobs],
        }
    )


def cut_of(file: ChunkFile, compiler: Compiler) -> StreamCut:
    """Return the chunks of a file; raises `IOFormatError` for what does not fit together.

    The bytes of a chunk are checked when they are first read: programs read nothing outside what is there.
    """
    known = file.description
    try:
        variants = tuple(variant(v, compiler) for v in known["variants"])
        rows = known["rows"]
        chunks = tuple(chunk(c, variants, compiler) for c in known["chunks"])
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
    made = StreamCut(chunks, variants, rows, coords)
    file.check = lambda number, buffer: _check(made, compiler, number, buffer)
    return made


def _check(made: StreamCut, compiler: Compiler, number: int, buffer: torch.Tensor) -> None:
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
        if key.kind == "row":  # of coordinates, which were looked at
            continue
        count = counts(view, named, own.items, own.stored)[view.positions[key.level]]
        if key.kind == "slot":
            sides = prod(view.values.sides[program.letters.index(letter)] for letter in key.letters)
            slot, least = named[key.array], -1 if key.letters else 0
            require(slot.numel() == count * sides, f"{key.array} has {slot.numel()} rows, expected {count * sides}")
            require(bool(((slot >= least) & (slot < chunk.rows)).all()), f"{key.array} has a row outside the result")
        else:
            require(count <= chunk.rows, f"{count} rows are added to {chunk.rows}")
