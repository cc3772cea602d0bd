"""SparseTensors of tables: every library's columns, and what is wrong with a column by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sparsetc as stc
from sparsetc.errors import CoordinateError, DtypeError, FormatError, ShapeError

ROWS: dict[str, Any] = {"i": [0, 2, 2, 1], "j": [1, 1, 1, 4], "value": [1.0, 2.0, 3.5, -1.0], "note": list("abcd")}
LIBRARIES = ("dict", "numpy", "pandas", "polars", "pyarrow")


def table(library: str, columns: dict[str, Any]) -> Any:
    if library == "dict":
        return columns
    if library == "numpy":
        arrays = {name: np.asarray(column) for name, column in columns.items()}
        made = np.empty(len(arrays["i"]), [(name, array.dtype) for name, array in arrays.items()])
        for name, array in arrays.items():
            made[name] = array
        return made
    module = pytest.importorskip(library)
    return module.table(columns) if library == "pyarrow" else module.DataFrame(columns)


def read(table: Any, **options: Any) -> stc.SparseTensor:
    return stc.SparseTensor.from_table(table, ["i", "j"], "value", **options)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_table_is_read_and_duplicates_are_summed(library: str) -> None:
    x = read(table(library, ROWS))
    assert (x.shape, x.dtype, x.is_coalesced) == ((3, 5), torch.float64, True)
    assert (x.coords.tolist(), x.values.tolist()) == ([[0, 1, 2], [1, 4, 1]], [1.0, -1.0, 5.5])
    assert read(table(library, ROWS), shape=(9, 7)).shape == (9, 7)
    one = stc.SparseTensor.from_table(table(library, ROWS), ["j"], "i")
    assert (one.dtype, one.to_dense().tolist()) == (torch.int64, [0, 4, 0, 0, 1])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", "uint64"])
@pytest.mark.parametrize("values", ["float32", "int16", "complex64"])
def test_dtypes(library: str, kind: str, values: str) -> None:
    if library in ("polars", "pyarrow") and values == "complex64":
        pytest.skip("has no complex numbers")
    columns = {"i": np.array([3, 0], kind), "j": np.array([1, 2]), "value": np.array([1, 2], values)}
    x = read(table(library, columns))
    assert (str(x.dtype), x.coords.tolist(), x.values.tolist()) == (f"torch.{values}", [[0, 3], [2, 1]], [2, 1])


def test_columns_of_other_kinds() -> None:
    pandas = pytest.importorskip("pandas")
    whole = pandas.DataFrame(ROWS).astype({"i": "Int64", "value": "Float32"})  # which may have missing entries
    assert read(whole).values.tolist() == [1.0, -1.0, 5.5]
    assert read({"i": torch.tensor([0]), "j": torch.tensor([2]), "value": torch.tensor([1.0])}).shape == (1, 3)


FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "floats": ({"i": [0.0, 1.0, 2.0, 3.0]}, FormatError, "column 'i' holds float64; coordinates are integers"),
    "negative": ({"j": [0, -2, 1, 1]}, CoordinateError, "column 'j' holds -2; coordinates are from 0"),
    "large": ({"j": np.array([0, 2**63, 1, 1], np.uint64)}, CoordinateError, f"column 'j' holds {2**63}; "),
    "strings": ({"i": list("abcd")}, FormatError, "column 'i' holds .*; coordinates are integers"),
    "bools": ({"i": [True, False, True, True]}, FormatError, "column 'i' holds bool; coordinates are integers"),
    "words": ({"value": list("abcd")}, FormatError, "column 'value' holds .*; values are numbers"),
    "flags": ({"value": np.arange(4, dtype=np.uint16)}, DtypeError, "found torch.uint16"),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_the_column(library: str, fault: str) -> None:
    change, error, words = FAULTS[fault]
    with pytest.raises(error, match=words):
        read(table(library, {**ROWS, **change}))


@pytest.mark.parametrize("library", LIBRARIES)
def test_columns_and_shapes(library: str) -> None:
    made = table(library, ROWS)
    with pytest.raises(FormatError, match="no column 'k' among 'i', 'j', 'value', 'note'"):
        stc.SparseTensor.from_table(made, ["i", "k"], "value")
    with pytest.raises(FormatError, match="no column 'weight' among"):
        stc.SparseTensor.from_table(made, ["i", "j"], "weight")
    for names in ("i", []):
        with pytest.raises(FormatError, match="a list of names of columns, one a mode"):
            stc.SparseTensor.from_table(made, names, "value")
    with pytest.raises(CoordinateError, match="the size of mode 0 is 2"):
        read(made, shape=(2, 5))
    with pytest.raises(ShapeError, match="has 1 modes"):
        read(made, shape=(3,))
    empty = table(library, {name: np.zeros(0, np.int64) for name in ("i", "j", "value")})
    assert read(empty, shape=(2, 3)).nnz == 0
    with pytest.raises(ShapeError, match="no nonzeros"):
        read(empty)


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
@pytest.mark.parametrize("name", ["i", "value"])
def test_missing_entries(library: str, name: str) -> None:
    holed = {**ROWS, name: [*ROWS[name][:1], None, None, *ROWS[name][3:]]}
    with pytest.raises(FormatError, match=f"column '{name}' has 2 missing entries; drop these rows"):
        read(table(library, holed))


def test_what_is_no_table() -> None:
    for other in (5, np.zeros((3, 3)), [ROWS], None):
        with pytest.raises(FormatError, match="a structured ndarray, a mapping of columns, or a table"):
            read(other)
    with pytest.raises(FormatError, match=r"have different lengths, \[4, 1, 4\]"):
        read({**ROWS, "j": [1]})
    with pytest.raises(FormatError, match=r"column 'j' has shape \(4, 1\)"):
        read({**ROWS, "j": [[1], [2], [3], [4]]})
    with pytest.raises(DtypeError, match="column 'j' is a masked array"):
        read({**ROWS, "j": np.ma.masked_array([1, 2, 3, 4], [0, 1, 0, 0])})
    with pytest.raises(DtypeError, match=r"do.* not fit|overflow|sum"):
        read({"i": [0, 0], "j": [0, 0], "value": np.array([100, 100], np.int8)})
