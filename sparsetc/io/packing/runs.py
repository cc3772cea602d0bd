"""Sorted runs: as many nonzeros as memory holds, in order, in a file; fewer runs where there are too many.

In: blocks of a source. Out: runs in a folder, packed files whose nonzeros are in order but not unique. Equal nonzeros
stay in the order of the source, within a run and from run to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from sparsetc.io.atomic import replacing
from sparsetc.io.packing import merge
from sparsetc.io.packing.budget import PackingBudget
from sparsetc.io.packing.folder import Folder, RunsPlace, SortedRun
from sparsetc.io.packing.sources import PackingSource, Piece
from sparsetc.io.stc import PackedFile
from sparsetc.io.stc_layout import FileLayout
from sparsetc.io.stc_writer import PackedWriter
from sparsetc.tensor import coords as crd


def sort(source: PackingSource, folder: Folder, share: PackingBudget) -> None:
    """Read what is left of a source into runs; a run is kept as soon as it is written."""
    if folder.done:
        return
    held: list[Piece] = []
    rows = 0
    for piece in source.pieces(folder.place):
        if held and rows + piece.values.shape[0] > share.run:
            _keep(held, folder, source.dtype, share)
            rows = 0
        held.append(piece)
        rows += piece.values.shape[0]
    if held:
        _keep(held, folder, source.dtype, share)
    folder.done = True
    folder.save()


def shape(folder: Folder) -> tuple[int, ...]:
    """The smallest sizes that hold all runs."""
    sizes: list[tuple[int, ...]] = []
    for run in folder.runs:  # one after the other, since there may be more than can be open
        with opened(folder, [run]) as files:
            sizes.append(files[0].shape)
    return tuple(map(max, zip(*sizes, strict=True)))


def reduce(folder: Folder, shape: tuple[int, ...], dtype: torch.dtype, share: PackingBudget) -> None:
    """Merge neighbouring runs until no more are left than can be merged together."""
    while len(folder.runs) > share.fan_in:
        for first in range(-(-len(folder.runs) // share.fan_in)):
            # each turn leaves one run in place of as many, so the next group begins one further on
            group = folder.runs[first : first + share.fan_in]
            if len(group) == 1:
                break
            rows = sum(run.rows for run in group)
            with opened(folder, group) as files:
                made = _written(
                    folder, FileLayout(shape, rows, dtype, share.block, False), merge.merged(files, shape, share)
                )
            folder.replace(first, first + len(group), SortedRun(*made, group[-1].place))


@contextmanager
def opened(folder: Folder, runs: Iterable[SortedRun]) -> Iterator[list[PackedFile]]:
    """The files of runs, open within the block."""
    with ExitStack() as stack:
        yield [stack.enter_context(PackedFile(folder.path / run.name)) for run in runs]


def _keep(held: list[Piece], folder: Folder, dtype: torch.dtype, share: PackingBudget) -> None:
    """One run of the blocks held, which are let go."""
    place: RunsPlace = held[-1].place
    coords, values = _joined(held)
    sizes = tuple(int(row.max()) + 1 for row in coords)
    batch = _in_order(coords, values, sizes)
    made = _written(folder, FileLayout(sizes, values.shape[0], dtype, share.block, False), batch)
    folder.runs.append(SortedRun(*made, place))
    folder.save()


def _joined(held: list[Piece]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """All blocks as one, int64 coordinates a mode; a mode of the blocks is let go when it is copied."""
    values = torch.cat([piece.values for piece in held])
    modes = [piece.coords for piece in held]
    held.clear()
    coords = []
    for _ in range(len(modes[0])):
        coords.append(torch.cat([rows.pop(0) for rows in modes]).long())
    return coords, values


def _in_order(coords: list[torch.Tensor], values: torch.Tensor, sizes: tuple[int, ...]) -> Iterator[merge.Batch]:
    """One batch of nonzeros in order, mode by mode: the writer asks for each once."""
    if not crd.is_sorted_unique(crd.sort_keys(coords, sizes)):
        order = crd.lexsort(coords, sizes)
        values = values[order]
        for mode in range(len(coords)):
            coords[mode] = coords[mode][order]
    yield coords, values


def _written(folder: Folder, layout: FileLayout, batches: Iterator[merge.Batch]) -> tuple[str, int, int]:
    """(name, nonzeros, checksum of the header) of a new run."""
    path: Path = folder.new()
    with replacing(path) as file:
        writer = PackedWriter(file, layout)
        for coords, values in batches:
            writer.append(coords, values)
        writer.finish()
    with PackedFile(path) as made:
        return path.name, made.nnz, made.crc
