"""What a file of packed chunks says of them, as JSON: the einsum, the parts of plans, and where every array lies.

In: a `Recipe` and a `Cut`. Out: dictionaries of numbers and texts; or the other way round, everything checked. Programs
are not stored: they are lowered again from the parts of plans, and compared with a digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any

import torch

from sparsetc.ir.contraction_tree import Tree, parse_tree
from sparsetc.ir.plan import Part, Plan, Schedule, Storage, verify
from sparsetc.streaming.compiler import Compiler, Variant
from sparsetc.streaming.layout import Chunk, PartPlaces, Place
from sparsetc.tensor.inputs import DTYPES

_DTYPES = {str(d).removeprefix("torch."): d for d in (*DTYPES, torch.uint8, torch.uint16, torch.uint32, torch.uint64)}


@dataclass(frozen=True)
class Recipe:
    """What is streamed, and how: all that chunks and programs depend on beside the nonzeros."""

    equation: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of all operands, the streamed one first."""
    dtype: torch.dtype
    precision: str
    backend: str
    output: str
    """The form of the result that was asked for."""
    numbered: bool
    """Whether chunks number the rows of the result that they have."""
    drop_zeros: bool

    def known(self) -> dict[str, Any]:
        """What JSON keeps of it."""
        return {**asdict(self), "dtype": name(self.dtype), "shapes": [list(s) for s in self.shapes]}

    @classmethod
    def of(cls, known: dict[str, Any]) -> Recipe:
        """From JSON; `ValueError` where it is none."""
        found = dict(known) | {"dtype": dtype(known["dtype"]), "shapes": tuple(map(tuple, known["shapes"]))}
        wanted = {f.name for f in fields(cls)}
        if set(found) != wanted or not isinstance(found["equation"], str):
            raise ValueError("no recipe")
        if not all(isinstance(n, int) and n >= 0 for s in found["shapes"] for n in s):
            raise ValueError("sizes that are none")
        return cls(**found)


def name(dtype: torch.dtype) -> str:
    """A dtype's name."""
    return str(dtype).removeprefix("torch.")


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
    storage = {key: _tuples(value) for key, value in known["storage"].items()}
    schedule = {key: _tuples(value) for key, value in known["schedule"].items()}
    tree: Tree | None = None if schedule["tree"] is None else parse_tree(schedule["tree"])
    return Part(str(known["format"]), Storage(**storage), Schedule(**{**schedule, "tree": tree}))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# -- chunks -----------------------------------------------------------------------------------------------------------
def of_chunk(chunk: Chunk) -> list[Any]:
    """A chunk as JSON has it."""
    parts = [[[_of_place(p) for p in own.index], _of_place(own.values), own.items, own.stored] for own in chunk.parts]
    return [chunk.nnz, chunk.nbytes, chunk.first, chunk.rows, chunk.variant, parts]


def chunk(known: list[Any], variants: int, rows: int) -> Chunk:
    """A chunk from JSON; `ValueError` where its arrays lie outside it, or its rows outside the result."""
    nnz, nbytes, first, own, number, parts = known
    found = tuple(PartPlaces(tuple(map(_place, i)), _place(v), int(items), int(n)) for i, v, items, n in parts)
    places = [p for part in found for p in (*part.index, part.values)]
    if not 0 <= number < variants or any(not 0 <= p.offset <= p.end <= nbytes for p in places):
        raise ValueError("a chunk's arrays lie outside it")
    if not 0 <= first <= first + own <= rows:
        raise ValueError("a chunk's rows lie outside the result")
    return Chunk(int(nnz), int(nbytes), int(first), int(own), int(number), found)


def _of_place(place: Place) -> list[Any]:
    return [name(place.dtype), list(place.shape), place.offset]


def _place(known: list[Any]) -> Place:
    of, shape, offset = known
    if any(not isinstance(n, int) or n < 0 for n in (*shape, offset)) or prod(shape) > 1 << 60:
        raise ValueError("an array of no size")
    return Place(dtype(of), tuple(shape), offset)
