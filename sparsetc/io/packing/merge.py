"""Runs read together, in order, and duplicates summed, wherever batches are cut.

In: files of sorted nonzeros. Out: batches of nonzeros, each in order and after the one before; of equal ones, those of
an earlier run come first. Of every run a buffer is held. Whatever is not beyond the end of any buffer can go, and is
found in each buffer by bisection; so each batch empties a buffer at least.

Values of one nonzero are added one after the other, in the order in which they come, and what was added of the last
nonzero of a batch is carried into the next as it is (`summed`). So no sum depends on where batches end. Narrow floats
are summed in float32, integers in two halves that cannot wrap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from sparsetc.io.packing.budget import PackingBudget
from sparsetc.io.stc import PackedFile
from sparsetc.support.entry import without_autocast
from sparsetc.tensor import coords as crd
from sparsetc.tensor.inputs import SUMMED_IN
from sparsetc.tensor.sums import INTEGERS, add_rows, halves, in_order, joined

Batch = tuple[Sequence[torch.Tensor], torch.Tensor]
"""Int64 coordinates, (n,) a mode, and (n,) values."""


class _Buffer:
    """The next nonzeros of one run.

    Attributes:
        last: the keys of the last nonzero held; more are in the file if they are of concern.
    """

    def __init__(self, file: PackedFile, shape: tuple[int, ...], rows: int) -> None:
        self._file, self._shape, self._rows = file, shape, rows
        self._read = 0
        self._at = 0
        self.last: tuple[int, ...] = ()
        self._fill()

    @property
    def empty(self) -> bool:
        """Whether the run is at its end."""
        return self._at == self._values.shape[0]

    def take(self, bound: tuple[int, ...], ties: bool) -> tuple[Batch, list[torch.Tensor]] | None:
        """Nonzeros whose keys are below the bound, or equal to it if ``ties``, and their keys; None where none are."""
        start, stop = self._at, _position(self._keys, bound, ties)
        if start >= stop:
            return None
        self._at = stop
        part = slice(start, stop)
        found = ([row[part] for row in self._coords], self._values[part]), [key[part] for key in self._keys]
        if self.empty:
            self._fill()
        return found

    def _fill(self) -> None:
        stop = min(self._read + self._rows, self._file.nnz)
        self._coords, self._values = self._file.block(self._read, stop)
        self._keys = crd.sort_keys(list(self._coords), self._shape)
        self._read, self._at = stop, 0
        self.last = tuple(int(key[-1]) for key in self._keys) if self._values.shape[0] else ()


def merged(files: Sequence[PackedFile], shape: tuple[int, ...], share: PackingBudget) -> Iterator[Batch]:
    """All nonzeros of the files in order, those of a shape that holds them all."""
    if not files:
        return
    rows = share.fan_in * share.block // len(files)
    buffers = [_Buffer(file, shape, _whole_blocks(rows, file)) for file in files]
    while buffers := [buffer for buffer in buffers if not buffer.empty]:
        bound, number = min((buffer.last, number) for number, buffer in enumerate(buffers))
        # a later run may hold more that equal the bound, which earlier runs' next buffers come before
        taken = [buffer.take(bound, ties=at <= number) for at, buffer in enumerate(buffers)]
        yield _together([one for one in taken if one])


def _whole_blocks(rows: int, file: PackedFile) -> int:
    """So many nonzeros, in whole blocks that are checked as one."""
    return max(rows // file.layout.block, 1) * file.layout.block


def _together(taken: list[tuple[Batch, list[torch.Tensor]]]) -> Batch:
    """One batch in order."""
    if len(taken) == 1:
        return taken[0][0]
    keys = [torch.cat(found) for found in zip(*(keys for _, keys in taken), strict=True)]
    order = crd.order_of(keys)
    del keys
    coords = [torch.cat(rows)[order] for rows in zip(*(batch[0] for batch, _ in taken), strict=True)]
    return coords, torch.cat([batch[1] for batch, _ in taken])[order]


def _position(keys: Sequence[torch.Tensor], bound: tuple[int, ...], after: bool) -> int:
    """How many tuples of ascending keys come before the bound, or before what follows it."""
    low, high = 0, keys[0].shape[0]
    for key, value in zip(keys, bound, strict=True):
        part = key[low:high].numpy()
        found = np.searchsorted(part, np.int64(value)), np.searchsorted(part, np.int64(value), side="right")
        low, high = low + int(found[0]), low + int(found[1])
    return high if after else low


# -- duplicates ------------------------------------------------------------------------------------------------------


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
