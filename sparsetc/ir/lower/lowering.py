"""What all lowerings share: the program around a body; and what those of one sparse operand do: operands and keys.

In: a `View`, a `Schedule` and a `Target`; of one sparse operand, a `Bound` einsum. Out: a verified `TileProgram`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import prod

from sparsetc.errors import PlanError
from sparsetc.ir.einsum import Bound
from sparsetc.ir.lower.contract import DataFlow
from sparsetc.ir.lower.place import place
from sparsetc.ir.nest.axes import ITEM, LEVELS, Turns
from sparsetc.ir.operands import dense_axes, named_operands, printed_sizes
from sparsetc.ir.plan import Schedule
from sparsetc.ir.tile import Add, Decode, DenseAxis, Key, Loop, Operand, Position, Row, Slot, Tile, TileProgram
from sparsetc.ir.tile_checks import verify
from sparsetc.ir.view import View


@dataclass(frozen=True)
class Target:
    """Where results go: rows of a dense output, slots of a sparse one, or the nonzeros' own positions."""

    sparse: bool = False
    in_operand_order: bool = False
    """Whether the part keeps the operand's own order, so that a nonzero's position is its slot."""
    owned: bool = False
    """Whether no two items add to one row, so that results may be stored."""
    rows: int = 1
    """Rows of the output."""
    index64: bool = False
    """Whether positions of the stored nonzeros need 64 bits."""


class Lowering(ABC):
    """One part's program in the making: a subclass names its axes and letters, and says what is computed."""

    equation: str
    letters: tuple[str, ...]
    """Letters of the sparse operand, or the axes of a pair of tiles."""
    dense: tuple[DenseAxis, ...] = ()
    """Axes that only dense operands have."""
    positions: tuple[DenseAxis, ...] = ()
    """Axes along a stored tile."""
    operands: tuple[Operand, ...] = ()
    terms: tuple[tuple[str, ...], ...] = ()
    turns: tuple[Turns, ...] = ()
    """The sides of a tile whose positions are taken in turn, outermost first."""
    output: str
    output_axes: tuple[str, ...]
    key: Key
    """Where results go."""

    def __init__(self, view: View, schedule: Schedule, target: Target) -> None:
        self.view, self.schedule, self.target = view, schedule, target

    @abstractmethod
    def contract(self, flow: DataFlow) -> Tile:
        """Appends what is computed, and gives what is to be added to the output."""

    def program(self, number: int, format: str) -> TileProgram:
        """The verified program."""
        flow = DataFlow([a.letter for a in self.dense], self.letters)
        total = self.contract(flow)
        # Results may be stored where rows have one owner, and no summed axis is split over the grid.
        owned = self.target.owned and all(a.programs == 1 or a.letter in self.output_axes for a in self.dense)
        statements = (*flow.statements, Add(total, self.key, self.output_axes, owned))
        made = TileProgram(
            equation=self.equation,
            number=number,
            format=format,
            view=self.view,
            letters=self.letters,
            axes=(*self.dense, *self.positions),
            operands=self.operands,
            output=self.output,
            output_axes=self.output_axes,
            body=place(statements, [Loop(axis) for axis in (*self.view.loops, *self.turns)]),
            unroll=self.schedule.unroll,
            masked_unroll=self.schedule.masked_unroll,
            warps=self.schedule.warps,
            stages=self.schedule.stages,
            precision=self.schedule.precision,
            slot=self.key.array if isinstance(self.key, Slot) else "",
            rows=self.target.rows,
            index64=self.target.index64,
            terms=self.terms,
        )
        verify(made)
        return made


class DenseLowering(Lowering):
    """A lowering of one sparse operand and dense ones."""

    def __init__(self, bound: Bound, view: View, schedule: Schedule, target: Target) -> None:
        """Raises `PlanError` where the view is not of the sparse operand's order, or a letter repeats."""
        super().__init__(view, schedule, target)
        e = bound.einsum
        (sparse,) = e.sparse
        self.equation, self.letters = str(e), e.inputs[sparse]
        if len(self.letters) != view.order or len(set(self.letters)) != view.order:
            raise PlanError(f"a view of order {view.order} cannot serve the sparse operand {''.join(self.letters)!r}")
        sizes = self.sizes = printed_sizes(bound)
        each = ((c, schedule.pieces_of(c)) for c in dense_axes(bound))
        self.dense = tuple(DenseAxis(c, sizes[c], sum(own) or schedule.block(c), pieces=own) for c, own in each)
        self.output, self.operands = named_operands(bound)
        self.output_axes = tuple(c for c in e.output if c not in self.letters)
        self.kept = tuple(c for c in e.output if c in self.letters)
        self.level = {self.letters[c.mode]: level for level, own in enumerate(view.levels) for c in own}
        self.key = self._key(sizes)

    def _key(self, sizes: dict[str, int]) -> Key:
        """Where results go: known where all letters are that the output keeps."""
        level = self.depth(self.kept)
        if not self.target.sparse:  # the row-major index of the kept letters
            return Row(tuple((c, prod(sizes[d] for d in self.kept[n + 1 :])) for n, c in enumerate(self.kept)), level)
        if self.target.in_operand_order and not self.view.sides and len(self.kept) == len(self.letters):
            return Position()
        return Slot(f"{LEVELS[level]}_slot", level, self.kept if self.view.sides else ())

    def depth(self, letters: tuple[str, ...]) -> int:
        """The level at which the coordinates of all these letters are known."""
        return max((self.level[c] for c in letters), default=ITEM)

    def decodes(self, level: int) -> list[Decode]:
        """What reads the coordinates of one level that are wanted; along the sides of a tile, once the tile's are."""
        view, read, found = self.view, self.view.coordinates, []
        for mode in (c.mode for c in view.levels[level] if self.letters[c.mode] in self._wanted):
            letter = self.letters[mode]
            if not read[mode].sides:
                found.append(Decode(letter, read[mode], level, tile=bool(view.sides)))
            if view.sides and letter in self._addressed:
                size = self.sizes[letter]
                found.append(Decode(letter, view.along[mode], level, end=0 if view.within(mode, size) else size))
        return found

    @cached_property
    def _addressed(self) -> set[str]:
        """Letters whose coordinates an operand or the key reads."""
        kept = self.kept if isinstance(self.key, Row) else ()
        return {c for o in self.operands for c in o.rows} | set(kept)

    @cached_property
    def _wanted(self) -> set[str]:
        """Letters whose coordinates are addressed, or read by another coordinate that is."""
        wanted = set(self._addressed)
        for mode, coordinate in reversed(self.view.coordinates.items()):
            if self.letters[mode] in wanted:
                wanted |= {self.letters[m] for m in coordinate.modes}
        return wanted
