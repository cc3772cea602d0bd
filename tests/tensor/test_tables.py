"""SparseTensors of tables: every library's columns, and what is wrong with a column by its name."""

from __future__ import annotations

import copy
import gzip
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sparsetc as stc
from sparsetc.__main__ import main
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
    "bools": ({"i": [True, False, True, True]}, FormatError, "column 'i' holds bool; coordinates are integers"),
    "words": ({"value": list("abcd")}, FormatError, "column 'value' holds .*; values are numbers"),
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


VISITS: dict[str, Any] = {"user": ["bob", "ann", "bob"], "week": [3, 0, 3], "rating": [4.0, 2.0, 5.0]}


def visits() -> stc.SparseTensor:
    return stc.SparseTensor.from_table(VISITS, ["user", "week"], "rating")


@pytest.mark.parametrize("library", ["dict", "pandas", "polars", "pyarrow"])
def test_labels_are_numbered_and_given_back(library: str) -> None:
    made = VISITS if library == "dict" else pytest.importorskip(library)
    whole = made if library == "dict" else made.table(VISITS) if library == "pyarrow" else made.DataFrame(VISITS)
    x = stc.SparseTensor.from_table(whole, ["user", "week"], "rating")
    assert x.to_dense().tolist() == [[2, 0, 0, 0], [0, 0, 0, 9]]
    assert x.labels["user"].tolist() == ["ann", "bob"]
    assert (x.labels["week"], [*x.labels]) == (None, ["user", "week"])
    assert "modes=user, week" in repr(x)
    table = x.to_table()
    assert {name: column.tolist() for name, column in table.items()} == {
        "user": ["ann", "bob"],
        "week": [0, 3],
        "value": [2.0, 9.0],
    }
    if library != "dict":
        back = made.table(table) if library == "pyarrow" else made.DataFrame(table)
        assert torch.equal(stc.SparseTensor.from_table(back, ["user", "week"], "value").to_dense(), x.to_dense())
    counts = stc.SparseTensor.from_table(whole, ["user", "week"])
    assert (counts.dtype, counts.values.tolist()) == (torch.int64, [1, 2])


def test_labels_of_times_and_numbers() -> None:
    pandas = pytest.importorskip("pandas")
    days = pandas.DataFrame({"day": pandas.to_datetime(["2026-01-02", "2026-01-01"]), "kind": ["b", "a"]})
    days["kind"] = days["kind"].astype("category")
    x = stc.SparseTensor.from_table(days, ["day", "kind"])
    assert [label[:10] for label in x.labels["day"]] == ["2026-01-01", "2026-01-02"]
    assert (x.labels["kind"].tolist(), x.to_dense().tolist()) == (["a", "b"], [[1, 0], [0, 1]])
    with pytest.raises(FormatError, match="column 'a' holds no labels that have an order"):
        stc.SparseTensor.from_table({"a": np.array(["x", 5], object)}, ["a"])


def test_labels_stay() -> None:
    x = visits()
    expected = {"user": ["ann", "bob"], "week": None}
    for y in (2 * x, x + x, x.abs(), x.float(), copy.copy(x), x.with_values(-x.values), x.T.T, x.drop(), x.detach()):
        assert {name: None if of is None else of.tolist() for name, of in y.labels.items()} == expected
    assert [*x.T.labels] == ["week", "user"]
    assert visits().labels["user"] is not x.labels["user"]
    named = stc.rand((2, 3), nnz=2).with_labels({"a": [5, 7], "b": None})
    assert named.labels["a"].tolist() == [5, 7]
    for labels in ({"a": [5, 7]}, {"a": [5], "b": None}, {"a": [[5, 7]], "b": None}):
        with pytest.raises(ShapeError, match="a name for each sparse mode"):
            named.with_labels(labels)
    blocks = stc.SparseTensor.from_dense(torch.eye(4), blocksize=(2, 2)).with_labels({"a": list("wxyz"), "b": None})
    assert blocks.to_table()["a"].tolist() == list("wwxxyyzz")


