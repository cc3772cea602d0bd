"""`pack`: convert a file of any size to a packed file in bounded memory.

In: a file of text or a Parquet file of anyone's, and a limit of memory. Out: a packed file of the same tensor.

Nonzeros that take a small share of the limit are sorted here. More are read in blocks into a table of DuckDB, which
sorts them by all cores, on disk where memory does not hold them. Equal ones come in the order of the source and are
added up in it, so that no sum depends on memory or threads.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sparsetc.errors import DtypeError, IOFormatError, OutOfMemoryError
from sparsetc.io import columns as tables
from sparsetc.io import foreign, lines, memory, mtx, numbers, packed, parquet, table, tns
from sparsetc.io.atomic import replacing
from sparsetc.io.packed import Batch
from sparsetc.options import current, options
from sparsetc.support import FilePath, Ints, required
from sparsetc.support.checks import as_bytes, available_memory, check_memory
from sparsetc.tensor import coords as crd
from sparsetc.tensor.dtypes import INTEGERS, SUMMED_IN, halves, joined, summed_rows, wide
from sparsetc.tensor.pattern import Labels

SHARE = 4
"""Without a limit, one part in this many of the free memory is used."""
FIXED = 96 * 2**20
"""Bytes that do not grow with the file: DuckDB itself, a block of text, a row group and its tensors."""
THREAD = 32 * 2**20
"""Bytes that a thread of DuckDB sorts in, at least."""
HELD = 8
"""Nonzeros are sorted here, not by DuckDB, if they take at most this part of the limit: they are copied with keys."""
WHOLE = 4
"""A source's row group may take at most this part of the limit: its rows are copied, and sorted with others."""

TEXT: dict[str, Any] = {
    kind + zipped: m for kind, m in ((".tns", tns), (".mtx", mtx)) for zipped in ("", *lines.UNZIPPED)
}
"""Modules of text formats by suffix."""
SUFFIXES = (".tns", ".tns.gz", ".mtx", ".mtx.gz", ".npz", ".parquet")
"""Suffixes of files that ``read`` and ``write`` understand."""
READ = dict.fromkeys((*SUFFIXES, *TEXT, *tables.CSV, *foreign.READERS))
"""Suffixes of files that are read, and packed."""


def pack(
    source: FilePath,
    path: FilePath,
    *,
    dtype: torch.dtype | None = None,
    columns: Sequence[str | None] | None = None,
    memory_limit: int | str | None = None,
    progress: bool | None = None,
) -> None:
    """Convert a file that may be larger than memory to a packed file (.parquet): nonzeros sorted, duplicates summed.

    The result does not depend on the limit. What does not fit in memory is written to a folder
    ``.sparsetc-….tmp.spill`` beside ``path``, which is removed when the call ends or is interrupted; a killed process
    leaves it.

    Args:
        source: ``.tns`` or ``.mtx``, also compressed, a ``.parquet`` or ``.csv`` with ``columns``; or ``.npz``, or a
            file of another program as in `read`, whose tensor must fit in a quarter of the limit.
        path: where the packed file will be, ending in ``.parquet``; a file that is there is replaced.
        dtype: of the values; by default as in `read`. Text that states no dtype becomes float32, and is refused if
            float32 does not hold every digit.
        columns: of a .parquet, .csv or .tsv, as in `read`.
        memory_limit: bytes that packing may take, or text as in ``"2GB"``; at least 128 MiB. Default: that of
            ``options``, else a quarter of what is free.
        progress: a progress bar on stderr: None for what takes longer than two seconds when stderr is a
            terminal, True always, False never.

    Raises:
        IOFormatError: an unknown suffix, a source that is not what its suffix promises (file, line, text) or that
            changed while it was read, or integer duplicates whose sum does not fit.
        OutOfMemoryError: the limit is too low.
        DtypeError: values that cannot be read as ``dtype``.
        FileNotFoundError: no such file or folder.
        OSError: the folder cannot be written to, or the disk is full.
        ImportError: pyarrow or DuckDB is not installed.

    Examples:
        >>> stc.write("x.tns", stc.eye(4))
        >>> stc.pack("x.tns", "x.parquet")
        >>> stc.read("x.parquet").nnz
        4
    """
    name, path = memory.text_of(source), memory.text_of(path)
    if not path.lower().endswith(".parquet"):
        raise IOFormatError(f"{path}: a packed file is called .parquet")
    numbers.check_dtype(name, dtype)
    limit = _limit(name, memory_limit)
    suffix = memory.suffix_of(name, READ)
    if suffix == ".npz" or suffix in foreign.READERS:
        tables.is_table(name, columns)
        with memory.CPU, options(memory_limit=limit):
            packed.write(path, foreign.read(name, suffix, dtype))
        return
    # not on the default device in force, on which no ndarray is
    with memory.CPU, memory.named(name, f"packing with a limit of {limit:,} bytes"), replacing(path) as file:
        state, spill = _state(name), f"{file.name}.spill"
        with _opened(name, TEXT.get(suffix), dtype, columns, limit, progress) as opened, ExitStack() as stack:
            order, kind, shape, labels, batches = opened
            largest = [-1] * order
            blocks, held = _blocks(batches, kind, largest), list[list[Tensor]]()
            for block in blocks:
                held.append(block)
                if sum(len(one[0]) * len(one) * 8 for one in held) > (limit - FIXED) // HELD:
                    database = stack.enter_context(_database(name, path, spill, limit))
                    _fill(database, chain(held, blocks), packed.row_group(order))
                    held.clear()
                    in_order = _sorted(database, order)
            if held:
                in_order = _sorted_here(held, order)
            shape = shape or tuple(size + 1 for size in largest)
            if _state(name) != state:
                raise IOFormatError(f"{name}: changed while it was read; pack it again")
            try:
                packed.append(file, shape, kind, _summed(in_order, order, kind), labels)
            except DtypeError as error:
                raise IOFormatError(f"{name}: {error}") from error


