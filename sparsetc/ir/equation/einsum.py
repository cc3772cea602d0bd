"""Level 1, WHAT is computed: an einsum with at least one sparse operand.

In: the parser's index names. Out: what every level below asks about the indices. Nothing here knows how an operand is
stored, what it holds or where it lives; a :class:`Bound` gives indices their sizes.

The grammar, as :meth:`Einsum.__str__` prints it::

    einsum  ::=  term ("," term)* "->" term
    term    ::=  index*                         # the empty term is a scalar
    index   ::=  "a" | ... | "z" | "A" | ... | "Z"

with these rules, which the parser checks::

    - every index of the output is an index of some operand, and stands in the output once;
    - an index may repeat inside an operand: only the diagonal takes part;
    - an index that no output has is summed;
    - at least one operand is sparse;
    - (Bound) every index has one size, >= 0; nothing broadcasts any more.

There is no ellipsis, no implicit output and no broadcasting at this level: the parser has spelled them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from string import ascii_letters
from typing import TypeVar

from sparsetc.support import Ints, Letters, NamedInts, Names, among, cached_property, outside

N = TypeVar("N")
T = TypeVar("T")


def distinct(indices: Letters) -> Names:
    """The indices without repeats, in order of first appearance."""
    return tuple(dict.fromkeys(indices))


def joined(things: Iterable[tuple[Iterable[N], T]]) -> list[tuple[set[N], list[T]]]:
    """Things in groups: any two that have a name in common, directly or through others, are together.

    Groups come in the order of their last thing, things of a group in the order in which they were joined.
    """
    groups: list[tuple[set[N], list[T]]] = []
    for names, thing in things:
        names_together: set[N] = set(names)
        apart, together = [], []
        for group in groups:
            if names_together.isdisjoint(group[0]):
                apart.append(group)
            else:
                names_together |= group[0]
                together += group[1]
        groups = [*apart, (names_together, [*together, thing])]
    return groups


def written(inputs: Iterable[Letters], output: Letters) -> str:
    """Return the equation of these indices."""
    return ",".join(map("".join, inputs)) + "->" + "".join(output)


@dataclass(frozen=True)
class Einsum:
    """``output[...] = sum over the other indices of the product of the operands``; see the grammar above.

    Attributes:
        inputs: the index names of each operand.
        output: the index names of the result.
        sparse: the positions of the sparse operands, ascending.
        text: what the user wrote, for messages and headers.
    """

    inputs: tuple[Names, ...]
    output: Names
    sparse: Ints
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return written(self.inputs, self.output)

    @cached_property
    def dense(self) -> Ints:
        """The positions of the dense operands, ascending."""
        return outside(range(len(self.inputs)), self.sparse)

    @cached_property
    def tables(self) -> tuple[Names, ...]:
        """The indices of each dense operand."""
        return tuple([self.inputs[p] for p in self.dense])

    @cached_property
    def indices(self) -> Names:
        """All indices in order of first appearance."""
        return distinct(i for term in self.inputs for i in term)

    @cached_property
    def sparse_indices(self) -> Names:
        """The indices of the sparse operands, in order of first appearance."""
        return distinct(i for p in self.sparse for i in self.inputs[p])

    @cached_property
    def kept(self) -> Names:
        """The sparse indices of the output, in its order."""
        return among(self.output, self.sparse_indices)

    @cached_property
    def free(self) -> Names:
        """The dense indices of the output, in its order."""
        return outside(self.output, self.sparse_indices)

    @cached_property
    def contracted(self) -> Names:
        """The indices that are summed, in order of first appearance."""
        return outside(self.indices, self.output)

    @property
    def plain_sum(self) -> bool:
        """True if one operand is summed and nothing else is done, which torch gives integers of 64 bits."""
        return len(self.inputs) == 1 and bool(self.contracted)

    @cached_property
    def has_gradients(self) -> bool:
        """True if gradients are einsums: of one sparse operand, where each letter is in two terms, once in each."""
        terms = *self.inputs, self.output
        counts = Counter(i for term in terms for i in {*term})
        return len(self.sparse) == 1 and min(counts.values(), default=0) > 1 and sum(map(len, terms)) == counts.total()

    @cached_property
    def dense_contracted(self) -> Names:
        """The dense indices that are summed."""
        return outside(self.contracted, self.sparse_indices)

    @cached_property
    def axes(self) -> Names:
        """The dense indices in the order of all tiles: an order in which no operand needs a copy, if there is one.

        Each index follows those before it in the output and in every operand. Where terms disagree, the indices of the
        output come first, then the summed.
        """
        left, ordered = [*self.free, *self.dense_contracted], list[str]()
        terms = self.free, *self.tables

        def follows(index: str) -> bool:
            return any({*term[: term.index(index)]} & {*left} for term in terms if index in term)

        while left:
            ordered.append(next((index for index in left if not follows(index)), left[0]))
            left.remove(ordered[-1])
        return tuple(ordered)

    @property
    def spare(self) -> Names:
        """The letters that are none of its indices."""
        return outside(ascii_letters, self.indices)

    def holders(self, index: str) -> Ints:
        """The positions of the operands that have ``index``."""
        return tuple([p for p, term in enumerate(self.inputs) if index in term])


@dataclass(frozen=True)
class Bound:
    """An einsum whose indices have sizes, in order of first appearance."""

    einsum: Einsum
    sizes: NamedInts

    @classmethod
    def of(cls, einsum: Einsum, sizes: dict[str, int]) -> Bound:
        """Bind the indices of ``einsum``; ``sizes`` may hold more indices than it has."""
        return cls(einsum, tuple((i, sizes[i]) for i in einsum.indices))

    @cached_property
    def by_index(self) -> dict[str, int]:
        """The sizes as a mapping; not to be written to."""
        return dict(self.sizes)

    def extents(self, indices: Letters) -> Ints:
        """The sizes of ``indices``, in their order."""
        return tuple(map(self.by_index.__getitem__, indices))

    def elements(self, indices: Letters) -> int:
        """The number of elements of a dense tensor with these indices."""
        return prod(self.extents(indices))

    def shape(self, position: int) -> Ints:
        """The full shape of an operand: a dense one that broadcasts is to be expanded to it."""
        return self.extents(self.einsum.inputs[position])

    @cached_property
    def dense_shapes(self) -> tuple[Ints, ...]:
        """The full shapes of the dense operands, in order."""
        return tuple(map(self.shape, self.einsum.dense))

    @cached_property
    def output_shape(self) -> Ints:
        """The shape of the result."""
        return self.extents(self.einsum.output)

    def __str__(self) -> str:
        sizes = " ".join(f"{i}={n}" for i, n in self.sizes)
        return f"{self.einsum}  {sizes}".rstrip()
