"""What the tests of tile programs over a task list share: random tiles of two operands, a list of pairs, the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from sparsetc.formats.bits import packed_bits
from sparsetc.ir.lower_pairs import Fold, lower_pairs
from sparsetc.ir.operands import MIN_DOT, Target
from sparsetc.ir.plan import Schedule
from sparsetc.ir.tile import TileProgram
from sparsetc.ir.view import Tiles

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
    wide: bool = False
    least: int = MIN_DOT
    seed: int = 0

    @property
    def program(self) -> TileProgram:
        schedule, target = Schedule(dot=self.dot), Target(rows=len(self.pairs), wide=self.wide)
        bitmaps = (self.bitmap and not self.mixed, self.bitmap)
        return lower_pairs("x,y->z", self.folds, schedule, target, bitmaps=bitmaps, least=self.least)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(tiles, free, inner) of both, small whole numbers, many of them 0."""
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
        return [ptr, *numbers]

    def arrays(self) -> list[torch.Tensor]:
        """All arrays, in the order of the program's."""
        stored = zip(self.operands(), self.program.view.pairs, strict=True)
        return [*self.task_list(), *(a for values, tiles in stored for a in stored_as(values, tiles))]

    def expected(self) -> torch.Tensor:
        """(items, rows, columns): what each item's block is, in the type of the operands."""
        x, y = self.operands()
        ptr, pair_x, pair_y = self.task_list()
        each = torch.einsum("nik,njk->nij", x[pair_x.long()].double(), y[pair_y.long()].double())
        owner = torch.repeat_interleave(torch.arange(len(self.pairs)), torch.diff(ptr))
        return torch.zeros((len(self.pairs), *each.shape[1:]), dtype=torch.float64).index_add_(0, owner, each)


def stored_as(values: torch.Tensor, tiles: Tiles) -> Sequence[torch.Tensor]:
    """The arrays that tiles are read from."""
    if not tiles.bitmap:
        return [values.contiguous()]
    flat = values.reshape(values.shape[0], -1)
    tile, place = torch.nonzero(flat, as_tuple=True)
    starts = torch.searchsorted(tile, torch.arange(values.shape[0]))
    return [starts.int(), packed_bits(tile, place, values.shape[0], tiles.volume, tiles.word), flat[tile, place]]


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
        draw(st.sampled_from([1, MIN_DOT])),
        draw(st.integers(0, 1000)),
    )