def _limit(source: str, limit: Any) -> int:
    """Return the bytes that packing may take."""
    limit, least = current().memory_limit if limit is None else as_bytes(limit), FIXED + THREAD
    if limit is None:
        return max(available_memory(memory.CPU) // SHARE, least)
    check_memory(f"{source}: packing", least, memory.CPU, limit)
    return limit


def _state(source: str) -> tuple[int, int] | None:
    """Return size and time of change of a file on disk, which differ after a change; None for a pipe."""
    status = os.stat(source)
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


# -- sources ----------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(
    path: str, text: Any, dtype: torch.dtype | None, columns: Sequence[str | None] | None, limit: int, show: bool | None
) -> Iterator[tuple[int, torch.dtype, Ints | None, Labels | None, Iterable[Batch]]]:
    """Open a source: of text, by the module of its format; else a table, since what is packed already is refused.

    Yields:
        Its order and dtype; the sizes, None where each is the largest coordinate and one; names of modes and of their
        indices, None where there are none; and its nonzeros, with duplicates, in any order.
    """
    by_columns = tables.is_table(path, columns)
    if text:
        with lines.opened(path, text.COMMENT, show) as reader:
            layout = text.head(reader, dtype, torch.float32)
            yield layout.order, layout.kind or layout.dtype, layout.sizes, None, _text(reader, layout)
    elif by_columns:
        with options(memory_limit=limit // WHOLE):
            labels = tables.labels_of(path, columns)
            blocks = tables.blocks(path, columns, labels, dtype)
            first = next(blocks, None)
            if first is None:
                raise IOFormatError(f"{path}: {tables.NO_ROWS}")
            batches = ((list(x.coords), x.values) for x in chain([first], blocks))
            yield first.order, dtype or first.dtype, None, labels, batches
    else:
        with closing(parquet.PackedFile(path)) as opened:
            raise opened.fault("a packed file already")


def _text(reader: lines.LineReader, layout: table.TableLayout) -> Iterator[Batch]:
    for part in table.parts(reader, layout):
        coords, values = layout.entries(torch.stack([torch.from_numpy(c).long() for c in part.coords]), part.reals)
        yield list(coords), values


# -- sorting ----------------------------------------------------------------------------------------------------------


@contextmanager
def _database(source: str, path: str, folder: str, limit: int) -> Iterator[Any]:
    """Open an empty DuckDB database in memory that spills to a folder of its own; its errors are those of files."""
    duckdb = required("duckdb", 'packing needs DuckDB: pip install "sparsetc[files]"')
    room = limit - FIXED  # of which DuckDB gets less, since it may take somewhat more than it is given
    threads = min(torch.get_num_threads(), room // THREAD)
    os.mkdir(folder, 0o700)
    try:
        settings: dict[str, Any] = {"memory_limit": f"{room * 7 // 8}B", "threads": threads, "temp_directory": folder}
        with closing(duckdb.connect(":memory:", config=settings)) as database:
            database.execute("SET enable_progress_bar = false")  # which would be on stdout
            yield database
    except (duckdb.Error, OSError, RuntimeError) as error:
        if (refusal := _refusal(error, source, path, limit)) is None:
            raise
        raise refusal from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refusal(error: Exception, source: str, path: str, limit: int) -> BaseException | None:
    """Return the package's or Python's error for one of DuckDB's; one of a stream is recognised by its text."""
    said = str(error).partition("\n")[0]
    if "offload data block" in said:  # DuckDB takes the room on the disk for a limit of its own
        return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for what does not fit in memory", path)
    if "Out of Memory" in said or "could not allocate" in said:
        return OutOfMemoryError(f"{source}: packing does not fit in the limit of {limit:,} bytes; raise memory_limit")
    if "interrupted" in said.lower():
        return KeyboardInterrupt()
    if "IO Error" in said or "IOException" in type(error).__name__:
        return OSError(errno.ENOSPC if "No space left" in said else errno.EIO, said, path)
    return None


def _blocks(batches: Iterable[Batch], dtype: torch.dtype, largest: list[int]) -> Iterator[list[Tensor]]:
    """Yield the stored columns of batches of nonzeros, and update the largest coordinates meanwhile."""
    none = torch.empty(0, dtype=SUMMED_IN.get(dtype, dtype))
    yield [*[torch.empty(0, dtype=torch.int64)] * len(largest), *map(torch.from_numpy, packed.columns(none))]
    for coords, values in batches:
        largest[:] = [max(size, int(row.max())) for size, row in zip(largest, coords, strict=True)]
        yield [*coords, *map(torch.from_numpy, packed.columns(values.to(none.dtype)))]


def _sorted_here(held: list[list[Tensor]], order: int) -> Iterator[list[Tensor]]:
    """Yield the columns of all blocks in order, as `_sorted` does."""
    columns = [torch.cat(parts) for parts in zip(*held, strict=True)]
    held.clear()
    sizes = [int(column.max()) + 1 if column.numel() else 1 for column in columns[:order]]
    if not crd.is_coalesced(columns[:order], sizes):
        by_place = crd.lexsort(columns[:order], sizes)
        columns = [column[by_place] for column in columns]
    if columns[0].numel():
        yield from map(list, zip(*(column.split(packed.row_group(order)) for column in columns), strict=True))


def _fill(database: Any, blocks: Iterable[list[Tensor]], rows: int) -> None:
    """Read blocks into the table of a database, some rows or more at a time, since a statement takes longer."""
    arrow = packed.library()
    held = list[Any]()
    exists = False

    def insert() -> None:
        database.register("block", arrow.concat_tables(held))
        database.execute("INSERT INTO nonzeros FROM block" if exists else "CREATE TABLE nonzeros AS FROM block")
        held.clear()

    for block in blocks:
        held.append(arrow.table({f"c{at}": arrow.array(column.numpy()) for at, column in enumerate(block)}))
        if sum(map(len, held)) >= rows:
            insert()
            exists = True
    if held:
        insert()


def _sorted(database: Any, order: int) -> Iterator[list[Tensor]]:
    """Yield the columns of all nonzeros in order, a row group at a time; duplicates in the order of the source."""
    names = ", ".join(f"c{mode}" for mode in range(order))
    for batch in database.sql(f"FROM nonzeros ORDER BY {names}, rowid").to_arrow_reader(packed.row_group(order)):
        yield [torch.from_numpy(column.to_numpy(zero_copy_only=False).copy()) for column in batch.columns]


def _summed(batches: Iterable[list[Tensor]], order: int, dtype: torch.dtype) -> Iterator[Batch]:
    """Yield unique nonzeros, about a row group at a time. Raise `DtypeError` for integer sums that do not fit.

    The sum of the last nonzero of a batch is carried, in its wide dtype, into the next batch.
    """
    held: list[Tensor] = []
    for columns in batches:
        if dtype in INTEGERS:
            columns[order:] = halves(columns[-1])
        if held:
            done = held[0].shape[0] - 1
            done = done if 2 * done > packed.row_group(order) else 0
            if done:
                yield _batch([column[:done] for column in held], order, dtype)
            columns = [torch.cat((before[done:], column)) for before, column in zip(held, columns, strict=True)]
        fresh = crd.starts_of_runs(columns[:order])
        if bool(fresh.all()):
            held = columns
            continue
        number = torch.cumsum(fresh, 0) - 1
        terms = [column.to(wide(column.dtype)) for column in columns[order:]]
        sums = [summed_rows(column, number, int(number[-1]) + 1) for column in terms]
        held = [*(column[fresh] for column in columns[:order]), *sums]
    if held:
        yield _batch(held, order, dtype)


def _batch(columns: list[Tensor], order: int, dtype: torch.dtype) -> Batch:
    coords, terms = columns[:order], columns[order:]
    if dtype in INTEGERS:
        return coords, joined(terms[0], terms[1], dtype)
    return coords, (torch.complex(*terms) if dtype.is_complex else terms[0]).to(dtype)
