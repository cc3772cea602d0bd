"""What the tests of tile programs over a task list share: random tiles of two operands, a list of pairs, the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from sparsetc.codegen.split_float16 import SplitOperands, TilePositions, split
from sparsetc.ir.lower import Fold, Target, lower_pairs
from sparsetc.ir.nest.values import Values
from sparsetc.ir.plan import F16X3, Schedule
from sparsetc.ir.program.tile import TileProgram
from sparsetc.packing.words import packed_bits

ONE_MODE: tuple[Fold, Fold, Fold] = ((("i", 8), ("j", 4)), (("l", 16),), (("k", 16),))
RAGGED: tuple[Fold, Fold, Fold] = ((("i", 4),), (("l", 8), ("m", 4)), (("j", 2), ("k", 2)))
NOTHING_FREE: tuple[Fold, Fold, Fold] = ((), (), (("i", 32),))
OUTER: tuple[Fold, Fold, Fold] = ((("b", 1), ("i", 16)), (("l", 2),), ())
FOLDS = {"one-mode": ONE_MODE, "ragged": RAGGED, "nothing-free": NOTHING_FREE, "outer": OUTER}


@dataclass(frozen=True)
class DrawnTiles:
    """A program over a task list, and what it is run on."""

    folds: tuple[Fold, Fold, Fold]
    dot: bool = True
    bitmap: bool = False
    mixed: bool = False
    """Only the second operand's tiles are bitmaps, if any are."""
    dtype: torch.dtype = torch.float64
    tiles: tuple[int, int] = (3, 4)
    pairs: tuple[int, ...] = (2, 0, 3)
    """Pairs of each item."""
    density: float = 0.5
    index64: bool = False
    whole: bool = False
    """Lowered for torch."""
    seed: int = 0
    halves: bool = False
    """Tiles are stored in halves; those of an item are then of one row of tiles."""
    given: tuple[torch.Tensor, torch.Tensor] | None = None
    """Operands of one's own, (tiles, free, inner)."""

    @property
    def program(self) -> TileProgram:
        schedule = Schedule(dot=self.dot, precision=F16X3 if self.halves else "ieee")
        target = Target(rows=len(self.pairs), index64=self.index64, at_once=self.whole)
        bitmaps = (self.bitmap and not self.mixed, self.bitmap)
        return lower_pairs("x,y->z", self.folds, schedule, target, bitmaps=bitmaps)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(tiles, free, inner) of both, small whole numbers, many of them 0."""
        if self.given is not None:
            return self.given
        g = torch.Generator().manual_seed(self.seed)
        made = []
        for count, tiles in zip(self.tiles, self.program.view.pairs, strict=True):
            values = torch.randint(1, 5, (count, *tiles.sides), generator=g)
            made.append((values * (torch.rand(values.shape, generator=g) < self.density)).to(self.dtype))
        return made[0], made[1]

    def task_list(self) -> list[torch.Tensor]:
        """``pair_ptr``, ``pair_x``, ``pair_y``."""
        g = torch.Generator().manual_seed(self.seed + 1)
        ptr = torch.tensor([0, *self.pairs]).cumsum(0)
        numbers = [torch.randint(0, n, (sum(self.pairs),), generator=g).int() for n in self.tiles]
        if self.halves:
            owner = torch.repeat_interleave(torch.arange(len(self.pairs)), torch.diff(ptr)).int()
            numbers = [_in_line(n, owner, tiles) for n, tiles in zip(numbers, self.tiles, strict=True)]
        return [ptr, *numbers]

    def split(self) -> SplitOperands:
        """The operands in halves; tile n is in row n % 2 of tiles, or there is one row."""
        values, places = [], []
        for x in self.operands():
            at = torch.nonzero(x.flatten()).flatten()
            values.append(x.flatten()[at])
            places.append(
                TilePositions(at, torch.arange(x.shape[0]).int() % _lines(x.shape[0]), _lines(len(x)), *x.shape[1:])
            )
        return split(values, places)

    def arrays(self) -> list[torch.Tensor]:
        """All arrays, in the order of the program's."""
        if self.halves:
            items = [torch.arange(len(self.pairs)).int() % _lines(n) for n in self.tiles]
            return [*self.task_list(), *items, *(a for operand in self.split().arrays for a in operand)]
        stored = zip(self.operands(), self.program.view.pairs, strict=True)
        return [*self.task_list(), *(a for values, tiles in stored for a in stored_as(values, tiles))]

    def expected(self) -> torch.Tensor:
        """(items, rows, columns): what each item's block is, in the type of the operands."""
        x, y = self.operands()
        ptr, pair_x, pair_y = self.task_list()
        each = torch.einsum("nik,njk->nij", x[pair_x.long()].double(), y[pair_y.long()].double())
        owner = torch.repeat_interleave(torch.arange(len(self.pairs)), torch.diff(ptr))
        return torch.zeros((len(self.pairs), *each.shape[1:]), dtype=torch.float64).index_add_(0, owner, each)


