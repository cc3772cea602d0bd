"""Contraction paths: the order of contractions of an einsum, found by counts and by rates of the device.

In: a `Bound` einsum; the pattern's counts where one operand is sparse, counts of nonzeros where several are. Out: an
`Order`.

Of one sparse operand the best path is a shortest path over *states*: what is left of that operand, its letters with
coordinates and others, and the dense terms that are not contracted yet. Its edges are a pass over the nonzeros with
some of the terms, which drops a letter with coordinates; a product of two dense terms; a pass with all terms that are
left; and "dense from here", whose rest opt_einsum orders. One pass is kept unless a path is expected to be clearly
faster (`path_apart`). Nonzeros of an intermediate result are distinct coordinates of the pattern, and are counted:
taken to lie anywhere they would be up to 500 times too many.

Of several sparse operands, whose products nobody has counted, nonzeros are taken to lie anywhere with equal
probability (`order_by_tasks`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from math import exp, inf, log, log1p
from typing import Any, TypeVar

from sparsetc.errors import PlanError
from sparsetc.ir.equation.einsum import Bound
from sparsetc.support import Ints, Names, among, outside

T = TypeVar("T")
Order = tuple[Ints, ...]
"""A path in opt_einsum's form: the positions of the operands of each contraction in the list of those left, to whose
end its result is put. A sparse operand alone is made dense."""

# -- one sparse operand -----------------------------------------------------------------------------------------------


Term = Ints
"""A dense operand, or the product of several: their numbers, ascending."""


@dataclass(frozen=True)
class State:
    """The operands that are left to contract.

    Attributes:
        sparse: letters with coordinates, in the operand's order; none of what is dense.
        dense: other letters of the sparse operand, or of what it became.
        terms: the dense operands, and products of some.
    """

    sparse: Names
    dense: frozenset[str]
    terms: tuple[Term, ...]


Edge = tuple[str, tuple[Term, ...], State | None]
"""A contraction: a ``pass`` over the nonzeros, the ``product`` of two dense terms, or ``dense`` from here on; the dense
terms that take part; and the state that follows, None at the end."""
Steps = Sequence[tuple[State, Edge]]
"""Contractions, and what was left before each."""


@dataclass
class Search:
    """The search for the best path of an einsum with one sparse operand.

    Attributes:
        bound: the einsum; the letters of its sparse operand are distinct.
        sparse_order: how many of these have coordinates.
        fibers: the count of distinct coordinates of some modes.
        nnz: entries of the sparse operand.
        constants: of the cost model, of which those named ``path_...`` are read.
        itemsize: bytes of a value.
        limit: bytes that an intermediate result may take.
        sparse_result: True if the result has a pattern, and nothing is made dense.
    """

    bound: Bound
    sparse_order: int
    fibers: Callable[[Ints], int]
    nnz: int
    constants: Mapping[str, float]
    itemsize: int
    limit: int
    sparse_result: bool
    _rests: dict[State, tuple[Order, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        e = self.bound.einsum
        (self.position,) = e.sparse
        letters = e.inputs[self.position]
        self.modes = {c: mode for mode, c in enumerate(letters[: self.sparse_order])}
        self.letters: dict[Term, Names] = {(p,): e.inputs[p] for p in e.dense}
        self.root = State(letters[: self.sparse_order], frozenset(letters[self.sparse_order :]), tuple(self.letters))

    # -- edges ------------------------------------------------------------------------------------------------------
    def edges(self, s: State) -> Iterator[Edge]:
        """Yield the contractions possible next, final ones first."""
        output = set(self.bound.einsum.output)
        if not self.sparse_result and (s is self.root or s.sparse != self.root.sparse):
            yield "dense", s.terms, None
        if not s.sparse:
            return
        # fibers that fill their space are a dense tensor: fused products of their rows take many times their price
        if s is self.root or self.sparse_result or 2 * self._count(s.sparse) < self._size(s.sparse):
            yield "pass", s.terms, None
            for size in range(1, len(s.terms)):
                for group in combinations(s.terms, size):
                    rest = outside(s.terms, group)
                    needed = output.union(*self._letters(rest))
                    kept = among(s.sparse, needed)
                    if kept != s.sparse:
                        width = s.dense.union(*self._letters(group)).difference(s.sparse) & needed
                        yield "pass", group, State(kept, width, rest)
        if s.sparse == self.root.sparse:
            yield from self._products(s, output)

    def _products(self, s: State, output: set[str]) -> Iterator[Edge]:
        """Yield products of two dense terms that share a letter, or have few rows."""
        for pair in combinations(s.terms, 2):
            rest = outside(s.terms, pair)
            needed = output.union(s.sparse, s.dense, *self._letters(rest))
            a, b = self._letters(pair)
            letters = sorted(among(dict.fromkeys((*a, *b)), needed), key=lambda c: c not in s.sparse)
            rows, elements = self._size(among(letters, s.sparse)), self._size(letters)
            product = tuple(sorted(itertools.chain(*pair)))
            small = len(product) == 2 and rows <= self.nnz / 2 and elements <= self.constants["path_outer"]
            if small or set(a) & set(b):
                self.letters[product] = tuple(letters)
                yield "product", pair, State(s.sparse, s.dense, (*rest, product))

    def _letters(self, terms: Iterable[Term]) -> list[Names]:
        return [self.letters[term] for term in terms]

    # -- prices -----------------------------------------------------------------------------------------------------
    def _size(self, letters: Iterable[str]) -> int:
        return self.bound.elements(set(letters))

    def _count(self, letters: Names) -> int:
        return self.nnz if len(letters) == self.sparse_order else self.fibers(tuple([self.modes[c] for c in letters]))

    def price(self, s: State, edge: Edge, most: float) -> float:
        """Seconds of a contraction; infinity where it takes too much memory, or is known early to take `most`."""
        constants, (kind, taken, after) = self.constants, edge
        if kind == "product":
            assert after is not None
            out = self.letters[after.terms[-1]]
            every = set[str]().union(*self._letters(taken))
            rate = constants["path_multiply"] if every.difference(out) else constants["path_outer_product"]
            moved = self.itemsize * self._size(out)
            seconds = constants["path_call"] + max(self._wide(rate) * self._size(every), constants["path_byte"] * moved)
            return seconds if moved <= self.limit else inf
        if kind == "dense":
            return self._dense(s, most)
        return self._pass(s, self._letters(taken), after, most)

    def _wide(self, rate: float) -> float:
        """Scale a rate of float32 by the operands' item size."""
        return rate * self.itemsize / 4

    def _fresh(self, nbytes: float) -> float:
        """Return the extra seconds of a large new tensor, for the pages that the system hands out."""
        return nbytes * self.constants["path_fresh"] if nbytes >= self.constants["path_large"] else 0.0

    def _pass(self, s: State, taken: Sequence[Names], after: State | None, most: float) -> float:
        constants = self.constants
        nnz = self._count(s.sparse)
        if constants["path_sparse_call"] + nnz * constants["path_row"] >= most:
            return inf  # whatever else is counted
        output = self.bound.einsum.output
        out = {*output} if after is None else {*after.sparse, *after.dense}
        kept = among(s.sparse, out)
        terms = list(map(frozenset, taken))
        dense_letters = [t.difference(s.sparse) for t in terms]
        runs, width = self._count(kept), self._size(out.difference(s.sparse))
        nbytes = self.itemsize * (self._size(out) if after is None and not self.sparse_result else runs * width)
        if after is not None and nbytes > self.limit:
            return inf
        # The result is made, brought to its order and put in its place; a row of it has an index.
        base = constants["path_sparse_call"] + self._fresh(nbytes)
        base += runs * (constants["path_row"] + 4 * self.itemsize * width * constants["path_byte"])
        if after is None and not self.sparse_result:  # rows without nonzeros are zeros
            base += nbytes * constants["path_byte"]
        seconds = self._level(nnz, runs, s.dense, dense_letters)
        # In fibers: one mode is summed first, with the terms that have it, and the other terms are read once a fiber.
        # Where values are rows, with dense modes, entries number the rows of a table instead.
        for leaf in () if s.dense else s.sparse:
            last = [t for t, whole in zip(dense_letters, terms, strict=True) if leaf not in whole]
            if leaf in kept or not last or base >= most:
                continue
            first = [t for t, whole in zip(dense_letters, terms, strict=True) if leaf in whole]
            rows = self._count(tuple([c for c in s.sparse if c != leaf]))
            summed = frozenset[str]().union(*first)
            seconds = min(seconds, self._level(nnz, rows, s.dense, first) + self._level(rows, runs, summed, last))
        return base + seconds * (constants["path_fused"] if after is None and self._outer(terms, s.dense) else 1.0)

    def _outer(self, terms: Iterable[frozenset[str]], values: frozenset[str]) -> bool:
        """Return True if a row of the result has more elements than a row of any operand: it is an outer product."""
        width = self._size({*self.bound.einsum.output}.difference(self.modes))
        return width > max(map(self._size, [values, *[t.difference(self.modes) for t in terms]]))

    def _level(self, rows: int, runs: int, values: frozenset[str], tables: Sequence[frozenset[str]]) -> float:
        """Seconds of rows of values times rows of tables, summed over runs."""
        constants, right = self.constants, frozenset[str]().union(*tables)
        every = self._size(values | right)
        if not values and len(tables) <= 1:
            return rows * (constants["path_row"] + every * self._wide(constants["path_bag"]))
        seconds = rows * constants["path_row"] * (1 + len(tables))
        product_seconds = self._wide(constants["path_outer_product"])
        if len(tables) > 1:  # the tables' rows are multiplied by one another first
            seconds += rows * self._size(right) * product_seconds
        if not values:
            return seconds + rows * self._size(right) * self._wide(constants["path_bag"])
        long = rows >= constants["path_long_run"] * runs
        if not values & right and min(self._size(values), self._size(right)) >= constants["path_least_dot"] and long:
            return seconds + runs * constants["path_run"] + rows * every * self._wide(constants["path_thin_multiply"])
        return seconds + rows * every * product_seconds

    def _dense(self, s: State, most: float) -> float:
        """Return the seconds of contracting the remaining operands densely, making the sparse one dense included."""
        constants, head = self.constants, {*s.sparse, *s.dense}
        nbytes = self.itemsize * self._size(head)
        seconds = constants["path_sparse_call"]
        if s is not self.root:  # what the operand itself becomes is kept with its values
            seconds = 2 * constants["path_call"] + nbytes * constants["path_byte"] + self._fresh(nbytes)
            written = self.itemsize * self._size(s.dense) * constants["path_byte"]
            seconds += self._count(s.sparse) * (constants["path_row"] + written) if s.sparse else 0.0
        if nbytes > self.limit or seconds >= most:
            return inf
        return seconds + self._rest(s)[1]

    def _rest(self, s: State) -> tuple[Order, float]:
        """The order of opt_einsum for the terms that are left, with the dense tensor behind them; and its seconds."""
        if s in self._rests:
            return self._rests[s]
        import opt_einsum  # few einsums are searched

        constants, texts = self.constants, list(map("".join, self._letters(s.terms)))
        texts.append("".join((*s.sparse, *sorted(s.dense))))
        shapes = [self.bound.extents(text) for text in texts]
        equation = f"{','.join(texts)}->{''.join(self.bound.einsum.output)}"
        order, info = opt_einsum.contract_path(equation, *shapes, shapes=True)
        seconds = 0.0
        for _, _, pair, *_ in info.contraction_list:
            inputs, out = pair.split("->")
            each, every = inputs.split(","), set(inputs) - {","}
            nbytes = [self.itemsize * self._size(t) for t in (*each, out)]
            if nbytes[-1] > self.limit:
                seconds = inf
            narrow = min(self._size(every.difference(t)) for t in each)
            rate = constants["path_multiply"] if narrow >= constants["path_narrow"] else constants["path_thin_multiply"]
            seconds += 2 * constants["path_call"] + max(
                self._size(every) * self._wide(rate), 2 * sum(nbytes) * constants["path_byte"]
            )
            seconds += sum(map(self._fresh, nbytes))
        self._rests[s] = tuple(map(tuple, order)), seconds
        return self._rests[s]

    # -- the search -------------------------------------------------------------------------------------------------
    def picked(
        self,
        asked: bool,
        seconds: float | None = None,
        planned: Callable[[Sequence[Names], State | None], float] | None = None,
    ) -> tuple[str, Order] | None:
        """Return why an einsum is contracted in steps, and their order; None where one contraction is about as fast.

        Args:
            asked: True if steps are asked for, whatever they take.
            seconds: of the best plan of one contraction; None where it is priced as steps are.
            planned: gives the seconds of the best plan of a pass over the operand's own nonzeros, of the letters of its
                dense terms and the state after it; they take the place of the price that the search began with.
        """
        one = self.price(self.root, ("pass", self.root.terms, None), inf) if seconds is None else seconds
        skip = ("pass",) if seconds is None and not asked else ("pass", "dense")
        most = inf if asked else one / self.constants["path_apart"]
        best_path = self.best(most, skip)
        if best_path is None:
            return None
        seconds, steps = best_path
        first = next((step for step in steps if step[1][0] == "pass"), None)
        if planned and first:
            _, taken, after = first[1]
            seconds += planned(self._letters(taken), after) - self.price(*first, inf)
        launched = self._launched(steps)
        if seconds >= most or (launched >= one and not asked):
            return None
        seconds = max(seconds, launched)
        return f"{1e3 * seconds:.3g} ms expected, {1e3 * one:.3g} in one pass", self._order(steps)

    def best(self, most: float = inf, skip: Sequence[str] = ()) -> tuple[float, Steps] | None:
        """Return the seconds and the steps of the fastest path; None if no path takes less than `most`.

        Args:
            most: seconds that are not worth reaching.
            skip: kinds of contractions that may not take all operands at once.
        """
        reached, before = {self.root: 0.0}, dict[State, tuple[State, Edge]]()
        last: tuple[State, Edge] | None = None
        number, done = itertools.count(), set[State]()
        waiting = [(0.0, next(number), self.root)]
        while waiting:
            seconds, _, s = heapq.heappop(waiting)
            if s in done or seconds >= most:
                continue
            done.add(s)
            for edge in self.edges(s):
                kind, _, after = edge
                if s is self.root and after is None and kind in skip:
                    continue
                total = seconds + self.price(s, edge, most - seconds)
                if total >= most:
                    continue
                if after is None:
                    most, last = total, (s, edge)
                elif total < reached.get(after, inf):
                    reached[after], before[after] = total, (s, edge)
                    heapq.heappush(waiting, (total, next(number), after))
        if last is None:
            return None
        steps = [last]
        while steps[0][0] in before:
            steps.insert(0, before[steps[0][0]])
        return most, steps

    def _launched(self, steps: Steps) -> float:
        """Return the seconds at which the steps are launched; a GPU is not waited for."""
        kinds = [kind for _, (kind, *_) in steps]
        passes, calls = kinds.count("pass"), kinds.count("product")
        if kinds[-1] == "dense":
            rest = steps[-1][0]
            calls += len(self._rest(rest)[0]) + bool(rest.sparse)
        return passes * self.constants["path_host"] + calls * self.constants["path_call_host"]

    def _order(self, steps: Steps) -> Order:
        """The contractions of these steps."""
        sparse: Ints = (self.position,)
        contractions = list[tuple[Sequence[Ints], Ints]]()
        rest: Order = ()
        for s, (kind, taken, _) in steps:
            if kind == "dense":
                contractions += [([sparse], sparse)] * bool(s.sparse)
                rest = self._rest(s)[0]
                break
            taken = taken if kind == "product" else (*taken, sparse)
            contractions.append((taken, tuple(sorted(itertools.chain(*taken)))))
            if kind == "pass":
                sparse = contractions[-1][1]
        return (*_numbered([(p,) for p in range(len(self.bound.einsum.inputs))], contractions), *rest)


