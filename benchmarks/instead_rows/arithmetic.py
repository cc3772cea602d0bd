"""Arithmetic of two sparse matrices, and rows taken out of one, beside torch.sparse and scipy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import add, mul
from typing import Any

import common
import torch

import sparsetc as stc
from instead_rows.calls import each_once, versioned
from instead_rows.operands import generator, scattered
from instead_rows.row import FRESH, Call, Row, Task

N, NNZ = 20_000, 400_000
NAMES: dict[str, Callable[[Any, Any], Any]] = {"x + y": add, "x * y": mul}


def multiplied(x: Any, y: Any) -> Any:
    """The elementwise product of scipy's arrays."""
    return x.multiply(y)


def with_shared(x: stc.SparseTensor) -> stc.SparseTensor:
    """The matrix with as many further nonzeros, at places that every such matrix has."""
    shared = scattered((N, N), NNZ // 2, seed=2)
    coords = torch.cat((x.coords, shared.coords), 1)
    return stc.SparseTensor(coords, torch.cat((x.values, shared.values)), x.shape)


def of_two(name: str, new: bool) -> Task:
    """Two matrices whose patterns met before, or meet for the first time at each call."""
    operation = NAMES[name]
    x, y = (with_shared(scattered((N, N), NNZ // 2, seed)) for seed in (0, 1))
    left, right = (t.to_torch(torch.sparse_coo).coalesce() for t in (x, y))
    doubles = [t.double().cpu() for t in (left, right)]
    copies = [stc.SparseTensor(x.coords.clone(), x.values, x.shape) for _ in range(FRESH if new else 1)]
    following = each_once(copies)
    ours: Call = (lambda: operation(following(), y)) if new else (lambda: operation(x, y))
    instead: dict[str, Call] = {"torch COO": lambda: operation(left, right).coalesce()}
    if common.DEVICE == "cpu":
        a, b = x.to_scipy().tocsr(), y.to_scipy().tocsr()
        of_scipy = multiplied if operation is mul else add
        instead[versioned("scipy")] = lambda: of_scipy(a, b)
    return Task(ours, instead, lambda: operation(*doubles).to(common.DEVICE), fresh=new)


def rows_of(count: int) -> Task:
    """Random rows of a matrix."""
    x = scattered((N, N), 1_000_000)
    index = torch.randperm(N, generator=generator(), device=common.DEVICE)[:count]
    whole = x.to_torch(torch.sparse_coo).coalesce()
    instead: dict[str, Call] = {"torch COO index_select": lambda: whole.index_select(0, index)}
    if common.DEVICE == "cpu":
        csr, numbers = x.to_scipy().tocsr(), index.numpy()
        instead[versioned("scipy")] = lambda: csr[numbers]
    return Task(lambda: x[index], instead, lambda: whole.double().index_select(0, index))


ROWS = [
    *(
        Row(f"{name}, 400 K nonzeros each, half of them shared, {what}", "arithmetic", partial(of_two, name, new))
        for name in NAMES
        for what, new in (("patterns that met before", False), ("new patterns", True))
    ),
    *(Row(f"X[idx], {n} rows of 1 M nonzeros", "arithmetic", partial(rows_of, n)) for n in (32, 2000)),
]
