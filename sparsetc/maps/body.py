"""Bodies: products, an elementwise map, a softmax, and sums of products, over the pairs that a pattern holds.

In: a `Body`, which says what a user wants of each pair (i, j). Out: `Walk`s, which kernels are printed from: one for
the result and one a mode for gradients.

    body    ::= product* map softmax? dropout? (accumulated | stored)
    product     s[i, j] = sum over d of q[i, d] k[j, d]             a dot of two tiles, or multiply-adds for one row
    map         z[i, j] = f(products, vectors by row, by column, values by entry)
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
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from sparsetc.maps.elementwise import Elementwise
from sparsetc.maps.trace import trace
from sparsetc.support.lru import cached_property

LOG2E = 1.4426950408889634
Side = Literal["rows", "columns", "entries"]
SIDES: tuple[Side, Side] = ("rows", "columns")
"""The modes by their numbers."""
Seen = Literal["own", "other", "entries"]
RESULT = "o"
"""What kernels call the result."""
KEEP = "keep"
"""An input of functions: 0 for a pair that is dropped, and what others are multiplied by."""


@dataclass(frozen=True, eq=False)
class Body:
    """A function of each pair of a pattern (rows, columns), and its sum over a row. Names hold no underscore.

    Attributes:
        products: of each score, its table of rows and its table of columns.
        vectors: names of other inputs of the map, and what they have a number for.
        map: of products and vectors by name, elementwise.
        softmax: whether results of the map are normalised over a row's pairs.
        table: the table of columns whose rows are summed, weighted; None for the sum of the weights.
        stored: whether the result is each pair's weight, and nothing is summed.
        dropout: the share of weights that are dropped.
    """

    products: Mapping[str, tuple[str, str]]
    vectors: Mapping[str, Side]
    map: Callable[..., torch.Tensor]
    softmax: bool = False
    table: str | None = None
    stored: bool = False
    dropout: float = 0.0

    @cached_property
    def tables(self) -> dict[str, int]:
        """The tables, in order, and the mode that each has a row for."""
        tables = {table: mode for pair in self.products.values() for mode, table in enumerate(pair)}
        return tables if self.table is None else {**tables, self.table: 1}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors, in order: tables (heads, rows, size), then vectors (heads, rows or entries)."""
        return (*self.tables, *self.vectors)

    def mapped(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return what the map gives of its products and vectors, found among others by name."""
        return self.map(**{name: inputs[name] for name in (*self.products, *self.vectors)})


@dataclass(frozen=True, eq=False)
class Walk:
    """One pass over the windows of a mode. "Own" is that mode, "other" the one that a loop goes along.

    Attributes:
        mode: 0 if windows are of rows, 1 if of columns.
        products: of each score, its own table and the other one.
        vectors: by name, whether there is a number for each own position, each other one, or each entry.
        function: of products and vectors; weights are outputs of it.
        online: True if output "p" is a logarithm to base 2, whose softmax is found on the way; `lse` is a result then.
        accumulated: (output, other table, destination): destination[own, d] = sum of output * table[other, d]; without
            a table destination[own] = sum of output.
        stored: (output, destination): destination[entry] = output.
        inner: name -> two own tables, and maybe an own vector: the sum of the tables' product for each own position,
            less the vector; it is stored too.
        dropout: the share of pairs for which input ``keep`` is 0.
    """

    mode: int
    products: Mapping[str, tuple[str, str]]
    vectors: Mapping[str, Seen]
    function: Elementwise
    online: bool
    accumulated: tuple[tuple[str, str | None, str], ...]
    stored: tuple[tuple[str, str], ...] = ()
    inner: Mapping[str, tuple[str, str, str | None]] = field(default_factory=dict)
    dropout: float = 0.0

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of what is written beside `lse` and the sums of `inner`."""
        return (*(name for _, name in self.stored), *dict.fromkeys(name for *_, name in self.accumulated))


def forward(body: Body) -> Walk:
    """Return the walk of the rows that gives the results; of a softmax also `lse`, the logarithm of each row's sum."""
    factor = LOG2E if body.softmax else 1.0
    names = [*body.products, *body.vectors]
    function = trace(lambda **inputs: {"p": body.mapped(inputs) * factor}, names)
    vectors = _seen(body.vectors, 0)
    if body.stored:
        return Walk(0, body.products, vectors, function, False, (), (("p", RESULT),))
    accumulated = (("p", body.table, RESULT),)
    return Walk(0, body.products, vectors, function, body.softmax, accumulated, dropout=body.dropout)


def backward(body: Body, mode: int, wanted: Collection[str], of_lse: bool = False) -> Walk:
    """Return the walk of a mode that gives the gradients of its tables and vectors, and for rows those of entries.

    It reads, beside the inputs, ``g_o`` for the result o, and of a softmax `lse`, and `delta`, the sum of each row of o
    times g_o. The walk of the rows computes this itself, reads o for it, and stores it for that of the columns.

    Args:
        body: the body.
        mode: 0 for rows, 1 for columns.
        wanted: names of the tables and vectors whose gradients are computed, as ``grad_`` and the name.
        of_lse: whether there is a gradient ``g_lse`` of `lse` too, which `delta` is less by.
    """
    upstream, products, vectors = f"g_{RESULT}", dict(body.products), dict(body.vectors)
    if body.table is None:
        vectors[upstream] = "entries" if body.stored else "rows"
    else:
        products["dp"] = upstream, body.table
    if body.softmax:
        vectors |= {"lse": "rows", "delta": "rows"}
    names = [*body.products, *body.vectors]

    def gradients(**inputs: Any) -> dict[str, torch.Tensor]:
        def mapped(*tensors: torch.Tensor) -> torch.Tensor:
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
    accumulated: list[tuple[str, str | None, str]] = [
        ("p" if name == "dp" else f"d_{name}", other, f"grad_{own}")
        for name, (own, other) in seen.items()
        if own in wanted
    ]
    own_vectors = [name for name, side in body.vectors.items() if side == SIDES[mode] and name in wanted]
    accumulated += [(f"d_{name}", None, f"grad_{name}") for name in own_vectors]
    of_entries = [name for name, side in body.vectors.items() if side == "entries" and name in wanted and mode == 0]
    stored = tuple((f"d_{name}", f"grad_{name}") for name in of_entries)
    inner = {"delta": (RESULT, upstream, "g_lse" if of_lse else None)} if body.softmax and mode == 0 else {}
    vectors_seen = _seen({name: side for name, side in vectors.items() if name not in inner}, mode)
    return Walk(mode, seen, vectors_seen, function, False, tuple(accumulated), stored, inner, body.dropout)


def _seen(vectors: Mapping[str, Side], mode: int) -> dict[str, Seen]:
    """Return the sides of vectors as a walk of a mode sees them."""
    sides: dict[Side, Seen] = {SIDES[mode]: "own", SIDES[1 - mode]: "other", "entries": "entries"}
    return {name: sides[side] for name, side in vectors.items()}