def _numbered(operands: Sequence[T], contractions: Iterable[tuple[Sequence[T], T]]) -> Iterator[Ints]:
    """Yield the positions of what each contraction takes in the list of operands left, to whose end its result is put.

    Args:
        operands: all of them.
        contractions: what each takes, and its result.
    """
    left = [*operands]
    for taken, result in contractions:
        yield tuple(sorted(map(left.index, taken)))
        left = [*outside(left, taken), result]


def checked_order(order: Sequence[Sequence[int]], operands: int) -> Order:
    """Return the path with positions ascending. Raise `PlanError` if it does not fit so many operands."""
    left, contractions = 1 + sum(len(places) - 1 for places in order), list[Ints]()
    if left != operands:
        raise PlanError(f"the path {order!r:.80} is of {left} operands, the equation has {operands}")
    for places in order:
        if not places or len(set(places)) < len(places) or not all(0 <= p < left for p in places):
            raise PlanError(
                f"the path {order!r:.80}: a step names different operands of the {left} that are left, found {places!r}"
            )
        contractions.append(tuple(sorted(places)))
        left += 1 - len(places)
    return tuple(contractions)


# -- several sparse operands -------------------------------------------------------------------------------------------

MOST_EXHAUSTIVE = 9
"""Operands up to which every order is tried: 3**9 splits."""


