"""A format whose coordinates are expressions that no constructor makes, for tests of every backend."""

from __future__ import annotations

from dataclasses import replace

import torch

import sparsetc as stc
from sparsetc.ir.nest.coordinates import Bits, Computed, Constant, Coordinate, Formula, Lookup, Position
from sparsetc.ir.nest.nest import Nest, runs
from sparsetc.packing.base import Packed, get_format
from sparsetc.packing.words import bits_of


class Diagonals:
    """A matrix whose rows are words read whole, and its columns ``(diagonals[word] + row) % columns``."""

    name = "diagonals"

    def view(self, shape: tuple[int, ...], storage: stc.plans.Storage) -> Nest:
        (row,), (column,) = storage.item, storage.leaf
        word = Bits(Lookup("word", Position("nonzero")), 0, bits_of(shape[column]), True)
        diagonal = Formula("+", Lookup("diagonals", word), Coordinate(row))
        item = (Computed(row, Lookup("item_word", Position("item"))),)
        return runs(item, (Computed(column, Formula("%", diagonal, Constant(shape[column]))),))

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: stc.plans.Storage) -> Packed:
        (row,), (column,) = storage.item, storage.leaf
        diagonals, number = torch.unique((coords[column] - coords[row]) % shape[column], return_inverse=True)
        ranked = coords.clone()
        ranked[column] = number
        packed = get_format("coo").pack(ranked, shape, storage)
        arrays = packed.arrays | {"diagonals": diagonals.to(torch.int32)}
        return replace(packed, format=self.name, view=self.view(shape, storage), arrays=arrays)


def check_einsums(backend: str) -> None:
    """Run einsums over a matrix of diagonals, stored by either mode, and compare with torch."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(30, 40, generator=generator) * (torch.rand(30, 40, generator=generator) < 0.2)
    x = stc.SparseTensor.from_dense(full)
    for equation, *sizes in (("ij,jr->ir", (40, 8)), ("ij,ir->jr", (30, 8)), ("ij,ir,jr->ij", (30, 8), (40, 8))):
        dense = [torch.randn(size, generator=generator) for size in sizes]
        expected = torch.einsum(equation, full, *dense)
        for row in (0, 1):
            storage = stc.plans.Storage(item=(row,), leaf=(1 - row,))
            plan = stc.plans.Plan(
                "mine", (stc.plans.Part("diagonals", storage, stc.plans.Schedule(blocks=(("r", 8),), lanes=4)),)
            )
            found = stc.einsum(equation, x, *dense, plan=plan, backend=backend)
            found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
