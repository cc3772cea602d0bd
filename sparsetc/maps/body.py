"""Bodies: products, an elementwise map, a softmax, and sums of products, over the pairs that a pattern holds.

In: a `Body`, which says what a user wants of each pair (i, j). Out: `Walk`s, which kernels are printed from: one for
the result and one a mode for gradients.

    body    ::= product* map softmax? dropout? (accumulated | stored)
    product     s[i, j] = sum over d of q[i, d] k[j, d]             a dot of two tiles, or multiply-adds for one row
                s[i, j] = sum over d of g(q[i, d], k[j, d], w[d])   for one row
    map         z[i, j] = f(products, vectors by row, by column, values by entry, by a whole number of i and j)
    softmax     p[i, j] = exp(z[i, j]) over its sum for the j of row i; without it p = z
    dropout     p[i, j] is 0 at random places, and divided by the share of others elsewhere
    accumulated o[i, d] = sum over j of p[i, j] v[j, d]; or o[i] = sum over j of p[i, j]
    stored      o[entry] = p[i, j]

Backward follows one rule: every product that has a table of the walked mode gives this table's gradient, a sum of
weight times the product's other table. An accumulated product's weight is p; a sampled one's is its derivative. So the
gradients are a walk of the rows and a walk of the columns, of the same parts, and one printer serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from sparsetc.maps.elementwise import Argument, Elementwise
from sparsetc.maps.trace import Untraced, trace
from sparsetc.support import NamedInts, Names, cached_property

LOG2E = 1.4426950408889634
Side = Literal["rows", "columns", "entries", "places"]
SIDES: tuple[Side, Side] = ("rows", "columns")
"""The modes by their numbers."""
Seen = Literal["own", "other", "entries", "places"]
RESULT = "o"
"""The name of the result in kernels."""
KEEP = "keep"
"""An input of functions that their values are multiplied by: 0 for a dropped pair."""


@dataclass(frozen=True, eq=False)
class Body:
    """A function of each pair of a pattern (rows, columns), and its sum over a row.

    Names hold no underscore, and are none of the variables of kernels.

    Attributes:
        products: of each score, its table of rows and its table of columns.
        vectors: names of other inputs of the map, and what they have a number for.
        map: of products and vectors by name, elementwise.
        softmax: whether results of the map are normalised over a row's pairs.
        table: the table of columns whose rows are summed, weighted; None for the sum of the weights.
        stored: whether the result is each pair's weight, and nothing is summed.
        dropout: the share of weights that are set to 0, at random.
        places: of each vector by place, the function of vectors i and j that gives the place of a pair's number: a
            whole number, from the end where it is negative.
        positions: names of vectors that are numbers of rows, columns or heads: whole numbers where no kernel runs.
        untraced: why no kernel has the map; empty where one may.
        inner: of products that sum no plain products: the function of two rows' elements and of one of a row for all,
            and the name of that row, a table (heads, size).
    """

    products: Mapping[str, tuple[str, str]]
    vectors: Mapping[str, Side]
    map: Callable[..., Tensor]
    softmax: bool = False
    table: str | None = None
    stored: bool = False
    dropout: float = 0.0
    places: Mapping[str, Elementwise] = field(default_factory=dict)
    positions: Names = ()
    untraced: str = ""
    inner: Mapping[str, tuple[Callable[..., Tensor], str]] = field(default_factory=dict)

    @cached_property
    def tables(self) -> dict[str, int]:
        """The tables, in order, and the mode that each has a row for."""
        tables = {table: mode for pair in self.products.values() for mode, table in enumerate(pair)}
        return tables if self.table is None else {**tables, self.table: 1}

    @cached_property
    def inputs(self) -> Names:
        """Names of tensors: tables (heads, n, size), vectors (heads, numbers), shared rows (heads, size)."""
        return (*self.tables, *self.vectors, *self.shared)

    @cached_property
    def shared(self) -> Names:
        """Names of the rows that all pairs of a head have in common."""
        return tuple(dict.fromkeys(name for _, name in self.inner.values()))

    def mapped(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return what the map gives of its products and vectors, found among others by name."""
        return self.map(**{name: inputs[name] for name in (*self.products, *self.vectors)})


