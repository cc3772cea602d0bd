"""A text or .npz file of any size made a packed file, in bounded memory: `pack`.

In: a file, and a limit of memory. Out: a packed file of the same tensor, the same bytes whatever the limit.

`sources` reads nonzeros in blocks; `runs` sorts as many as memory holds and keeps them in a folder beside the target
(`folder`), each run a packed file with its duplicates; `merge` reads all runs together in order, and adds up
duplicates, in the order in which the source has them; and what comes is written at once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparsetc.errors import IOFormatError, SparsetcError
from sparsetc.io import memory
from sparsetc.io.atomic import replacing
from sparsetc.io.packing import budget, merge, runs, sources
from sparsetc.io.packing.budget import PackingBudget
from sparsetc.io.packing.folder import Folder
from sparsetc.io.stc_layout import FileLayout
from sparsetc.io.stc_writer import PackedWriter
from sparsetc.support import notices


def pack(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    memory_limit: int | str | None = None,
    fresh: bool = False,
    progress: bool | None = None,
) -> None:
    """Make a packed file (.stc) of a file that may be larger than memory: nonzeros sorted, duplicates summed.

    The result is the same, byte for byte, whatever the limit. A call that was interrupted, even killed, leaves sorted
    runs in a folder beside ``path``; another one for the same source and dtype goes on from them. They take about as
    much disk as the result, and are removed once it is there, which is when it is complete.

    Args:
        source: ``.tns`` or ``.mtx``, either with ``.gz``, or ``.npz``; on disk. An .npz file that `write` made, or
            scipy or pydata/sparse as COO, is read in blocks; of other kinds the tensor must fit in a quarter of the
            limit.
        path: where the packed file will be, ending in ``.stc``; a file that is there is replaced.
        dtype: of the values. By default as in `read`, but that text which does not say its own is refused where float32
            does not hold every digit.
        memory_limit: bytes that packing may take, or text as in ``"2GB"``; at least 32 MiB. Default: that of
            ``options``, else what the interrupted call had, else a quarter of what is free.
        fresh: whether to start anew where an interrupted call could go on.
        progress: a progress bar on stderr: None for long files when stderr is a terminal, True always, False never.

    Raises:
        IOFormatError: an unknown suffix, a source that is not what its suffix promises (file, line, text) or that
            changed while it was read, or integer duplicates whose sum does not fit.
        OutOfMemoryError: the limit is too low.
        DtypeError: values that cannot be read as ``dtype``.
        FileNotFoundError: no such file or folder.
        OSError: the folder cannot be written to, the disk is full (what was sorted stays), or another process packs
            into the same file.
    """
    if not os.fsdecode(path).lower().endswith(".stc"):
        raise IOFormatError(f"{os.fsdecode(path)}: a packed file is called .stc")
    cpu = torch.device("cpu")  # not the default device in force, on which no ndarray is
    with cpu, Folder.claimed(path, fresh) as folder, _room(source, path, folder):
        limit = budget.limit(memory_limit, folder.limit)
        with memory.named(source, lambda: f"packing with a limit of {limit:,} bytes"):
            _pack(source, path, dtype, folder, limit, progress)
        folder.remove()


def _pack(source: Any, path: Any, dtype: torch.dtype | None, folder: Folder, limit: int, show: bool | None) -> None:
    with sources.opened(source, dtype, limit, show) as found:
        share = budget.of(source, limit, found.order, found.dtype)
        about = sources.identity(source, found)
        folder.resume(about, limit)
        runs.sort(found, folder, share)
        if sources.identity(source, found) != about:
            raise IOFormatError(f"{os.fspath(source)}: changed while it was read; pack it again")
        shape = found.shape or runs.shape(folder)
    runs.reduce(folder, shape, found.dtype, share)
    _write(source, path, folder, FileLayout(shape, folder.rows, found.dtype), share, show)


def _write(source: Any, path: Any, folder: Folder, most: FileLayout, share: PackingBudget, show: bool | None) -> None:
    wanted = most.nnz * most.row_bytes > notices.LONG if show is None else show
    with (
        replacing(path) as file,
        runs.opened(folder, folder.runs) as opened,
        notices.bar(most.nnz, "merging", wanted and (show or _watched()), "nonzeros") as at,
    ):
        writer = PackedWriter(file, most)
        batches = _told(merge.merged(opened, most.shape, share), at)
        try:
            for coords, values in merge.summed(batches, most.dtype):
                writer.append(coords, values)
        except SparsetcError as error:
            raise error if isinstance(error, IOFormatError) else IOFormatError(f"{source}: {error}") from error
        writer.finish()


def _watched() -> bool:
    import sys

    return sys.stderr.isatty()


def _told(batches: Iterator[merge.Batch], at: Callable[[int], None]) -> Iterator[merge.Batch]:
    done = 0
    for batch in batches:
        yield batch
        done += batch[1].shape[0]
        at(done)


@contextmanager
def _room(source: Any, path: Any, folder: Folder) -> Iterator[None]:
    """An error of a full disk that says which file it was for, and that the same call can go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        kept = (
            f"; {folder.rows:,} sorted nonzeros stay in {folder.path}: make room and pack again to go on, or remove it"
        )
        reason = f"no space left to pack {os.fspath(source)}{kept if folder.runs else ''}"
        raise OSError(error.errno, reason, os.fspath(path)) from error
