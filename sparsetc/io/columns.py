"""Tables with named columns, of text or Parquet, by pyarrow: read as a whole, or block by block for `pack`.

In: a path, the names of the columns of coordinates or labels, and of that of values. Out: SparseTensors, and labels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsetc.errors import IOFormatError
from sparsetc.io import bounds, memory, numbers, packed, parquet
from sparsetc.support import required
from sparsetc.tensor.pattern import Labels
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.tables import column_of

CSV = ".csv", ".tsv", ".csv.gz", ".tsv.gz"
"""Text tables."""
TEXT_BLOCK = 1 << 18
"""Bytes of a text table that pyarrow reads at once; it takes up to 38 times as many (3 M rows of texts and times)."""
NO_ROWS = "it has no rows, and does not say its shape"
LABEL = 128
"""Bytes that a label takes beside its text, which is there three times: in a set, in an array, and as it is written."""


def is_table(path: str, columns: Sequence[Any] | None) -> bool:
    """Return True for a table that is read by its columns. `IOFormatError` for names of what is no table."""
    if columns is not None and not path.lower().endswith((".parquet", *CSV)):
        raise IOFormatError(f"{path}: columns are those of a .parquet, .csv or .tsv file")
    if columns is not None and (isinstance(columns, str) or not isinstance(columns, Sequence)):
        raise IOFormatError(f"{path}: columns is a list of names, found {columns!r:.80}")
    return columns is not None or path.lower().endswith(CSV)


def read(path: str, columns: Sequence[Any] | None, dtype: torch.dtype | None) -> SparseTensor:
    """Return the tensor of a table, as `sparsetc.read` does."""
    with _opened(path, columns, dtype) as (table, modes, value):
        memory.check(path, "the tensor and its table (stc.pack takes it in parts)", _nbytes(path, table))
        batches = list(_batches(table))
        if not sum(map(len, batches)):
            raise ValueError(NO_ROWS)
        whole = packed.library().concat_tables(batches)
        return numbers.with_dtype(SparseTensor.from_table(whole, modes, value), dtype)


def labels_of(path: str, columns: Sequence[Any] | None) -> Labels:
    """Return the modes of a table and their labels, as `from_table` does; None for a mode of integers.

    A table with labels is read once for this. Only the labels must fit in memory.
    """
    with _opened(path, columns) as (table, modes, _):
        is_integer = packed.library().types.is_integer
        texts = [name for name in modes if not is_integer(table.schema.field(name).type)]
        seen = {name: set[str]() for name in texts}
        widths = dict.fromkeys(texts, 1)
        for batch in _batches(table) if texts else ():
            for name in texts:
                distinct = _distinct(batch, name)[0]
                seen[name].update(distinct.tolist())
                widths[name] = max(widths[name], distinct.itemsize)
            memory.check(path, "its labels", sum((LABEL + 3 * widths[name]) * len(seen[name]) for name in texts))
        return {name: np.array(sorted(seen[name]), str) if name in seen else None for name in modes}


def blocks(
    path: str, columns: Sequence[Any] | None, labels: Labels, dtype: torch.dtype | None
) -> Iterator[SparseTensor]:
    """Yield the tensor of each block of a table that has rows, with labels as numbers."""
    with _opened(path, columns, dtype) as (table, modes, value):
        for batch in filter(len, _batches(table)):
            block = {name: column_of(batch, name) for name in batch.column_names if labels.get(name) is None}
            for name, of in labels.items():
                if of is not None:
                    distinct, numbers_of_rows = _distinct(batch, name)
                    block[name] = np.searchsorted(of, distinct)[numbers_of_rows]
            yield numbers.with_dtype(SparseTensor.from_table(block, modes, value), dtype)


def _nbytes(path: str, table: Any) -> int:
    """Return the bytes that a table and its tensor take: of text, of columns in both, and of the order of nonzeros."""
    if isinstance(table, parquet.Table):
        return table.nnz * (32 * len(table.names) + memory.SORTED) + table.largest_group
    return 4 * os.path.getsize(path)


def _batches(table: Any) -> Iterator[Any]:
    """Yield the blocks of a table; the first one of a text table decides the types of its columns."""
    if isinstance(table, parquet.Table):
        yield from table.blocks()
        return
    arrow = packed.library()
    try:
        yield from (arrow.Table.from_batches([batch]) for batch in table)
    except ValueError as error:  # pyarrow's are such, too
        advice = "; its first rows hold integers: for values give dtype=torch.float64, labels come by pandas.read_csv"
        raise ValueError(f"{str(error)[:180]}{advice if 'error to int64' in str(error) else ''}") from error


@contextmanager
def _opened(
    path: str, columns: Sequence[Any] | None, dtype: torch.dtype | None = None
) -> Iterator[tuple[Any, list[str], str | None]]:
    """Open a table; yield it, the names of its columns of coordinates, and its column of values.

    Whatever is wrong with it, found in the block too, becomes an `IOFormatError`.
    """
    Path(path).stat()
    csv = required("pyarrow.csv", f'{path} is read by pyarrow: pip install "sparsetc[files]"')
    parsing = csv.ParseOptions(delimiter="\t" if ".tsv" in path.lower()[-7:] else ",")
    opened = partial(csv.open_csv, path, csv.ReadOptions(block_size=TEXT_BLOCK), parsing)
    is_text = not path.lower().endswith(".parquet")
    with memory.of_file(path, Exception), closing(opened() if is_text else parquet.Table(path)) as table:
        of_file = table.schema.names
        if columns is None:
            said = ", ".join(of_file)
            raise ValueError(f"name its columns=(*coordinates, value), None for counts of rows; it has {said[:200]}")
        *modes, value = columns
        if not 1 <= len(modes) <= bounds.ORDER:
            raise ValueError(
                f"{len(columns)} columns; a tensor has one a mode, up to {bounds.ORDER}, and one of values"
            )
        names = [name for name in columns if name is not None]
        for name in names:
            if of_file.count(name) != 1:
                raise ValueError(f"no column {name!r:.80} among {', '.join(map(repr, of_file))[:200]}")
        if not is_text:
            table.names = names
            yield table, modes, value
            return
    types = {value: "float64"} if value is not None and dtype is not None and dtype.is_floating_point else None
    converted = csv.ConvertOptions(include_columns=names, column_types=types)
    with memory.of_file(path, Exception), closing(opened(converted)) as table:
        yield table, modes, value


def _distinct(batch: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct labels of a column as text, which keeps the order of times, and the number of each row's."""
    column = batch[name].combine_chunks()
    if hasattr(column, "dictionary_decode"):  # whose labels may not all occur
        column = column.dictionary_decode()
    column = column.dictionary_encode()
    if column.null_count:
        raise ValueError(f"column {name!r} has {column.null_count} missing entries; drop these rows, or fill them")
    distinct = column.dictionary.to_numpy(zero_copy_only=False)
    if distinct.dtype.kind in "biufc":
        raise ValueError(f"column {name!r} holds {distinct.dtype}; coordinates are integers or labels")
    return distinct.astype(str), column.indices.to_numpy()