Tree = Any
"""The number of an operand, or a pair of trees that are contracted with one another."""


def order_by_tasks(
    inputs: Sequence[Iterable[str]], output: Iterable[str], sizes: dict[str, int], nonzeros: Sequence[int]
) -> list[Ints]:
    """Return the order of pairwise contractions with the fewest expected tasks; each result is appended to the list.

    A task is a product of two nonzeros. The order is the best of all for few operands, chosen pair by pair for many.
    """
    letters, logs = [frozenset(t) for t in inputs], {c: log(max(1, n)) for c, n in sizes.items()}

    @cache
    def members(tree: Tree) -> Ints:
        return (tree,) if isinstance(tree, int) else tuple(sorted(members(tree[0]) + members(tree[1])))

    @cache
    def kept(tree: Tree) -> frozenset[str]:
        """Names of a tree's operands that the output or another operand has too."""
        own = members(tree)
        read = frozenset(output).union(*[t for n, t in enumerate(letters) if n not in own])
        return read & frozenset().union(*[letters[n] for n in own])

    # Counts are logarithms, as sizes may pass any float.
    @cache
    def tasks(tree: Tree) -> float:
        a, b = tree
        return found(a) + found(b) - sum(logs[c] for c in kept(a) & kept(b))

    @cache
    def found(tree: Tree) -> float:
        """Nonzeros expected: positions * (1 - exp(-tasks / positions))."""
        if isinstance(tree, int):
            return log(max(1, nonzeros[tree]))
        span = sum(logs[c] for c in kept(tree))
        full = tasks(tree) - span
        share = log1p(-exp(-exp(min(full, 30)))) if full > -30 else full
        return max(0.0, span + share)

    @cache
    def cost(tree: Tree) -> float:
        """The tasks, no logarithm, of all contractions."""
        return 0.0 if isinstance(tree, int) else cost(tree[0]) + cost(tree[1]) + exp(min(tasks(tree), 700.0))

    @cache
    def best(first: int, *rest: int) -> Tree:
        if not rest:
            return first
        lefts = [(first, *some) for size in range(len(rest)) for some in combinations(rest, size)]
        return min([(best(*left), best(*outside(rest, left))) for left in lefts], key=cost)

    trees: list[Tree] = [*range(len(letters))]
    if len(trees) <= MOST_EXHAUSTIVE:
        trees = [best(*trees)]
    while len(trees) > 1:
        pair = min(combinations(trees, 2), key=tasks)
        trees = [*outside(trees, pair), pair]

    def contractions(tree: Tree) -> Iterator[tuple[Tree, Tree]]:
        if not isinstance(tree, int):
            yield from contractions(tree[0])
            yield from contractions(tree[1])
            yield tree, tree

    return [*_numbered(range(len(letters)), contractions(trees[0]))]
