"""Sparse operands of ones that store no values: the tile program, the torch source, counts, and malformed views."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpret import run_program
from pattern_cases import CASES, expected, finished, kernel, without_values, zeros

from sparsetc.backends import TORCH
from sparsetc.codegen.programs import Programs
from sparsetc.errors import FormatError
from sparsetc.ir.nest.coordinates import Field, consecutive
from sparsetc.ir.nest.nest import Nest, runs, tiles
from sparsetc.ir.nest.values import Ones
from sparsetc.ir.program.cost import cost_of
from sparsetc.ir.program.resources import STORED
from sparsetc.ir.program.tile import Value, walk


@pytest.mark.parametrize("lanes", [1, 4, 32])
@pytest.mark.parametrize("name", CASES)
def test_a_tile_program_needs_no_values(name: str, lanes: int) -> None:
    k, dense = kernel(name, lanes)
    out = zeros(k, torch.float64)
    for part in without_values(k):
        assert "values" not in part.program.arrays
        arrays = part.packed.arrays | part.arrays.named(part.program)
        like = torch.zeros(1, dtype=torch.float64)
        tables = k.step.tables(dense)
        run_program(part.program, arrays, like, tables, out, part.packed.items, part.packed.stored)
    torch.testing.assert_close(finished(k, out), expected(k, dense))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_torch_programs_need_no_values(name: str, dtype: torch.dtype) -> None:
    k, dense = kernel(name, 1, dtype)
    parts = without_values(k)
    made, folder = [p.program for p in parts], k.contraction.settings.cache_dir
    programs = Programs(made, dtype, TORCH, torch.device("cpu"), folder, name="pattern")
    assert "values[" not in programs.source
    assert "sparse, of ones" in programs.source
    for _ in range(2):
        out = zeros(k, dtype)
        programs.bind([p.arrays for p in parts])([None] * len(parts), k.step.tables(dense), out)
        torch.testing.assert_close(finished(k, out), expected(k, dense), check_dtype=False)


def test_ones_are_multiplied_in_only_where_nothing_else_is_of_the_nonzero() -> None:
    def ones(name: str) -> int:
        (part,) = without_values(kernel(name, 4)[0])
        return sum(isinstance(s, Value) for s, _ in walk(part.program.body))

    assert [ones(n) for n in ("neighbours", "MTTKRP", "MTTKRP of fibers", "sampled")] == [0, 0, 0, 0]
    assert [ones(n) for n in ("degrees", "how many", "of the row alone", "of the fiber alone", "scaled")] == [1] * 5


def test_values_that_are_not_stored_are_not_streamed() -> None:
    k, _ = kernel("neighbours", 4)
    (part,) = without_values(k)
    stored = cost_of(k.step.parts[0].program)
    assert stored.stream == cost_of(part.program).stream + STORED.bytes


WORD = Field(0, "word", 0, 8, True)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (runs((), (replace(WORD, frame=3),), chunk=8), "a power of two of positions"),
        (runs((replace(WORD, frame=4),)), "a frame is of a leaf mode"),
        (runs((), (consecutive(1, "shift", 0), WORD), chunk=8), "must be read before it"),
        (runs((WORD, consecutive(1, "shift", 0))), "read at the level of item, which has no nonzero"),
        (tiles((), (WORD,), Ones((4,), (0,))), "tiles store their values"),
    ],
)
def test_malformed_views_are_refused(view: Nest, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        view.verify()
