"""An einsum run as another one: the list of rules, and their composition.

In: a `Request`, an einsum and operands to compile it for. Out: the `Rewrite`s that lead to an einsum which is planned
and run as it is. A rule gives the einsum that another one becomes, how each of its operands follows from those before,
and how its result is put back. All of it is linear, so gradients go through its transposes, which autograd knows.

The order of `RULES` is a contract: what is one slice repeated is left out before anything is cut or made larger; blocks
become entries with dense modes; these are numbered, or become coordinates; then come products of dense operands alone,
with the values of entries among them; last, long entries are cut. In which order dimensions lie is no rule's: a plan's
price knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from torch import Tensor

from sparsetc.contraction import dense_modes
from sparsetc.contraction.dense import einsum
from sparsetc.contraction.request import Change, Operands, Patterns, Request, Rewrite, Take, Tensors, repeated_dims
from sparsetc.device.profile import profile_of
from sparsetc.ir.equation.einsum import Bound, Einsum, dense_products, distinct
from sparsetc.ir.plan import F16
from sparsetc.support import Ints, outside
from sparsetc.tensor.coords import picked
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor

STEP = 1 << 29
"""Fewest multiplications of dense operands that are worth a call of their own on a GPU: with 10^8 of them a kernel that
does all took half the time of call and kernel, with 3 * 10^9 four times it (one H200)."""


# -- rules ------------------------------------------------------------------------------------------------------------


def broadcast(r: Request) -> Rewrite | None:
    """Leave out the dimensions along which a dense operand is one slice repeated, where another has the letter."""
    e = r.bound.einsum
    if len(e.sparse) > 1 and not r.dense_modes:
        return None
    dropped = broadcast_dims(r.bound, r.operands, r.of_call)
    letters = distinct(e.inputs[p][n] for p, dims in dropped.items() for n in dims)
    if not letters:
        return None
    take, operands = r.as_it_is, list(r.operands)
    for p, dims in dropped.items():
        if dims:
            take[p] = (p,), partial(_one_slice, dims)
            operands[p] = _one_slice(dims, operands[p])  # type: ignore[arg-type]
    inner = replace(r, bound=without(r.bound, dropped), operands=operands)
    return Rewrite(
        f"broadcast along {', '.join(letters)}", inner, take, holds=partial(_still_repeats, tuple(dropped.values()))
    )


def broadcast_dims(bound: Bound, operands: Operands, repeated: bool) -> dict[int, Ints]:
    """Return dimensions that dense operands repeat and another operand has in full, by operand.

    Args:
        bound: the einsum as written.
        operands: its operands; a size of 1 broadcasts.
        repeated: whether a dimension that is one slice repeated is left out as one of size 1 is.
    """
    e = bound.einsum
    holders = {c: {p for p, term in enumerate(e.inputs) if c in term} for c in e.indices}
    dropped: dict[int, Ints] = {}
    for p in e.dense:
        operand, dims = operands[p], []
        alike = repeated_dims(operand) if repeated and isinstance(operand, Tensor) else ()
        for n, (letter, size) in enumerate(zip(e.inputs[p], operand.shape, strict=True)):
            one_slice = n in alike or size == 1 != bound.by_index[letter]
            if one_slice and e.inputs[p].count(letter) == 1 and len(holders[letter]) > 1:
                holders[letter].discard(p)
                dims.append(n)
        dropped[p] = tuple(dims)
    return dropped


def without(bound: Bound, dropped: dict[int, Ints]) -> Bound:
    """Return the einsum without these dimensions of dense operands."""
    e = bound.einsum
    inputs = tuple(
        [tuple([c for n, c in enumerate(term) if n not in dropped.get(p, ())]) for p, term in enumerate(e.inputs)]
    )
    return bound if inputs == e.inputs else Bound.of(Einsum(inputs, e.output, e.sparse, e.text), bound.by_index)


def _one_slice(dims: Ints, operand: Tensor) -> Tensor:
    for n in reversed(dims):
        operand = operand.select(n, 0)
    return operand


def _still_repeats(dropped: Sequence[Ints], dense: Tensors) -> bool:
    """Return True if each dense operand of a call repeats one slice along the dimensions that were dropped."""
    for operand, dims in zip(dense, dropped, strict=True):
        repeated = repeated_dims(operand) if dims else ()
        if any(operand.shape[n] != 1 and n not in repeated for n in dims):
            return False
    return True


def coordinates(r: Request) -> Rewrite | None:
    """Turn dense modes into coordinates; sort entries of one sparse operand, on the diagonal of repeated letters."""
    e = r.bound.einsum
    if len(e.sparse) > 1 and len(e.inputs) > 2:
        return None
    inputs = list(e.inputs)
    operands = list(r.operands)
    take = r.as_it_is
    for p, x in zip(e.sparse, r.sparse, strict=True):
        pattern, entries = x.pattern.expanded(tuple(x._values.shape[1:])), None
        if len(e.sparse) == 1:
            pattern, entries = pattern.distinct(inputs[p])
            inputs[p] = distinct(inputs[p])
        if pattern is not x.pattern:
            pattern = pattern.of_ones if x.pattern.ones else pattern
            operands[p] = SparseTensor._make(pattern, r.like.expand(pattern.nnz))
            take[p] = (p,), partial(_taking_part, entries)
    if take == r.as_it_is:
        return None
    bound = Bound(Einsum(tuple(inputs), e.output, e.sparse, e.text), r.bound.sizes)
    what = "dense modes as coordinates" if r.dense_modes else "entries in order"
    name = what if tuple(inputs) == e.inputs else f"{what}, on the diagonal"
    return Rewrite(name, replace(r, bound=bound, operands=operands), take)


def _taking_part(entries: Tensor | None, values: Tensor) -> Tensor:
    return picked(values.flatten(), entries)


def products(r: Request) -> Rewrite | None:
    """Multiply dense operands by one another, once, where kernels would do it for each nonzero; one product a time."""
    e = r.bound.einsum
    if len(e.sparse) > 1:
        return None
    (x,) = r.sparse
    least = 0 if x.device.type == "cpu" else STEP
    product = next(dense_products(r.bound, 0 if r.chunk else max(1, x.nnz), least, partial(_worth, r)), None)
    if product is None:
        return None
    positions, equation, bound = product
    first, *gone = positions
    shapes = [r.bound.shape(p) for p in positions]
    change = partial(_multiplied, equation, shapes, r.settings.effective_precision())
    left = outside(range(len(e.inputs)), gone)
    take: list[Take] = [((p,), None) if p != first else (positions, change) for p in left]
    operands = [r.operands[p] if p != first else r.like.expand(bound.shape(n)) for n, p in enumerate(left)]
    return Rewrite(f"first {equation}", replace(r, bound=bound, operands=operands), take)


def _worth(r: Request, rows: int, summed: int) -> float:
    """Return how many positions there may be for each nonzero, for one product of all of them to take less time.

    The other way is a product for each nonzero, of blocks of so many rows and so many summed elements.
    """
    like, exact = r.like, r.settings.effective_precision() == "highest"
    unit = F16 if like.dtype.itemsize < 4 else "ieee" if exact or like.dtype.itemsize > 4 else "tf32"
    rules = profile_of(like.device, r.settings, r.settings.effective_backend(like.device).name).rules
    least, by_rows = rules["sampled_blocks"][unit]
    worth = next(worth for least_rows, worth in reversed(by_rows) if least_rows <= rows)
    return float(worth * summed / max(1, summed + least))  # of no elements nothing is summed


def _multiplied(equation: str, shapes: Sequence[Ints], precision: str, *operands: Tensor) -> Tensor:
    whole = [operand.expand(shape) for operand, shape in zip(operands, shapes, strict=True)]
    return einsum(equation, *whole, precision=precision)


RULES = (broadcast, dense_modes.blocks, dense_modes.entries, coordinates, products, dense_modes.parts)


def rewrites_of(r: Request) -> tuple[list[Rewrite], Request]:
    """Return the rewrites of an einsum, outermost first, and the einsum that they lead to; found once a request.

    Raises:
        EquationError: the einsum needs more letters than there are.
        OutOfMemoryError: the pairs of blocks that would be multiplied take too much memory.
    """
    kept = vars(r)
    if "rewrites" not in kept:
        rewrites, inner = list[Rewrite](), replace(r, written=r.bound.einsum)
        for rule in RULES:
            while (rewrite := rule(inner)) is not None:
                rewrites.append(rewrite)
                inner = rewrite.inner
        kept["rewrites"] = rewrites, inner
    return kept["rewrites"]  # type: ignore[no-any-return]


# -- what they make together ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pull:
    """The conversion of an einsum's operands to those of the rewritten einsum: functions, run in order.

    Attributes:
        steps: functions, and the numbers of the tensors that they take. Values and dense operands as they were written
            have the first numbers, results of functions the next ones.
        beside: the steps for a call whose values are packed already: those that lead to the values of the one sparse
            operand do nothing, and keep their numbers.
        values: the numbers of the values of sparse operands that are not of ones.
        dense: the numbers of the dense operands.
        of_values: the functions from the values of the one sparse operand to its values here.
    """

    steps: tuple[tuple[Change, Ints], ...]
    beside: tuple[tuple[Change | None, Ints], ...]
    values: Ints
    dense: Ints
    of_values: tuple[Change, ...]

    @classmethod
    def of(cls, e: Einsum, rewrites: Sequence[Rewrite], ones: Sequence[int] = ()) -> Pull:
        """Compose the functions of rewrites of an einsum; operands at the positions of `ones` have no values."""
        count, steps = len(e.inputs), list[tuple[Any, Ints]]()
        written = (*e.sparse, *e.dense)
        numbers = [None if p in ones else written.index(p) for p in range(count)]
        for rewrite in rewrites:
            inner = list[int | None]()
            for sources, change in rewrite.take:
                read = tuple(n for n in map(numbers.__getitem__, sources) if n is not None)
                if change is not None and (read or not sources):  # of no operand a change makes a tensor
                    steps.append((change, read))
                    read = (count + len(steps) - 1,)
                inner.append(read[0] if read else None)
            numbers, e = inner, rewrite.inner.bound.einsum
        values, dense = (tuple(n for p in of if (n := numbers[p]) is not None) for of in (e.sparse, e.dense))
        beside, of_values = list(steps), list[Change]()
        at = values[0] if len(values) == 1 else 0
        while at >= count:
            beside[at - count] = None, ()
            change, (at,) = steps[at - count]
            of_values.insert(0, change)
        return cls(tuple(steps), tuple(beside), values, dense, tuple(of_values))

    def __call__(self, values: Sequence[Any], dense: Tensors, packed: bool = False) -> tuple[Sequence[Any], Tensors]:
        """Return values and dense operands, differentiable; of packed values anything, since nobody reads them."""
        tensors = [*values, *dense]
        for change, read in self.beside if packed else self.steps:
            tensors.append(tensors[0] if change is None else change(*map(tensors.__getitem__, read)))
        return list(map(tensors.__getitem__, self.values)), list(map(tensors.__getitem__, self.dense))

    def sources(self, count: int) -> list[int] | None:
        """Return which of a call's `count` tensors each dense operand is made of; None where one is of several."""
        numbers = [*self.dense]
        for at, n in enumerate(numbers):
            while n >= count:
                read = self.steps[n - count][1]
                if len(read) != 1:
                    return None
                n = read[0]
            numbers[at] = n
        return numbers

    def value(self, values: Tensor) -> Tensor:
        """Return the values of the one sparse operand."""
        return reduce(lambda tensor, change: change(tensor), self.of_values, values)


def put_back(
    patterns: Patterns, rewrites: Sequence[Rewrite], pattern: Pattern | None, empty: bool
) -> tuple[Pattern | None, list[Change]]:
    """Return the pattern of a result, None of a dense one, and what is done to the result of the last einsum.

    Args:
        patterns: those of the operands as written.
        rewrites: outermost first.
        pattern: that of the last einsum's result.
        empty: True if no nonzeros take part.
    """
    pushes, outer = list[Change](), [patterns, *([x.pattern for x in r.inner.sparse] for r in rewrites)]
    for rewrite, own in reversed([*zip(rewrites, outer, strict=False)]):
        if rewrite.put is not None:
            pattern, push = rewrite.put(own, pattern, empty)
            pushes += [push] if push else []
    return pattern, pushes