Term = str | tuple[str, str] | None
"""A table; a product, and "d_own" or "d_shared", a derivative of its inner function; or nothing."""
Inner = tuple[Elementwise, str]
"""The inner function of a product, of "own", "other" and "shared" rows, whose value and derivatives by own and shared
rows are outputs "value", "d_own" and "d_shared"; and the name of the shared row."""


@dataclass(frozen=True, eq=False)
class Walk:
    """One pass over the pairs, a window after another: the pairs of some neighbouring positions of one mode.

    "Own" is that mode, "other" the one along which a loop goes within a window. Products, vectors and functions that no
    result depends on are left out.

    Attributes:
        mode: 0 if windows are of rows, 1 if of columns.
        products: of each score, its own table and the other one.
        vectors: by name, whether there is a number for each own position, other one, entry, or place.
        function: of products and vectors; its outputs, by name, are summed or stored.
        online: True if output "p" is a logarithm to base 2, whose softmax is found on the way; ``lse_out``, the
            logarithms to base 2 of rows' sums, is a result then.
        accumulated: (output, other table, destination): destination[own, d] = sum of output * table[other, d]; without
            a table destination[own] = sum of output. In place of the table, the derivative of an inner function.
        stored: (output, vector by place or None, destination): destination[entry] = output; of a vector
            destination[its place] += output, in any order.
        sums: name -> two own tables, and an own vector or None: the dot product of the tables' rows at each own
            position, less the vector. It is a vector for the function, and a result.
        dropout: the share of pairs for which input ``keep`` is 0.
        inner: the inner functions of products that have one.
        places: as of the body.
    """

    mode: int
    products: Mapping[str, tuple[str, str]]
    vectors: Mapping[str, Seen]
    function: Elementwise
    online: bool
    accumulated: tuple[tuple[str, Term, str], ...]
    stored: tuple[tuple[str, str | None, str], ...] = ()
    sums: Mapping[str, tuple[str, str, str | None]] = field(default_factory=dict)
    dropout: float = 0.0
    inner: Mapping[str, Inner] = field(default_factory=dict)
    places: Mapping[str, Elementwise] = field(default_factory=dict)

    def sizes(self, tensors: Mapping[str, Tensor]) -> NamedInts:
        """Return the sizes of rows of the tables that are read."""
        return tuple([(table, tensors[table].shape[-1]) for table in dict.fromkeys((*self.own, *self.other))])

    def widths(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the size of the rows that each accumulated result has, given those of tables; 0 of single numbers."""
        widths = {}
        for _, term, destination in self.accumulated:
            table = self.products[term[0]][0] if isinstance(term, tuple) else term
            widths[destination] = 0 if table is None else sizes[table]
        return widths

    @property
    def targets(self) -> Names:
        """Names of all that is written but ``lse_out`` and `sums`."""
        return (*(name for *_, name in self.stored), *dict.fromkeys(name for *_, name in self.accumulated))

    @property
    def written(self) -> Names:
        """Names of all that is written, in order."""
        return (*(["lse_out"] if self.online else []), *self.sums, *self.targets)

    @cached_property
    def own(self) -> Names:
        """The tables that own rows are read of."""
        summed = chain(*(of[:2] for of in self.sums.values()))
        return tuple(dict.fromkeys([*(own for own, _ in self.products.values()), *summed]))

    @cached_property
    def other(self) -> Names:
        """The tables that other rows are read of."""
        summed = [term for _, term, _ in self.accumulated if isinstance(term, str)]
        return tuple(dict.fromkeys([*(other for _, other in self.products.values()), *summed]))

    @cached_property
    def by_entry(self) -> Names:
        """The tensors that are read or written by the number of an entry."""
        stored = [destination for _, vector, destination in self.stored if not vector]
        return (*(name for name, side in self.vectors.items() if side == "entries"), *stored)

    @cached_property
    def weights(self) -> dict[str, tuple[Argument, float]]:
        """The expression of each output, and a constant factor taken out of it for sums or for scores of a softmax.

        No factor is taken out of outputs that are stored, that are summed with others of another factor, or that are
        scores if it is not positive.
        """
        peeled = {output: self.function.peeled(output) for output, *_ in (*self.accumulated, *self.stored)}
        factors: dict[str, set[float]] = {}
        for output, _, destination in self.accumulated:
            factors.setdefault(destination, set()).add(peeled[output][1])
        whole = [output for output, *_ in self.stored]
        for output, _, to in self.accumulated:
            if len(factors[to]) > 1 or (self.online and peeled[output][1] <= 0):
                whole.append(output)
        return peeled | {output: (self.function.outputs[output], 1.0) for output in whole}

    @cached_property
    def factors(self) -> dict[str, float]:
        """The constant factor of each accumulated result; those of a softmax have it within their weights."""
        return {name: 1.0 if self.online else self.weights[output][1] for output, _, name in self.accumulated}

    def variables(self) -> dict[str, str]:
        """Return the variables of vectors in a kernel's text, by row or at a tile."""
        of_row = [*self.sums, *(name for name, side in self.vectors.items() if side == "own")]
        return {name: f"{name}_{'own' if name in of_row else 'tile'}" for name in (*self.sums, *self.vectors)}


def _reading(walk: Walk) -> Walk:
    """Return a walk without the products, vectors and functions on which no result of it depends."""
    read = walk.function.inputs(argument for argument, _ in walk.weights.values())
    read |= {vector for _, vector, _ in walk.stored if vector}
    read |= {term[0] for _, term, _ in walk.accumulated if isinstance(term, tuple)}
    read = read.union(*(walk.places[name].reads for name in read & walk.places.keys()))
    parts: dict[str, Any] = {}
    for part in ("products", "vectors", "inner", "places"):
        parts[part] = {name: one for name, one in getattr(walk, part).items() if name in read}
    return replace(walk, **parts)


def keeps(dropout: float) -> tuple[int, float]:
    """Return the least hash of 32 bits of a pair that is kept, and the factor of its weight."""
    return min(int(dropout * 2**32), 2**32 - 1), 1 / (1 - dropout) if dropout < 1 else 0.0


def forward(body: Body) -> Walk:
    """Return the walk of the rows that gives the result and, of a softmax, ``lse_out``: see `Walk.online`."""
    if body.untraced:
        raise Untraced(body.untraced)
    factor = LOG2E if body.softmax else 1.0
    names = [*body.products, *body.vectors]
    function = trace(lambda **inputs: {"p": body.mapped(inputs) * factor}, names)
    vectors, inner = _seen(body.vectors, 0), _inner(body, 0)
    walk = Walk(0, body.products, vectors, function, False, (), (("p", None, RESULT),), inner=inner, places=body.places)
    if not body.stored:
        accumulated = (("p", body.table, RESULT),)
        walk = replace(walk, online=body.softmax, accumulated=accumulated, stored=(), dropout=body.dropout)
    return _reading(walk)


def _inner(body: Body, mode: int) -> dict[str, Inner]:
    """Return the inner functions of products as a walk of a mode sees them, with derivatives."""

    def traced(function: Callable[..., Tensor]) -> Elementwise:
        def derived(own: Tensor, other: Tensor, shared: Tensor) -> dict[str, Tensor]:
            left, right = (own, other) if mode == 0 else (other, own)
            both: Any = torch.func.vjp(function, left, right, shared)
            value, pull = both
            *rows, d_shared = pull(torch.ones_like(value))
            return {"value": value, "d_own": rows[mode], "d_shared": d_shared}

        return trace(derived, ["own", "other", "shared"])

    return {name: (traced(function), shared) for name, (function, shared) in body.inner.items()}


def backward(body: Body, mode: int, wanted: Collection[str], of_lse: bool = False) -> Walk:
    """Return the walk of a mode that computes the gradients of its tables and vectors; walks of rows also of entries.

    It reads, beside the inputs, ``g_o``, the gradient of the result o, and of a softmax ``lse``, which was ``lse_out``,
    and ``delta``, the sum of each row of o times g_o. The walk of the rows computes ``delta`` itself, from o, and
    stores it for the walk of the columns.

    Args:
        body: the body.
        mode: 0 for rows, 1 for columns.
        wanted: names of the tables and vectors whose gradients are computed, as ``grad_`` and the name.
        of_lse: whether there is a gradient ``g_lse`` of ``lse`` too, which is subtracted from ``delta``.
    """
    upstream = f"g_{RESULT}"
    products = dict(body.products)
    vectors = dict(body.vectors)
    if body.table is None:
        vectors[upstream] = "entries" if body.stored else "rows"
    else:
        products["dp"] = upstream, body.table
    if body.softmax:
        vectors |= {"lse": "rows", "delta": "rows"}
    names = [*body.products, *body.vectors]

    def gradients(**inputs: Any) -> dict[str, Tensor]:
        def mapped(*tensors: Tensor) -> Tensor:
            return body.mapped(dict(zip(names, tensors, strict=True)))

        derivative: Any = torch.func.vjp(mapped, *[inputs[name] for name in names])
        z, pull = derivative
        p, dz = z, inputs[upstream if body.table is None else "dp"]
        if body.softmax:
            p = torch.exp2(z * LOG2E - inputs["lse"])
            dz = p * ((dz * inputs[KEEP] if body.dropout else dz) - inputs["delta"])
        if body.dropout:
            p = p * inputs[KEEP]
        return {"p": p, **{f"d_{name}": d for name, d in zip(names, pull(dz), strict=True)}}

    function = trace(gradients, [*products, *vectors, *([KEEP] if body.dropout else [])])
    seen = {name: (tables[mode], tables[1 - mode]) for name, tables in products.items()}
    accumulated: list[tuple[str, Term, str]] = []
    for name, (own, other) in seen.items():
        if own in wanted:
            term = (name, "d_own") if name in body.inner else other
            accumulated.append(("p" if name == "dp" else f"d_{name}", term, f"grad_{own}"))
    for name, (_, shared) in body.inner.items():
        if mode == 0 and shared in wanted:
            accumulated.append((f"d_{name}", (name, "d_shared"), f"grad_{shared}"))
    own_vectors = [name for name, side in body.vectors.items() if side == SIDES[mode] and name in wanted]
    accumulated += [(f"d_{name}", None, f"grad_{name}") for name in own_vectors]
    alone = [name for name, side in body.vectors.items() if side not in SIDES and name in wanted and mode == 0]
    stored = tuple((f"d_{name}", name if name in body.places else None, f"grad_{name}") for name in alone)
    less = "g_lse" if of_lse else None
    sums = {"delta": (RESULT, upstream, less)} if body.softmax and mode == 0 else {}
    vectors_seen = _seen({name: side for name, side in vectors.items() if name not in sums}, mode)
    inner = _inner(body, mode)
    summed = tuple(accumulated)
    walk = Walk(mode, seen, vectors_seen, function, False, summed, stored, sums, body.dropout, inner, body.places)
    return _reading(walk)


def _seen(vectors: Mapping[str, Side], mode: int) -> dict[str, Seen]:
    """Return the sides of vectors as a walk of a mode sees them."""
    sides: dict[Side, Seen] = {SIDES[mode]: "own", SIDES[1 - mode]: "other", "entries": "entries", "places": "places"}
    return {name: sides[side] for name, side in vectors.items()}
