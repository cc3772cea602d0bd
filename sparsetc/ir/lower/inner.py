"""The einsum of one work item: stored values and dense operands over the axes of a view.

In: a `Bound` einsum with one sparse operand and the `Nest` of a packed part, or whatever else says what is multiplied;
a `Target`. Out: `Inner`, over which a tree is chosen, checked and lowered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from sparsetc.errors import PlanError
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.nest import ITEM, LEAF, LEVELS, Nest
from sparsetc.ir.program import Key, Operand, named_operands, printed_sizes
from sparsetc.support import Ints, Letters, NamedInts, Names, among, cached_property, row_major

X = "X"
"""The name of stored values in a tree."""


@dataclass(frozen=True)
class Target:
    """The purpose of a program: where its results go (rows of an output, slots, or nonzeros), and limits.

    Attributes:
        in_operand_order: whether the part keeps the operand's own order, so that a nonzero's position is its slot.
        owned: whether no two items add to one row, so that results may be stored.
        rows: rows of the output.
        index64: whether positions of the stored nonzeros need 64 bits.
        whole: whether torch is to run it, which takes all rows of a level at once, and whole axes.
        ones: whether every value is 1, at every call, so that none is read.
        strides: of the rows of a dense output, and of its dense axes, where it does not lie as (rows, axes).
    """

    sparse: bool = False
    in_operand_order: bool = False
    owned: bool = False
    rows: int = 1
    index64: bool = False
    whole: bool = False
    ones: bool = False
    strides: Ints = ()


@dataclass(frozen=True, eq=False)
class Inner:
    """The computation of one work item: factors by name, their letters, and the letters that the result keeps.

    Attributes:
        letters: letters of the sparse operand, by mode; of pairs of tiles, the axes of a pair.
        stored: the letters of each factor of stored values.
        sides: positions along a tile's sides, by letter; empty without tiles. Letters that ride along others have none.
        key: where results go.
        dense: letters that only dense operands have, in the order in which tiles have them.
        kept: letters of the sparse operand that the output has.
        folds: the letters, with their positions, of an axis along a tile that stands for several.
    """

    equation: str
    view: Nest
    target: Target
    letters: Names
    stored: Mapping[str, Names]
    sides: Mapping[str, int]
    key: Key
    output: str
    output_axes: Names
    operands: tuple[Operand, ...] = ()
    dense: Names = ()
    kept: Names = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    folds: Mapping[str, NamedInts] = field(default_factory=dict)

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, bound: Bound, view: Nest, target: Target) -> Inner:
        """An einsum with one sparse operand; `PlanError` where the view is not of its order, or a letter repeats."""
        e = bound.einsum
        (sparse,) = e.sparse
        letters, sizes = e.inputs[sparse], printed_sizes(bound)
        if not len(letters) == len({*letters}) == len(view.mode_levels):
            raise PlanError(f"a view of order {view.order} cannot serve the sparse operand {''.join(letters)!r}")
        output, operands = named_operands(bound, as_given=not target.whole)
        return cls(
            equation=str(e),
            view=view,
            target=target,
            letters=letters,
            stored={X: letters},
            sides={letters[mode]: n for mode, n in enumerate(view.values.sides) if mode in view.sided},
            key=_key(letters, e.kept, view, target, sizes),
            output=output,
            output_axes=e.free,
            operands=operands,
            dense=e.axes,
            kept=e.kept,
            sizes=sizes,
        )

    def may_omit_ones(self, factors: Letters) -> bool:
        """True if a tree of these factors needs no 1s of a pattern: another factor marks the lanes with a value."""
        return not self.view.values.held and any(self.levels[name] == LEAF for name in factors)

    @cached_property
    def operand(self) -> dict[str, Operand]:
        """The dense operands by name."""
        return {o.name: o for o in self.operands}

    def depth(self, letters: Names) -> int:
        """Return the level at which the coordinates of all these letters are known."""
        return max([self.view.mode_levels[self.letters.index(c)] for c in letters], default=ITEM)

    def along(self, letters: Names) -> Names:
        """Return the sides of a tile along which the coordinates of these letters vary, once each."""
        return among(self.view.read_along(self.letters, letters), self.sides) if self.sides else ()

    @cached_property
    def levels(self) -> dict[str, int]:
        """The level at which each factor is read."""
        return dict.fromkeys(self.stored, LEAF) | {o.name: self.depth(o.rows) for o in self.operands}

    @cached_property
    def axes(self) -> dict[str, frozenset[str]]:
        """The axes on which each factor depends."""
        read: dict[str, Letters] = {name: self.sides.keys() & letters for name, letters in self.stored.items()}
        read |= {o.name: (*o.axes, *self.along(o.rows)) for o in self.operands}
        return {name: frozenset((*self.view.walked[level], *read[name])) for name, level in self.levels.items()}

    @cached_property
    def keyed(self) -> frozenset[str]:
        """The axes on which the result depends."""
        return frozenset((*self.view.walked[self.key.level], *self.output_axes, *self.along(self.kept)))

    @cached_property
    def summed(self) -> Names:
        """The dense axes that the output lacks."""
        return tuple([a for a in self.dense if a not in self.output_axes])


def _key(letters: Names, kept: Names, view: Nest, target: Target, sizes: Mapping[str, int]) -> Key:
    """Return the key of results; it is known at the level that has all letters of the output."""
    level = max([view.mode_levels[letters.index(c)] for c in kept], default=ITEM)
    if not target.sparse:  # the row-major index of the kept letters
        return Key("row", level, kept, tuple(row_major([sizes[c] for c in kept])))
    sides = {letters[mode] for mode in view.sided}
    if target.in_operand_order and not sides and len(kept) == len(letters):
        return Key("position", LEAF)
    along = among(view.read_along(letters, kept), sides)
    return Key("slot", level, along, array=f"{LEVELS[level]}_slot")
