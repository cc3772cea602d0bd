"""Tables that have a column of coordinates or labels for each mode and a column of values.

In: a structured ndarray, a mapping of columns, or a table of pandas, polars or pyarrow. Out: a SparseTensor, and the
other way round a mapping of columns. No library of tables is imported: all give, and take, their columns by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsetc.errors import CoordinateError, FormatError, ShapeError, SparsetcError
from sparsetc.tensor.attributes import Attributes, Sparse
from sparsetc.tensor.convert import expand_dense, to_numpy
from sparsetc.tensor.inputs import check_plain
from sparsetc.tensor.pattern import Labels


def from_table(
    cls: type[Sparse],
    table: Any,
    coordinates: Sequence[str],
    values: str | None = None,
    shape: Sequence[int] | None = None,
) -> Sparse:
    """Make a tensor of a table with a row a nonzero: columns of coordinates or labels, and one of values.

    Values of rows with equal coordinates are summed. Text and times are labels: they are numbered in their order, and
    `SparseTensor.labels` returns them.

    Args:
        cls: SparseTensor.
        table: a structured ndarray, a mapping of names to columns of the same length, or a table of pandas, polars or
            pyarrow.
        coordinates: names of the columns of coordinates, integers from 0 or labels, in the order of the modes.
        values: name of the column of values; None counts rows, in int64.
        shape: sizes of the modes; by default the largest coordinate + 1.

    Raises:
        FormatError: no such table or column, missing entries, coordinates that are neither integers nor labels, values
            that are not numbers, or columns of different lengths.
        CoordinateError: a negative coordinate, or one outside ``shape``.
        ShapeError: an invalid shape, or neither rows nor a shape.
        DtypeError: values of another dtype, or integers whose sum does not fit.

    Examples:
        >>> rides = {"day": [0, 0, 1], "hour": [9, 9, 17], "count": [2.0, 1.0, 5.0]}
        >>> stc.SparseTensor.from_table(rides, ["day", "hour"], "count", shape=(7, 24)).to_dense()[0, 9]
        tensor(3., dtype=torch.float64)
        >>> visits = {"user": ["bob", "ann", "bob"], "page": ["a", "a", "a"]}
        >>> x = stc.SparseTensor.from_table(visits, ["user", "page"])
        >>> x.labels["user"].tolist(), x.to_dense().tolist()
        (['ann', 'bob'], [[1], [2]])
    """
    modes = [] if isinstance(coordinates, str) else list(coordinates)
    if not modes:
        raise FormatError(f"coordinates must be a list of names of columns, one a mode; found {coordinates!r}")
    columns = [column_of(table, name) for name in modes]
    columns.append(np.ones(len(columns[0]), np.int64) if values is None else column_of(table, values))
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise FormatError(f"columns {', '.join(map(repr, (*modes, values)))} have different lengths, {lengths}")
    labels: Labels = dict.fromkeys(modes)
    for mode, name in enumerate(modes):
        if columns[mode].dtype.kind in "OUSTM":
            labels[name], columns[mode] = _numbered(columns[mode], name)
    for name, column in zip(modes, columns, strict=False):
        if column.dtype.kind not in "iu" and len(column):
            raise FormatError(f"column {name!r} holds {column.dtype}; coordinates are integers or labels")
        if len(column) and not 0 <= int(column.min()) <= int(column.max()) < 2**63:
            wrong = column.min() if column.min() < 0 else column.max()
            missing = ", and -1 is what pandas.factorize gives a missing label" if wrong == -1 else ""
            raise CoordinateError(f"column {name!r} holds {wrong}; coordinates are from 0 to 2**63 - 1{missing}")
    if columns[-1].dtype.kind not in "biufc":
        raise FormatError(f"column {values!r} holds {columns[-1].dtype}; values are numbers")
    x = cls(np.stack([column.astype(np.int64) for column in columns[:-1]]), columns[-1], shape)
    return with_labels(x, labels)


def _numbered(column: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The labels in a column, each once and in order, and the number of each row's."""
    try:
        labels, numbers = np.unique(column, return_inverse=True)
        return labels.astype(str), numbers
    except (TypeError, ValueError) as error:  # of texts and numbers in one column, or of lists
        raise FormatError(f"column {name!r} holds no labels that have an order: {error}") from None


def labels_of(x: Attributes) -> Labels:
    """Return the labels of each sparse mode by the mode's name, in order; None for a mode that has numbers alone.

    Labels stay with the modes through operators, new values, copies, slices and index tensors, sums, sparse results of
    einsums, another device, and ``.npz`` and ``.parquet`` files. A tensor without labels has an empty mapping.
    """
    return dict(x.pattern.labels)


def with_labels(x: Sparse, labels: Mapping[str, Sequence[Any] | np.ndarray | None]) -> Sparse:
    """Name the sparse modes, and label their indices.

    Args:
        x: of which the values are shared.
        labels: a name for each sparse mode, in their order, and as many texts or numbers as the mode is long, or None.

    Raises:
        ShapeError: another number of names than modes, or of labels than indices.

    Examples:
        >>> x = stc.eye(2).with_labels({"user": ["ann", "bob"], "week": None})
        >>> x.T
        SparseTensor(shape=(2, 2), nnz=2, density=0.5, dtype=torch.float32, device=cpu, modes=week, user)
    """
    arrays = {str(name): None if of is None else np.asarray(of) for name, of in labels.items()}
    sizes = x.shape[: x.sparse_order]
    fitting = [of is None or of.shape == (size,) for of, size in zip(arrays.values(), sizes, strict=False)]
    if len(arrays) != len(sizes) or not all(fitting):
        forms = ", ".join(f"{name}: {None if of is None else of.shape}" for name, of in arrays.items())
        raise ShapeError(f"labels are a name for each sparse mode, of sizes {sizes}, and as many labels; found {forms}")
    pattern = x.pattern.bare()
    pattern.labels = {n: a if a is None or a.dtype.kind in "iufU" else a.astype(str) for n, a in arrays.items()}
    return type(x)._make(pattern, x.values)


def to_table(x: Attributes) -> dict[str, np.ndarray]:
    """Return a mapping of columns with a row a nonzero: labels or coordinates of each mode, and ``value``.

    ``pandas.DataFrame``, ``polars.DataFrame`` and ``pyarrow.table`` take the mapping as it is. Columns of modes without
    a name are called ``i0``, ``i1``, and so on. Dense modes and blocks are expanded to rows.

    Raises:
        DtypeError: values are bfloat16, which numpy lacks.

    Examples:
        >>> stc.eye(2).with_labels({"user": ["ann", "bob"], "week": None}).to_table()
        {'user': array(['ann', 'bob'], dtype='<U3'), 'week': array([0, 1]), 'value': array([1., 1.], dtype=float32)}
    """
    coords, values, _ = to_numpy(expand_dense(x))
    named = [*x.pattern.labels.items()]
    named += [(f"i{mode}", None) for mode in range(len(named), len(coords))]
    columns = {name: row if of is None else of[row] for (name, of), row in zip(named, coords, strict=True)}
    return {**columns, "value": values}


def column_of(table: Any, name: str) -> np.ndarray:
    """Return a column as a contiguous ndarray. Raise `FormatError` if it is missing or has missing entries."""
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
        raise FormatError(f"column {name!r} has shape {array.shape}; it should have one value a row")
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
