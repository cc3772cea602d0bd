"""Duplicates of sorted nonzeros summed, wherever batches are cut.

In: batches of nonzeros in order. Out: the same without duplicates. Values of one nonzero are added one after the other,
in the order in which they come, and what was added of the last nonzero of a batch is carried into the next as it is. So
no sum depends on where batches end. Narrow floats are summed in float32, integers in two halves that cannot wrap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from sparsetc.io.packing.merge import Batch
from sparsetc.support.entry import without_autocast
from sparsetc.tensor import coords as crd
from sparsetc.tensor.inputs import SUMMED_IN
from sparsetc.tensor.sums import INTEGERS, add_rows, halves, in_order, joined


def summed(batches: Iterable[Batch], dtype: torch.dtype) -> Iterator[Batch]:
    """Unique nonzeros in order, values of ``dtype``.

    Raises:
        DtypeError: a sum of integers that ``dtype`` cannot hold.
    """
    held: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
    for coords, values in batches:
        rows, terms = list(coords), _terms(values)
        if held is not None:
            rows, terms = _after(held[0], rows), _after(held[1], terms)
        fresh = crd.starts_of_runs(rows)
        if not bool(fresh.all()):
            rows, terms = [row[fresh] for row in rows], _added(terms, fresh)
        held = [row[-1:].clone() for row in rows], [term[-1:].clone() for term in terms]
        if rows[0].shape[0] > 1:
            yield [row[:-1] for row in rows], _values([term[:-1] for term in terms], dtype)
    if held is not None:
        yield held[0], _values(held[1], dtype)


def _after(first: list[torch.Tensor], then: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat(pair) for pair in zip(first, then, strict=True)]


def _terms(values: torch.Tensor) -> list[torch.Tensor]:
    """Values as they are added up, a column or two."""
    return list(halves(values)) if values.dtype in INTEGERS else [values.to(SUMMED_IN.get(values.dtype, values.dtype))]


def _values(terms: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return joined(terms[0], terms[1], dtype) if dtype in INTEGERS else terms[0].to(dtype)


def _added(terms: list[torch.Tensor], fresh: torch.Tensor) -> list[torch.Tensor]:
    """One sum a nonzero, which begins with its first value as it is."""
    run = (torch.cumsum(fresh, 0) - 1)[~fresh]
    with in_order(True), without_autocast(fresh.device):
        made = [add_rows(term[fresh], run, term[~fresh]) for term in terms]
    if len(made) == 2:
        high, low = made
        made = [high + (low >> 32), low & 0xFFFFFFFF]  # so that the lower half stays one however much is added
    return made
