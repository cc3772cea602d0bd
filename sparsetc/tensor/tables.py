"""Tables that have a column of coordinates for each mode and a column of values.

In: a structured ndarray, a mapping of columns, or a table of pandas, polars or pyarrow. Out: a SparseTensor. No library
of tables is imported: all give their columns by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsetc.errors import CoordinateError, FormatError, SparsetcError
from sparsetc.tensor.inputs import check_plain

if TYPE_CHECKING:
    from sparsetc.tensor.sparse_tensor import SparseTensor


def from_table(
    cls: type[SparseTensor], table: Any, coordinates: Sequence[str], values: str, shape: Sequence[int] | None = None
) -> SparseTensor:
    """From a table with a row a nonzero: a column of coordinates for each mode, and one of values.

    Values of rows that have the same coordinates are summed.

    Args:
        cls: SparseTensor.
        table: a structured ndarray, a mapping of names to columns of the same length, or a table of pandas, polars or
            pyarrow.
        coordinates: names of the columns of coordinates, integers from 0, in the order of the modes.
        values: name of the column of values, of a dtype that values may have.
        shape: sizes of the modes; each is the largest coordinate and one by default.

    Raises:
        FormatError: no such table or column, missing entries, coordinates that are not integers, values that are not
            numbers, or columns of different lengths.
        CoordinateError: a negative coordinate, or one outside ``shape``.
        ShapeError: a shape that is none, or no rows and no shape.
        DtypeError: values of another dtype, or integers whose sum does not fit.

    Examples:
        >>> rides = {"day": [0, 0, 1], "hour": [9, 9, 17], "count": [2.0, 1.0, 5.0]}
        >>> stc.SparseTensor.from_table(rides, ["day", "hour"], "count", shape=(7, 24)).to_dense()[0, 9]
        tensor(3., dtype=torch.float64)
    """
    coordinates = coordinates if isinstance(coordinates, str) else list(coordinates)
    if isinstance(coordinates, str) or not coordinates:
        raise FormatError(f"coordinates must be a list of names of columns, one a mode; found {coordinates!r}")
    columns = [_column(table, name) for name in (*coordinates, values)]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise FormatError(f"columns {', '.join(map(repr, (*coordinates, values)))} have different lengths, {lengths}")
    for name, column in zip(coordinates, columns, strict=False):
        if column.dtype.kind not in "iu" and len(column):
            of = "labels, which pandas.factorize numbers" if column.dtype.kind in "OUST" else str(column.dtype)
            raise FormatError(f"column {name!r} holds {of}; coordinates are integers")
        if len(column) and not 0 <= int(column.min()) <= int(column.max()) < 2**63:
            wrong = column.min() if column.min() < 0 else column.max()
            missing = ", and -1 is what pandas.factorize gives a missing label" if wrong == -1 else ""
            raise CoordinateError(f"column {name!r} holds {wrong}; coordinates are from 0 to 2**63 - 1{missing}")
    if columns[-1].dtype.kind not in "biufc":
        raise FormatError(f"column {values!r} holds {columns[-1].dtype}; values are numbers")
    return cls(np.stack([column.astype(np.int64) for column in columns[:-1]]), columns[-1], shape)


def _column(table: Any, name: str) -> np.ndarray:
    """A column as a contiguous ndarray; FormatError if it is not there, or not all of it is."""
    every = names(table)
    if every.count(name) != 1:
        raise FormatError(f"{every.count(name) or 'no'} column {name!r} among {', '.join(map(repr, every))[:200]}")
    try:
        return _array(table[name], name)
    except SparsetcError:
        raise
    except Exception as error:  # of whatever library the table is of
        said = str(error).partition("\n")[0][:200]
        raise FormatError(f"column {name!r} of a {type(table).__name__} cannot be read: {said}") from error


def _array(column: Any, name: str) -> np.ndarray:
    check_plain(column, f"column {name!r}")
    missing = column.isna().sum() if hasattr(column, "isna") else getattr(column, "null_count", 0)
    missing = missing() if callable(missing) else missing
    if missing:
        raise FormatError(f"column {name!r} has {missing} missing entries; drop these rows, or fill them")
    array = column.to_numpy() if hasattr(column, "to_numpy") else np.asarray(column)
    if array.ndim != 1:
        raise FormatError(f"column {name!r} has shape {array.shape}; it should have an entry a row")
    return np.ascontiguousarray(array)


def names(table: Any) -> list[str]:
    """Names of all columns."""
    if isinstance(table, np.ndarray) and table.dtype.names:
        return list(table.dtype.names)
    for attribute in ("column_names", "columns", "keys"):  # of pyarrow; of pandas and polars; of a mapping
        if hasattr(table, attribute):
            said = getattr(table, attribute)
            return [*(said() if callable(said) else said)]
    raise FormatError(
        "from_table takes a structured ndarray, a mapping of columns, or a table of pandas, polars or pyarrow; found "
        f"{type(table).__name__}"
    )