def test_texts_are_labels_of_indices() -> None:
    dense = torch.arange(1.0, 7).view(2, 3)
    x = stc.SparseTensor.from_dense(dense).with_labels({"user": ["ann", "bob"], "item": ["tea", "ale", "tea"]})
    assert x["bob", "ale"].item() == 5
    assert x["ann"].labels["item"].tolist() == ["tea", "ale", "tea"]
    assert x[:, ["ale", "tea"]].to_dense().tolist() == [[2, 1], [5, 4]]  # of equal labels the first
    assert x[np.array(["bob"]), 1:].to_dense().tolist() == [[5, 6]]
    assert "(ann, ale)  2" in str(x)
    assert "(bob, tea)  4" in x._repr_html_()
    for key, error, words in (
        ("eve", CoordinateError, "mode 'user' has no label 'eve'"),
        ((0, ["ale", "rum"]), CoordinateError, "mode 'item' has no label 'rum'"),
    ):
        with pytest.raises(error, match=words):
            x[key]
    for y in (stc.eye(2), stc.eye(2).with_labels({"a": [5, 7], "b": None})):
        with pytest.raises(ShapeError, match="mode 0 has no labels of text, found 'ann' as an index"):
            y["ann"]


NAMES = {"user": list("abc"), "item": list("wxyz"), "week": None}
TAKEN: dict[str, tuple[Callable[[stc.SparseTensor], Any], dict[str, list[str] | None]]] = {
    "slice": (lambda x: x[1:], NAMES | {"user": ["b", "c"]}),
    "steps": (lambda x: x[::-2, ..., 1:], NAMES | {"user": ["c", "a"]}),
    "later mode": (lambda x: x[:, ::3], NAMES | {"item": ["w", "z"]}),
    "one": (lambda x: x[1], {"item": list("wxyz"), "week": None}),
    "index": (lambda x: x[torch.tensor([2, 0, 2])], NAMES | {"user": ["c", "a", "c"]}),
    "later index": (lambda x: x[:, [3, 1]], NAMES | {"item": ["z", "x"]}),
    "mask": (lambda x: x[np.array([True, False, True])], NAMES | {"user": ["a", "c"]}),
    "narrow": (lambda x: x.narrow(1, 2, 2), NAMES | {"item": ["y", "z"]}),
    "new mode": (lambda x: x.unsqueeze(0), {}),
    "sum": (lambda x: x.sum(1), {"user": list("abc"), "week": None}),
    "mean": (lambda x: x.mean((0, 2), output="sparse"), {"item": list("wxyz")}),
    "sum of size 1": (lambda x: x.amax(0, keepdim=True), NAMES | {"user": None}),
    "projected": (lambda x: stc.einsum("uiw->wu", x), {"week": None, "user": list("abc")}),
    "scaled": (lambda x: stc.einsum("uiw,u->uiw", x, torch.ones(3)), NAMES),
    "joined": (lambda x: stc.einsum("uiw,vjw->ij", x, x), {}),
    "joined with names": (lambda x: stc.einsum("uiw,ij->uj", x, OTHER), {"user": list("abc"), "kind": ["k", "l"]}),
    "dense letter": (
        lambda x: stc.einsum("uiw,wr->uir", x, torch.ones(2, 3)),
        {"user": list("abc"), "item": list("wxyz")},
    ),
}
OTHER = stc.rand((4, 2), 0.9).with_labels({"item": list("wxyz"), "kind": ["k", "l"]})


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("blocksize", [None, (1, 2, 2)])
def test_labels_follow_their_modes(name: str, blocksize: Any) -> None:
    dense = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(0))
    x = stc.SparseTensor.from_dense(dense, blocksize=blocksize).with_labels(NAMES)
    function, expected = TAKEN[name]
    labels = {of: None if names is None else names.tolist() for of, names in function(x).labels.items()}
    assert labels == expected


def test_labels_in_a_packed_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    dense, path = torch.rand(3, 4, 2), tmp_path / "x.parquet"
    names = {"user": ["a", "ä", ""], "item": [1.5, 2, -3, 4], "week": None}
    stc.write(path, stc.SparseTensor.from_dense(dense).with_labels(names))
    y = stc.read(path)
    with stc.open_packed(path) as file:
        for labels in (y.labels, file.labels):
            assert {of: None if found is None else found.tolist() for of, found in labels.items()} == names
    torch.testing.assert_close(y.to_dense(), dense)
    stc.write(path, stc.eye(2))
    assert stc.read(path).labels == {}
    with pytest.warns(UserWarning, match=r"a \.tns file holds no labels: write \.npz or \.parquet"):
        stc.write(tmp_path / "x.tns", y)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "its labels"),
        ('[["a", ["x", "y"]]]', "its labels"),
        ('[["a", ["x"]], ["b", null]]', "those of 'a' are not 2 texts or 2 numbers"),
        ('[["a", ["x", 1]], ["b", null]]', "those of 'a' are not 2 texts"),
        ('[["a", [[1], [2]]], ["b", null]]', "those of 'a' are not 2 texts"),
        ('[["a", 3], ["b", null]]', "its labels"),
        ('[["a", null], ["a", null]]', "two modes of one name"),
        ("[" * 9000, "its labels"),
    ],
)
def test_damaged_labels_of_a_packed_file(tmp_path: Path, text: str, words: str) -> None:
    parquet, path = pytest.importorskip("pyarrow.parquet"), tmp_path / "x.parquet"
    stc.write(path, stc.eye(2))
    whole = parquet.read_table(path)
    about = parquet.ParquetFile(path).metadata.metadata
    with parquet.ParquetWriter(path, whole.schema, write_page_checksum=True, store_schema=False) as writer:
        writer.write_table(whole)
        writer.add_key_value_metadata({**about, b"sparsetc.labels": text})
    with pytest.raises(stc.IOFormatError, match=words):
        stc.read(path)