def _lines(tiles: int) -> int:
    """Rows of tiles."""
    return min(2, tiles)


def _in_line(numbers: torch.Tensor, owner: torch.Tensor, tiles: int) -> torch.Tensor:
    """Tiles near those given that are in the row of their items."""
    lines = _lines(tiles)
    found = numbers - numbers % lines + owner % lines
    return torch.where(found < tiles, found, found - lines)


def stored_as(values: torch.Tensor, tiles: Values) -> Sequence[torch.Tensor]:
    """The arrays that tiles are read from."""
    if not tiles.bitmap:
        return [values.contiguous()]
    flat = values.reshape(values.shape[0], -1)
    tile, place = torch.nonzero(flat, as_tuple=True)
    starts = torch.searchsorted(tile, torch.arange(values.shape[0]))
    return [starts.int(), packed_bits(tile, place, values.shape[0], tiles.volume, tiles.word), flat[tile, place]]


@st.composite
def spread_tiles(draw: st.DrawFn, most: int = 1 << 11) -> DrawnTiles:
    """Tiles in halves, of values that differ as much as a row's may, in rows that differ by much more."""
    case = draw(drawn_tiles((torch.float32,), most))
    case = replace(case, dot=True, bitmap=False, halves=True, whole=False)
    spread, seed = draw(st.sampled_from([0, 4, 20, 27])), draw(st.integers(0, 1000))
    stored = zip(case.tiles, case.program.view.pairs, strict=True)
    made = [spread_values(tiles.sides, n, spread, case.density, seed) for n, tiles in stored]
    return replace(case, given=(made[0], made[1]))


def spread_values(sides: tuple[int, ...], tiles: int, spread: int, density: float, seed: int) -> torch.Tensor:
    """(tiles, free, inner) float32 of random digits, their exponents up to `spread` apart in a row, 96 between rows."""
    g = torch.Generator().manual_seed(seed)
    digits = 1 + torch.rand((tiles, *sides), generator=g)
    digits *= 1 - 2 * torch.randint(0, 2, digits.shape, generator=g)
    within = torch.randint(-spread, 1, digits.shape, generator=g)
    rows = torch.randint(-48, 49, (_lines(tiles), sides[0], 1), generator=g)[torch.arange(tiles) % _lines(tiles)]
    kept = torch.rand(digits.shape, generator=g) < density
    return torch.ldexp(digits, within + rows) * kept


def error(found: torch.Tensor, case: DrawnTiles) -> float:
    """The greatest error of an entry over the sum of absolute products it is made of, where float32 has it in full.

    Smaller sums are compared with the smallest normal number, below which float32 has fewer bits.
    """
    x, y = case.operands()
    size = replace(case, given=(x.abs(), y.abs())).expected()
    off = (found.view_as(size).double() - case.expected()).abs()
    assert bool((off[size == 0] == 0).all())
    return float((off / size.clamp(min=torch.finfo(torch.float32).tiny)).max()) if off.numel() else 0.0


@st.composite
def drawn_tiles(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], most: int = 1 << 12) -> DrawnTiles:
    """Up to three letters an axis with sides of 1 to 32, both storages, runs of pairs of any length."""
    letters = iter("ijklmnopq")
    room = most
    folds: list[Fold] = []
    for _ in range(3):
        fold = []
        for _ in range(draw(st.integers(0, 3))):
            side = draw(st.sampled_from([s for s in (1, 2, 4, 8, 16, 32) if s <= room]))
            room //= side
            fold.append((next(letters), side))
        folds.append(tuple(fold))
    dtype = draw(st.sampled_from(dtypes))
    dot = dtype.is_floating_point and draw(st.integers(0, 3)) > 0
    return DrawnTiles(
        (folds[0], folds[1], folds[2]),
        dot,
        draw(st.booleans()),
        draw(st.booleans()),
        dtype,
        (draw(st.integers(1, 4)), draw(st.integers(1, 4))),
        tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))),
        draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )
