"""The contraction of one work item as data: a `Tree` of products, dots and sums, in the order they run.

In: names of factors and of axes. Out: a `Tree`, a field of a `Schedule`, which `ir.lower` obeys. The grammar, which is
also how a tree is printed and parsed::

    tree   ::= factor { * factor }
    factor ::= name                              # X, stored values; B, C, ..., dense operands; of pairs X and Y
             | dot[axis ...](tree, tree)         # a matrix product, which sums over these axes
             | sum[axis ...](tree)               # a sum over axes, from left to right
             | (tree)

An axis is a loop (``nonzero``, ``block``, ``tile``, ``pair``), ``lane``, what lies side by side in its steps, or a
letter: of a dense axis, or of the positions along a side of a tile. So ``sum[j tile](dot[k](C, X) * B)`` is a small
matrix product over k for each j, scaled by a row of B and added up over j and the tiles of an item.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sparsetc.errors import PlanError
from sparsetc.support import Letters, cached_property


@dataclass(frozen=True, repr=False)
class Tree:
    """A node: how a tensor is made of factors; a pickle has its text.

    Attributes:
        parts: the trees that it is made of: of a product one or more, of a dot its two sides, of a sum one.
        over: the axes that a dot or a sum sums over, a sum one after the other.
        name: of a factor: stored values, or a dense operand.
    """

    kind: Literal["factor", "product", "dot", "sum"]
    parts: tuple[Tree, ...] = ()
    over: tuple[str, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "factor":
                return self.name
            case "product":
                return " * ".join([f"({part})" if part.kind == "product" else str(part) for part in self.parts])
        return f"{self.kind}[{' '.join(self.over)}]({', '.join(map(str, self.parts))})"

    def __repr__(self) -> str:
        return f"parse_tree({str(self)!r})"

    @cached_property
    def nodes(self) -> tuple[Tree, ...]:
        """Return every node of the tree from left to right, each after its parts; the tree itself is last."""
        nodes, left = [], [self]
        while left:  # the last first
            nodes.append(node := left.pop())
            left += node.parts
        return tuple(reversed(nodes))

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """The names of its factors, from left to right."""
        return tuple([node.name for node in self.nodes if node.kind == "factor"])

    @cached_property
    def dots(self) -> tuple[Tree, ...]:
        """Return the matrix products of the tree, from left to right."""
        return tuple([node for node in self.nodes if node.kind == "dot"])


def factors(names: Iterable[str]) -> list[Tree]:
    """Stored values, or dense operands, by name."""
    return [Tree("factor", name=name) for name in names]


def product(trees: Iterable[Tree]) -> Tree:
    """The product of trees, position by position; one alone is itself."""
    factors = tuple(trees)
    return Tree("product", factors) if len(factors) != 1 else factors[0]


def dot(left: Tree, right: Tree, over: Iterable[str]) -> Tree:
    """The matrix product of two trees, summed over axes that both have."""
    return Tree("dot", (left, right), tuple(over))


def total(trees: Iterable[Tree], over: Iterable[str]) -> Tree:
    """Return the sum of a product over axes, added to those of a sum; the product itself without axes."""
    tree, axes = product(trees), tuple(over)
    if axes and tree.kind == "sum":
        return Tree("sum", tree.parts, (*tree.over, *axes))
    return Tree("sum", (tree,), axes) if axes else tree


def order_of_sums(over: Letters, looped: Letters, beside: Letters) -> list[tuple[list[str], list[str]]]:
    """Return (axes in registers, loops) that are summed together, one after the other.

    What lies in registers is summed before the loops that are named with it or behind it, and after those before it.
    """
    together: list[tuple[list[str], list[str]]] = [([], [])]
    for axis in over:
        if axis not in looped and together[-1][1]:
            together.append(([], []))
        registers, loops = together[-1]
        registers += [axis] if axis in beside else []
        loops += [axis] if axis in looped else []
    return together


def parse_tree(text: str) -> Tree:
    """Parse a tree. Raise `PlanError` if the text is not one.

    Examples:
        >>> stc.plans.parse_tree("sum[j k](X * B * C)").factors
        ('X', 'B', 'C')
    """
    if not isinstance(text, str):
        raise PlanError(f"a tree is parsed from text, found {type(text).__name__}")
    words = re.findall(r"\w+|\S", text)[::-1]  # the next one to be read is the last

    def tree() -> Tree:
        trees = [factor()]
        while taken("*"):
            trees.append(factor())
        return product(trees)

    def factor() -> Tree:
        if taken("("):
            return closed(tree())
        name = identifier("a factor")
        if not taken("["):
            return Tree("factor", name=name)
        axes = []
        while not taken("]"):
            axes.append(identifier("an axis or ']'"))
        expect("(")
        if name == "sum" and axes:
            return closed(Tree("sum", (tree(),), tuple(axes)))
        if name == "dot" and axes:
            left = tree()
            expect(",")
            return closed(dot(left, tree(), axes))
        raise PlanError(f"tree {text!r}: 'sum' and 'dot' have axes, one or more, found {name!r} with {len(axes)}")

    def closed(inside: Tree) -> Tree:
        expect(")")
        return inside

    def identifier(wanted: str) -> str:
        if not words or not words[-1].isidentifier():
            raise unexpected(wanted)
        return words.pop()

    def taken(word: str) -> bool:
        return words[-1:] == [word] and words.pop() == word

    def expect(word: str) -> None:
        if not taken(word):
            raise unexpected(repr(word))

    def unexpected(wanted: str) -> PlanError:
        return PlanError(f"tree {text!r}: expected {wanted}, found {repr(words[-1]) if words else 'the end'}")

    try:
        parsed = tree()
    except RecursionError:
        raise PlanError(f"tree {text[:40]!r}…: it is nested too deep") from None
    if words:
        raise unexpected("the end")
    return parsed