def test_labels_that_take_more_than_the_limit(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "x.parquet"
    stc.write(path, stc.eye(3).with_labels({"a": ["x" * 10_000, "", ""], "b": None}))
    with stc.options(memory_limit=500_000), pytest.raises(stc.OutOfMemoryError, match="the labels"):
        stc.read(path)
    with stc.options(memory_limit=1_000_000):
        assert stc.read(path).labels["a"].tolist()[1:] == ["", ""]


def test_labels_are_saved(tmp_path: Path) -> None:
    x, file = visits(), io.BytesIO()
    torch.save({"x": x, "y": -x}, file)
    file.seek(0)
    stc.write(tmp_path / "x.npz", x)
    loaded = torch.load(file)
    for y in (loaded["x"], loaded["y"], pickle.loads(pickle.dumps(x)), stc.read(tmp_path / "x.npz")):
        assert y.labels["user"].tolist() == ["ann", "bob"]
        assert torch.equal(y.to_dense().abs(), x.to_dense())
    assert loaded["x"].pattern is loaded["y"].pattern
    blocks = stc.SparseTensor.from_dense(torch.eye(4), blocksize=(2, 2)).with_labels({"a": list("wxyz"), "b": None})
    stc.write(tmp_path / "blocks.npz", blocks)
    for y in (pickle.loads(pickle.dumps(blocks)), stc.read(tmp_path / "blocks.npz")):
        assert (y.labels["a"].tolist(), y.blocksize) == (list("wxyz"), (2, 2))
    assert "a, b" in blocks._repr_html_()
    arrays = dict(np.load(tmp_path / "x.npz"))
    for name, wrong in (("labels0", np.array(["ann"])), ("modes", np.array(["user"]))):
        np.savez(tmp_path / "bad.npz", **{**arrays, name: wrong})
        with pytest.raises(stc.IOFormatError, match="a name for each sparse mode"):
            stc.read(tmp_path / "bad.npz")


CSV = "user,week,rating,note\nbob,3,4.0,x\nann,0,2.0,y\nbob,3,5.0,z\n"


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.csv.gz"])
def test_text_tables(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow")
    text = (CSV.replace(",", "\t") if "tsv" in name else CSV).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    x = stc.read(path, columns=["user", "week", "rating"])
    assert torch.equal(x.to_dense(), visits().to_dense())
    assert x.labels["user"].tolist() == ["ann", "bob"]
    assert stc.read(path, columns=["user", "week", "rating"], dtype=torch.float32).dtype == torch.float32
    assert stc.read(path, columns=["week", None]).to_dense().tolist() == [1, 0, 0, 2]
    with pytest.raises(stc.IOFormatError, match=r"name its columns=.*it has user, week, rating, note"):
        stc.read(path)
    with pytest.raises(stc.IOFormatError, match="nobody"):
        stc.read(path, columns=["nobody", "rating"])
    with pytest.raises(FileNotFoundError):
        stc.read(tmp_path / f"missing.{name}", columns=["user", "rating"])


def test_text_tables_are_packed_in_blocks(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("duckdb")
    path = tmp_path / "x.csv"
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.integers(0, 300, (100_000, 2)), rng.integers(0, 9, 100_000)])  # several blocks
    np.savetxt(path, rows, "%d", ",", header="i,j,count", comments="")
    expected = np.zeros((300, 300), np.int64)
    np.add.at(expected, (rows[:, 0], rows[:, 1]), rows[:, 2])
    assert main(["pack", str(path), str(tmp_path / "x.parquet"), "--columns", "i", "j", "count"]) == 0
    assert (stc.read(tmp_path / "x.parquet").to_dense().numpy() == expected).all()
    named = "".join(f"n{i},2026-01-{1 + j % 28:02},{n}\n" for i, j, n in rows[:60_000].tolist())
    path.write_text(f"user,day,count\n{named}late,2025-12-31,1\n")
    columns = ["user", "day", "count"]
    whole, target = stc.read(path, columns=columns), tmp_path / "y.parquet"
    stc.pack(path, target, columns=columns)
    packed = stc.read(target)
    assert torch.equal(packed.coords, whole.coords)
    assert torch.equal(packed.values, whole.values)
    assert {name: of.tolist() for name, of in packed.labels.items()} == {
        name: of.tolist() for name, of in whole.labels.items()
    }
    assert packed.labels["day"][0] == "2025-12-31"
    path.write_text("i,x,count\n1,0.5,1\n")
    for wrong, words in (
        ("x", "coordinates are integers or labels"),
        ("who", "no column 'who' among 'i', 'x', 'count'"),
    ):
        with pytest.raises(stc.IOFormatError, match=words):
            stc.pack(path, target, columns=["i", wrong, "count"])
    path.write_text("i,x,count\n1,a,1\n2,,1\n")
    pyarrow_csv = pytest.importorskip("pyarrow.csv")
    assert pyarrow_csv.read_csv(path)["x"].null_count == 0  # an empty text is a label
    assert stc.read(path, columns=["x", "count"]).labels["x"].tolist() == ["", "a"]
    stc.pack(path, target, columns=["x", "count"])
    assert stc.read(target).labels["x"].tolist() == ["", "a"]
    path.write_text("i,count\n" + "1,2\n" * 70_000 + "1,0.5\n")  # the first block has integers alone
    for function in (stc.read, lambda *args, **named: stc.pack(args[0], target, **named)):
        with pytest.raises(stc.IOFormatError, match=r"'0\.5'; .* for values give dtype=torch\.float64"):
            function(path, columns=["i", "count"])
        function(path, columns=["i", "count"], dtype=torch.float64)
    assert stc.read(target).values.tolist() == stc.read(path, columns=["i", None]).values.mul(2).sub(1.5).tolist()
    path.write_text("i,count\n")
    with pytest.raises(stc.IOFormatError, match=r"x\.csv"):
        stc.pack(path, tmp_path / "y.parquet", columns=["i", "count"])


def test_tensors_of_other_labels_are_not_put_together() -> None:
    """Position 0 of one is ann, and of the other bob."""
    x = stc.SparseTensor.from_table(
        {"user": ["ann", "bob"], "item": ["tea", "milk"], "n": [1.0, 2.0]}, ["user", "item"]
    )
    y = stc.SparseTensor.from_table(
        {"user": ["bob", "cid"], "item": ["tea", "milk"], "n": [1.0, 2.0]}, ["user", "item"]
    )
    for call in (
        lambda: x + y,
        lambda: x * y,
        lambda: torch.maximum(x, y),
        lambda: x > y,
        lambda: stc.where(x > 1, x, y),
        lambda: stc.einsum("ui,uj->ij", x, y),
        lambda: stc.einsum("ui,ui->", x, y),
    ):
        with pytest.raises(stc.ShapeError, match="mode 'user' has other labels"):
            call()
    same = y.with_labels(x.labels)
    assert torch.equal((x + same).to_dense(), x.to_dense() + y.to_dense())
    assert (x @ y.T).shape == (2, 2)  # over items, which are the same
    bare = y.with_labels({"user": None, "item": None})
    assert (bare * x).labels["user"] is None
    assert (x * bare).labels["user"].tolist() == ["ann", "bob"]
    named = stc.einsum("ui,ui->ui", x, bare)
    assert named.labels["user"].tolist() == ["ann", "bob"]
