"""Reading and writing: round trips, what text is understood, and what happens when a file is damaged."""

from __future__ import annotations

import builtins
import gzip
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import LIMITS, ends, every_wide_shape, fits
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetc.io as sio
from sparsetc.errors import DtypeError, FormatError, IOFormatError, ShapeError
from sparsetc.io import atomic, lines, numbers, table
from sparsetc.support import entry
from sparsetc.tensor.dtypes import DTYPES
from sparsetc.tensor.sparse_tensor import SparseTensor

REALS = tuple(d for d in DTYPES if not d.is_complex)


def random_tensor(shape: tuple[int, ...], nnz: int, dtype: torch.dtype = torch.float32) -> SparseTensor:
    rng = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, s, (nnz,), generator=rng) for s in shape])
    values = (
        torch.randint(-5, 5, (nnz,), generator=rng) if not dtype.is_floating_point else torch.randn(nnz, generator=rng)
    )
    values = values.abs() if dtype == torch.uint8 else values
    return SparseTensor(coords, values.to(dtype), shape)


def same(x: SparseTensor, y: SparseTensor) -> bool:
    return (
        x.shape == y.shape
        and x.dtype == y.dtype
        and torch.equal(x.coords, y.coords)
        and bool(torch.isclose(x.values, y.values, rtol=0, atol=0, equal_nan=True).all())
    )


def from_text(folder: Path, text: str | bytes, dtype: torch.dtype | None = None, name: str = "x.tns") -> SparseTensor:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return sio.read(path, dtype=dtype)


# ---- round trips ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", sio.SUFFIXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(tmp_path: Path, suffix: str, dtype: torch.dtype) -> None:
    path = tmp_path / f"x{suffix}"
    x = random_tensor((30, 40), 200, dtype)
    if dtype.is_complex and suffix.startswith(".tns"):
        with pytest.raises(DtypeError, match=r"npz|float32"):
            sio.write(path, x)
        return
    sio.write(path, x)
    assert same(sio.read(path, dtype=dtype), x)
    assert same(sio.read(path), x)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".tns", ".tns.gz", ".npz"])
@pytest.mark.parametrize("shape", [(7,), (4, 5, 6), (3, 1, 2, 9, 4), (2**40, 2**62, 3)])
def test_round_trip_of_any_order(tmp_path: Path, suffix: str, shape: tuple[int, ...]) -> None:
    x = random_tensor(shape, 50)
    sio.write(tmp_path / f"x{suffix}", x)
    assert same(sio.read(tmp_path / f"x{suffix}"), x)


@every_wide_shape
def test_round_trip_of_wide_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    at = ends(shape)
    x = SparseTensor(torch.tensor(at).T, torch.randint(-(2**63), 2**63 - 1, (len(at),)), shape)
    for suffix in sio.SUFFIXES:
        if len(shape) == 2 or ".mtx" not in suffix:
            sio.write(tmp_path / f"x{suffix}", x)
            assert same(sio.read(tmp_path / f"x{suffix}", dtype=torch.int64), x)
    for suffix in (".tns", ".npz"):
        sio.pack(tmp_path / f"x{suffix}", tmp_path / "packed.parquet", dtype=torch.int64)
        assert same(sio.read(tmp_path / "packed.parquet"), x)


@pytest.mark.parametrize("value", LIMITS)
def test_integers_at_the_ends_of_int64(tmp_path: Path, value: int) -> None:
    for name, head in ((".tns", ""), (".mtx", "%%MatrixMarket matrix coordinate integer general\n1 2 2\n")):
        text = f"{head}1 1 {value}\n1 2 +1\n"
        if -(2**63) <= value < 2**63:
            assert from_text(tmp_path, text, torch.int64, f"x{name}").values.tolist() == [value, 1]
        else:
            with pytest.raises(
                IOFormatError, match=rf"line {text.count(chr(10)) - 1}: the value '{value}' does not fit"
            ):
                from_text(tmp_path, text, torch.int64, f"x{name}")
        assert from_text(tmp_path, text, torch.float64, f"x{name}").values.tolist() == [float(value), 1.0]
    x = SparseTensor([[0]], torch.tensor([float(value)], dtype=torch.float64), (1,))
    sio.write(tmp_path / "x.npz", x)
    if value < 0:  # of which the second is the first, rounded
        assert sio.read(tmp_path / "x.npz", dtype=torch.int64).values.tolist() == [-(2**63)]
    else:
        with pytest.raises(IOFormatError, match="does not fit"):
            sio.read(tmp_path / "x.npz", dtype=torch.int64)
    if value == 2**63 - 1:
        assert from_text(tmp_path, f"{value} 1 5\n").shape == (value, 1)
    else:
        with pytest.raises(IOFormatError, match=f"line 1: coordinate '{value}' of mode 0 is not a whole number"):
            from_text(tmp_path, f"{value} 1 5\n")


@pytest.mark.parametrize("suffix", sio.SUFFIXES)
def test_round_trip_of_nothing_and_of_the_special(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    empty = SparseTensor([[], []], torch.zeros(0), (3, 4))
    sio.write(path, empty)
    assert same(sio.read(path), empty)
    odd = SparseTensor([[0, 0, 1, 1, 2], [0, 1, 0, 1, 0]], [math.nan, -math.inf, math.inf, -0.0, 1e-40], (3, 9))
    sio.write(path, odd)
    back = sio.read(path)
    assert same(back, odd)
    assert math.copysign(1, back.values[3].item()) == -1


def test_dense_modes(tmp_path: Path) -> None:
    x = SparseTensor([[0, 4]], torch.arange(6.0).reshape(2, 3).to(torch.bfloat16), (5, 3))
    sio.write(tmp_path / "x.npz", x)
    back = sio.read(tmp_path / "x.npz")
    assert same(back, x)
    assert back.dense_order == 1
    for suffix in (".tns", ".mtx"):
        sio.write(tmp_path / f"x{suffix}", x)
        assert torch.equal(sio.read(tmp_path / f"x{suffix}").to_dense(), x.to_dense().float())


def test_write_takes_what_coerce_takes(tmp_path: Path) -> None:
    x = random_tensor((5, 6), 9)
    sio.write(tmp_path / "x.tns", x.to_torch())
    assert same(sio.read(tmp_path / "x.tns"), x)
    with pytest.raises(FormatError, match="from_dense"):
        sio.write(tmp_path / "x.tns", torch.ones(3))


def test_equal_tensors_make_equal_files(tmp_path: Path) -> None:
    x = random_tensor((5, 6), 9)
    sio.write(tmp_path / "a.tns.gz", x)
    sio.write(tmp_path / "b.tns.gz", x)
    assert (tmp_path / "a.tns.gz").read_bytes() == (tmp_path / "b.tns.gz").read_bytes()


# ---- .tns: what is understood -----------------------------------------------------------------------------------

WANTED = [[[0, 2], [1, 0]], [1.5, -2.0], (3, 2)]


@pytest.mark.parametrize(
    "text",
    [
        "1 2 1.5\n3 1 -2\n",
        "1 2 1.5\n3 1 -2",
        "1\t2\t1.5\n3\t1\t-2.0\n",
        "1 2 1.5\r\n3 1 -2\r\n",
        "  1   2  1.5  \n\n\n   3 1 -2.e0 \n\n",
        "# a comment\n1 2 15e-1\n# another 9 9 9\n3 1 -.2E+1 # after\n",
        "# shape: 3 2\n1 2 +1.5\n3 1 -2\n",
        "2\n3 2\n1 2 1.5\n3 1 -2\n",
        "001 0002 1.50000000000000000000000\n00003 1 -2.0000\n",
        "3 1 -1\n1 2 1.5\n3 1 -1\n",
    ],
)
def test_spellings(tmp_path: Path, text: str) -> None:
    assert same(from_text(tmp_path, text), SparseTensor(*WANTED))
    assert same(from_text(tmp_path, gzip.compress(text.encode()), name="x.TNS.gz"), SparseTensor(*WANTED))


def test_shape_comment_makes_room(tmp_path: Path) -> None:
    assert from_text(tmp_path, "#  shape: 7 9\n1 1 1\n").shape == (7, 9)
    assert from_text(tmp_path, "# shape: 7 9\n").nnz == 0
    assert from_text(tmp_path, "2\n7 9\n").shape == (7, 9)
    assert from_text(tmp_path, "# c\n\n  # shape: 7 9 \r\n# d\n1 1 1\n").shape == (7, 9)


@pytest.mark.parametrize("block", [8, 2**20])
def test_shape_comment_counts_before_the_first_nonzero_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(lines, "BLOCK", block)
    assert from_text(tmp_path, "# c\n1 2 1\n# shape: 9\n3 1 1\n# shape: 9 9\n").shape == (3, 2)


def test_blocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tensor((50, 60, 70), 300)
    sio.write(tmp_path / "x.tns", x)
    for size in (7, 64, 1000):
        monkeypatch.setattr(lines, "BLOCK", size)
        assert same(sio.read(tmp_path / "x.tns"), x)
    monkeypatch.setattr(table, "LINES", 7)
    sio.write(tmp_path / "y.tns", x)
    assert (tmp_path / "x.tns").read_bytes() == (tmp_path / "y.tns").read_bytes()


NUMBERS = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(repr),
    st.floats(width=32).map(repr),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda v: f"{v:.3e}"),
    st.floats(-1e6, 1e6).map(lambda v: f"{v:+.7f}"),
    st.from_regex(r"[+-]?([0-9]{1,12}\.[0-9]{0,12}|\.[0-9]{1,12})([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.sampled_from(["1e0012", "-2.5e-0003", "1e1000"]),
    st.sampled_from(["nan", "NaN", "inf", "-inf", "+Infinity", "1e400", "-0", "0.0", "1E5", "5e-324", "1e-400"]),
)


def column(tokens: list[str], dtype: torch.dtype) -> tuple[np.ndarray, str]:
    """The numbers before the first token that is none, and what is wrong with it."""
    values, _, fault = numbers.column([token.encode() for token in tokens], dtype, dtype_open=False)
    return values.numpy(), fault


@settings(max_examples=300, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=8))
def test_floats_as_python_reads_them(tokens: list[str]) -> None:
    wanted = np.array([float(t) for t in tokens])
    found, fault = column(tokens, torch.float64)
    if any("n" not in token.lower() and math.isinf(float(token)) for token in tokens):
        assert "beyond the largest float64" in fault
        wanted = wanted[: len(found)]
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-99, 99)), min_size=1, max_size=8))
def test_integers_exactly(integers: list[int]) -> None:
    tokens = list(map(str, integers))
    found, fault = column(tokens, torch.int64)
    assert (found.tolist(), fault) == (integers, "")
    if min(integers) > 0:
        coords, fault = table._coordinates([token.encode() for token in tokens], 2**63 - 1)
        assert (coords.tolist(), fault) == ([number - 1 for number in integers], "")


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789+-.eE_/:,xna", min_size=1, max_size=12))
def test_every_token_is_judged_as_python_does(token: str) -> None:
    try:
        wanted = float(token) if "_" not in token else None
    except ValueError:
        wanted = None
    found, fault = column(["1", token, "2"], torch.float64)
    if fault:
        assert len(found) == 1
        assert wanted is None or (math.isinf(wanted) and "n" not in token)
    else:
        assert found[1] == wanted or (math.isnan(found[1]) and wanted is not None and math.isnan(wanted))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(NUMBERS, st.text("0123456789+-.eE x\t\n", min_size=1, max_size=12)), min_size=1, max_size=6),
    st.sampled_from([torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8]),
    st.booleans(),
)
def test_native_tables_are_pythons(
    tmp_path: Path, natively: Callable[[bool], None], tokens: list[str], dtype: torch.dtype, dtype_open: bool
) -> None:
    dtype_open &= dtype in (torch.float32, torch.float64)
    layout = table.TableLayout(2, 1, dtype, (7, 1 << 40), dtype_open=dtype_open)
    lines = [f"{n % 8} {n * 4 * 10**8}  {token}" for n, token in enumerate(tokens, 1)]
    block = ("\n\n".join(lines) + "\n").encode()
    results = []
    for native in (True, False):
        natively(native)
        part, fault = table._parse(block, layout)
        columns = [*part.coords, *(real.numpy() for real in part.reals)]
        results.append((columns, part.rows, part.single, part.lines, fault))
    (found, *said), (expected, *wanted) = results
    assert said == wanted
    for column, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(column, other, strict=True)
        np.testing.assert_array_equal(np.signbit(column), np.signbit(other))


@pytest.mark.parametrize("by_arrow", [True, False])
def test_lines_hold_every_number_in_the_fewest_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_arrow: bool
) -> None:
    generator = np.random.default_rng(0)
    scales = 10.0 ** generator.integers(-14, 21, 3000)
    bits = generator.integers(0, 2**32, 3000, dtype=np.uint32)
    columns = [
        [0.5, -0.0, 0.0, 1e-4, 1e6, 999999.9, 9.999999, 0.1, math.nan, -math.inf, 1e-40, 2.0**-20, 2097152.25, 3.4e38],
        generator.standard_normal(3000) * scales,
        bits.view(np.float32),
        generator.integers(-(10**6), 10**6, 3000) / 8,
        [2**53, -1, 0],
    ]
    with np.errstate(invalid="ignore"):  # of a NaN that signals
        reals = [np.asarray(column, dtype) for column in columns for dtype in (np.float32, np.float64)]
    monkeypatch.setattr(table, "MANY", 0 if by_arrow else 10**9)
    for values in [*reals, np.array([-(2**63) + 1, 0, 2**63 - 1])]:
        coords = np.arange(3 * len(values)).reshape(3, -1) * 7**9
        x = SparseTensor(coords, values, [int(row.max()) + 1 for row in coords])
        sio.write(tmp_path / "x.tns", x)
        y = sio.read(tmp_path / "x.tns")
        assert same(x, y)
        assert bool((torch.signbit(x.values) == torch.signbit(y.values))[~x.values.isnan()].all())
        text = (tmp_path / "x.tns").read_text().splitlines()[2:]
        printed = [line.split()[-1] for line in text]
        for number, value in zip(printed, values, strict=True):
            digits, fewest = (t.partition("e")[0].replace(".", "").strip("-0") for t in (number, str(value)))
            assert len(digits) <= len(fewest)


def test_text_is_written_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tensor((90, 80, 70), 6000)
    sio.write(tmp_path / "x.tns", x)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    sio.write(tmp_path / "y.tns", x)
    assert same(sio.read(tmp_path / "x.tns"), x)
    assert same(sio.read(tmp_path / "y.tns"), x)


@pytest.mark.parametrize("name", ["x.tns", "x.mtx", "x.tns.gz"])
@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        *((n, torch.float32) for n in ("0.1", "3", "16777216", "1.23456e-05", "nan", "-inf", "0.5000000000", "1e38")),
        *(
            (n, torch.float64)
            for n in ("0.1234567", "16777217", "1e39", "1e-40", "1.000000000000001", "3.14159265358979")
        ),
    ],
)
def test_text_without_a_dtype_is_read_as_float32_if_that_holds_every_digit(
    tmp_path: Path, name: str, number: str, dtype: torch.dtype
) -> None:
    text = f"2 1 {number}\n1 1 2\n"
    path, packed = tmp_path / name, tmp_path / "packed.parquet"
    text = f"%%MatrixMarket matrix coordinate real general\n2 1 2\n{text}" if name == "x.mtx" else text
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    values = sio.read(path).values
    torch.testing.assert_close(values, torch.tensor([2, float(number)], dtype=dtype), rtol=0, atol=0, equal_nan=True)
    if dtype == torch.float32:
        sio.pack(path, packed)
        assert sio.read(packed).dtype == dtype
    else:
        with pytest.raises(IOFormatError, match=r"line \d: .*(more digits than|beyond the largest) torch.float32"):
            sio.pack(path, packed)


@pytest.mark.parametrize("number", ["9007199254740993", "-9007199254740993", "9223372036854775807"])
@pytest.mark.parametrize("head", ["", "%%MatrixMarket matrix coordinate integer general\n2 1 2\n"])
def test_an_integer_that_float64_does_not_hold_is_read_as_int64_or_refused(
    tmp_path: Path, head: str, number: str
) -> None:
    path = tmp_path / ("x.mtx" if head else "x.tns")
    path.write_text(f"{head}1 1 1\n2 1 {number}\n")
    for reader in (sio.read, lambda path: sio.pack(path, tmp_path / "packed.parquet")):
        with pytest.raises(
            IOFormatError, match=r"line \d: .* is an integer that float64 does not hold; name the dtype"
        ):
            reader(path)
    assert sio.read(path, dtype=torch.int64).values.tolist() == [1, int(number)]
    path.write_text(f"{head}1 1 1\n2 1 9007199254740994\n")  # which float64 holds
    assert sio.read(path).values.tolist() == [1, 9007199254740994]


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("x.tns", "# dtype: complex64\n1 1 2\n", torch.float64),
        (
            "x.mtx",
            "%%MatrixMarket matrix coordinate complex general\n% dtype: float64\n1 1 1\n1 1 2 0\n",
            torch.complex64,
        ),
    ],
)
def test_a_dtype_that_a_file_cannot_mean_is_refused_unless_another_is_asked_for(
    tmp_path: Path, name: str, text: str, wanted: torch.dtype
) -> None:
    (tmp_path / name).write_text(text)
    for reader in (sio.read, lambda path: sio.pack(path, tmp_path / "packed.parquet")):
        with pytest.raises(DtypeError, match=rf"x\.{name[2:]}.*cannot be read as torch"):
            reader(tmp_path / name)
    assert sio.read(tmp_path / name, dtype=wanted).values.tolist() == [2]


def test_float64_round_trip(tmp_path: Path) -> None:
    x = SparseTensor([list(range(4))], torch.tensor([math.pi, 1 / 3, 1e300, -5e-324], dtype=torch.float64), (4,))
    sio.write(tmp_path / "x.tns", x)
    assert same(sio.read(tmp_path / "x.tns"), x)


def test_int64_values_exactly(tmp_path: Path) -> None:
    x = SparseTensor([[0, 1, 2]], torch.tensor([2**63 - 1, -(2**63), 2**53 + 1]), (3,))
    sio.write(tmp_path / "x.tns", x)
    assert same(sio.read(tmp_path / "x.tns", dtype=torch.int64), x)
    assert from_text(tmp_path, "1 3.0\n2 1e2\n", torch.int64).values.tolist() == [3, 100]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.tns", "1 {}\n2 -3\n"),
        ("x.mtx", "%%MatrixMarket matrix coordinate integer general\n2 2 2\n1 1 {}\n2 1 -3\n"),
        ("x.mtx", "%%MatrixMarket matrix coordinate integer skew-symmetric\n3 3 2\n2 1 {}\n3 1 3\n"),
    ],
)
@pytest.mark.parametrize("number", LIMITS)
def test_integers_around_the_limits_of_int64(tmp_path: Path, number: int, name: str, text: str) -> None:
    skew = "skew" in text
    if fits(number) and not (skew and number == -(2**63)):  # whose negative int64 lacks
        assert number in from_text(tmp_path, text.format(number), torch.int64, name).values.tolist()
        with pytest.raises(IOFormatError, match="three"):  # not what stands before it
            from_text(tmp_path, text.format(number).replace("3\n", "three\n"), torch.int64, name)
    else:
        with pytest.raises(IOFormatError, match=f"{name}.*{number}.* torch.int64"):
            from_text(tmp_path, text.format(number), torch.int64, name)
        with pytest.raises(IOFormatError, match=f"{name}.*{number}.* torch.int64"):
            sio.pack(tmp_path / name, tmp_path / "packed.parquet", dtype=torch.int64)
    values = from_text(tmp_path, text.format(number), torch.float64, name).values.tolist()
    assert float(number) in values
    assert not skew or -float(number) in values


@pytest.mark.parametrize("number", LIMITS)
def test_coordinates_and_sizes_around_the_limits_of_int64(tmp_path: Path, number: int) -> None:
    banner = "%%MatrixMarket matrix coordinate real general\n"
    contents = {"x.tns": f"1 {number} 2.0\n", "x.mtx": f"{banner}{number} {number} 1\n1 {number} 2.0\n"}
    for name, content in contents.items():
        if number == 2**63 - 1:
            x = from_text(tmp_path, content, name=name)
            assert (x.coords.tolist(), x.shape[1]) == ([[0], [number - 1]], number)
        else:
            words = "sizes from 0 to 2\\*\\*63 - 1" if name == "x.mtx" else f"{number}.* from 1 to 2\\*\\*63 - 1"
            with pytest.raises(IOFormatError, match=words):
                from_text(tmp_path, content, name=name)


# ---- .tns: what is refused, and where ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 2 3.0\n# c\n\n1 2 3 4.0\n", "line 4: expected 3 fields, 2 coordinates and a value, found 4: '1 2 3 4.0'"),
        ("1 2 3.0\n1 2\n", "line 2: expected 3 fields.*found 2: '1 2'"),
        ("1 2 3\n1 2 3 4\n1 2\n", "line 2: expected 3 fields"),
        ("1 2\n3 1 2 1 2 3\n", "line 2: expected 2 fields"),
        ("5\n6\n", "line 1: expected coordinates and a value, found 1"),
        ("0\n", "line 1: expected coordinates and a value, found 1"),
        ("# shape: 3 4 5\n1 2 3\n", "line 2: expected 4 fields, 3 coordinates and a value, found 3"),
        ("3\n3 4 5\n1 2 3\n", "line 3: expected 4 fields"),
        ("1 2 3.0\n0 2 3.0\n", "line 2: coordinate '0' of mode 0 is not a whole number from 1 to 2.*: '0 2 3.0'"),
        ("1 -2 3.0\n", "line 1: coordinate '-2' of mode 1 is not a whole number from 1"),
        ("1 2.5 3.0\n", "line 1: coordinate '2.5' of mode 1 is not a whole number"),
        (
            "1 9223372036854775808 3.0\n",
            "line 1: coordinate '9223372036854775808' of mode 1 is not.* from 1 to 2\\*\\*63 - 1",
        ),
        ("1 99999999999999999999 3\n", "line 1: coordinate '99999999999999999999'.* from 1 to 2\\*\\*63 - 1"),
        ("# shape: 4 4\n4 4 1\n4 5 1\n", "line 3: coordinate '5' of mode 1 is not a whole number from 1 to 4"),
        ("1 2 three\n", "line 1: the value 'three' is not a number"),
        ("1 2 1_0\n", "line 1: the value '1_0'"),
        ("1 2 1.2.3\n", "line 1: the value '1.2.3'"),
        ("1 2 .\n", "line 1: the value"),
        ("1 2 1e\n", "line 1: the value"),
        ("1 x 3.0\n", "line 1: coordinate 'x' of mode 1"),
        (b"1 1 1\n1 2 \x00\n", "line 2: a control character"),
        (b"1 1 1\n1 2\x0e3\n", "line 2: a control character"),
        (b"1 1 1\n1 2\x1f3\n", "line 2: a control character"),
        (b"1 1 1\n1 \xff 2\n", "line 2: coordinate"),
        ("1 1 1\n" + "9 " * 200 + "\n", "line 2: expected 3 fields.*\\.\\.\\.'"),
        ("", "no nonzeros"),
        ("# just a comment\n\n", "no nonzeros"),
        ("\n   \n", "no nonzeros"),
        ("# shape: 9999999999999999999 2\n", "2\\*\\*63"),
        ("1" * 5000 + "\n1\n", "line 1: expected"),
    ],
)
def test_faults_are_located(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(IOFormatError, match=words) as caught:
        from_text(tmp_path, text)
    assert "x.tns" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_fault_far_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK", 4096)
    rows = [f"{i} {i} 1.5" for i in range(1, 5001)]
    rows[4321] = "1 2 3 4"
    with pytest.raises(IOFormatError, match=r"line 4322: .*'1 2 3 4'"):
        from_text(tmp_path, "\n".join(rows))
    with pytest.raises(IOFormatError, match="line 4322: "):
        from_text(tmp_path, gzip.compress("\n".join(rows).encode()), name="x.tns.gz")


@pytest.mark.parametrize(("dtype", "value"), [(torch.int8, "128"), (torch.int64, "2.5"), (torch.int32, "nan")])
def test_values_that_do_not_fit(tmp_path: Path, dtype: torch.dtype, value: str) -> None:
    with pytest.raises(IOFormatError, match=f"line 2: the value '{value}' does not fit torch.int"):
        from_text(tmp_path, f"1 1 1\n1 2 {value}\n", dtype)


def test_tns_dtype_refused(tmp_path: Path) -> None:
    for dtype in (torch.complex64, torch.uint16):
        with pytest.raises(DtypeError):
            from_text(tmp_path, "1 1 1\n", dtype)


# ---- damaged files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".tns.gz", ".mtx.gz", ".npz"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_truncated_files(tmp_path: Path, suffix: str, keep: float) -> None:
    path = tmp_path / f"x{suffix}"
    sio.write(path, random_tensor((50, 60), 900))
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])
    with pytest.raises(IOFormatError, match=f"x{suffix}"):
        sio.read(path)


@pytest.mark.parametrize("suffix", sio.SUFFIXES)
def test_noise_is_no_tensor(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes())
    with pytest.raises(IOFormatError, match=f"x{suffix}"):
        sio.read(path)


def test_flipped_bytes_never_pass_for_something_else(tmp_path: Path) -> None:
    path = tmp_path / "x.tns.gz"
    sio.write(path, random_tensor((50, 60), 900))
    raw = path.read_bytes()
    for at in range(20, len(raw), len(raw) // 12):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x55]) + raw[at + 1 :])
        with pytest.raises(IOFormatError):
            sio.read(path)


def test_suffixes_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(IOFormatError, match=r"\.tns, \.tns\.gz, \.mtx, \.mtx\.gz, \.npz"):
        sio.read(tmp_path / "x.txt")
    with pytest.raises(IOFormatError):
        sio.write(tmp_path / "x.gz", random_tensor((2, 2), 1))
    for suffix in sio.SUFFIXES:
        with pytest.raises(FileNotFoundError):
            sio.read(tmp_path / f"missing{suffix}")


@pytest.mark.parametrize("suffix", sio.SUFFIXES)
def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"x{suffix}"
    sio.write(path, random_tensor((5, 6), 9))
    old = path.read_bytes()

    def fails(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic.os, "fsync", fails)
    with pytest.raises(KeyboardInterrupt):
        sio.write(path, random_tensor((5, 6), 20))
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_failure_in_the_middle_of_writing(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with pytest.raises(TypeError), atomic.replacing(target) as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_writing_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.tns").write_text("1 1\n")
    (tmp_path / "link.tns").symlink_to(tmp_path / "real.tns")
    sio.write(tmp_path / "link.tns", random_tensor((5, 6), 9))
    assert (tmp_path / "link.tns").is_symlink()
    assert sio.read(tmp_path / "real.tns").shape == (5, 6)


def test_matrix_market_needs_no_scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    sio.write(tmp_path / "x.mtx", random_tensor((3, 4), 5))
    assert sio.read(tmp_path / "x.mtx").shape == (3, 4)


# ---- .mtx and .npz ----------------------------------------------------------------------------------------------

BANNER = "%%MatrixMarket matrix"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("coordinate real general\n% c\n2 3 3\n1 1 1.5\n2 3 -2\n1 1 1\n", [[2.5, 0, 0], [0, 0, -2]]),
        ("coordinate integer symmetric\n2 2 2\n1 1 4\n2 1 3\n", [[4, 3], [3, 0]]),
        ("coordinate real skew-symmetric\n2 2 1\n2 1 3\n", [[0, -3], [3, 0]]),
        ("coordinate pattern general\n2 2 2\n1 2\n2 1\n", [[0, 1], [1, 0]]),
        ("coordinate complex hermitian\n2 2 2\n1 1 1 0\n2 1 0 5\n", [[1, -5j], [5j, 0]]),
        ("coordinate real general\r\n\r\n2 2 1\r\n\r\n 1 2 -1e1\r\n\r\n", [[0, -10], [0, 0]]),
    ],
)
def test_matrix_market(tmp_path: Path, text: str, wanted: list[list[Any]]) -> None:
    x = from_text(tmp_path, f"{BANNER} {text}", name="x.mtx")
    assert x.dtype == (torch.complex64 if "complex" in text else torch.float32)
    assert x.to_dense().tolist() == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{BANNER} coordinate real general\n2 2 2\n1 1 1\n3 1 7\n", "line 4: coordinate '3' of mode 0 .*: '3 1 7'"),
        (f"{BANNER} coordinate real general\n2 2 2\n1 1 1\n", "truncated.* 2 entries, the file has 1"),
        (f"{BANNER} coordinate real general\n50 60 2\n1 1 1\n1 2 2\n1 3 3\n", "too long.* 2 entries, the file has 3"),
        (f"{BANNER} coordinate real general\n2 2\n1 1 1\n", "sizes"),
        (f"{BANNER} array real general\n2 2\n1\n0\n3\n4\n", "dense matrix"),
        (f"{BANNER} coordinate real general\n2 2 1\n1 1 x\n", "line 3: the value 'x' is not a number: '1 1 x'"),
        (
            f"{BANNER} coordinate real general\n2 2 1\n% c\n1 1\n",
            "line 4: expected 3 fields, 2 coordinates and a value, found 2: '1 1'",
        ),
        (
            f"{BANNER} coordinate pattern general\n2 2 1\n1 1 5\n",
            "line 3: expected 2 fields, 2 coordinates and no value, found 3",
        ),
        (f"{BANNER} coordinate quaternion general\n2 2 1\n1 1 5\n", "line 1: .*quaternion"),
        ("hello\n", "line 1: .*banner.*'hello'"),
        ("", "MatrixMarket"),
        (f"{BANNER} coordinate real general\n2 2 999999999999999\n1 1 1\n", "truncated"),
    ],
)
def test_matrix_market_faults(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(IOFormatError, match=words) as caught:
        from_text(tmp_path, text, name="x.mtx")
    assert "x.mtx" in str(caught.value)


def test_matrix_market_refusals(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="matrix"):
        sio.write(tmp_path / "x.mtx", random_tensor((2, 3, 4), 5))
    text = f"{BANNER} coordinate complex general\n1 1 1\n1 1 1 0\n"
    with pytest.raises(DtypeError, match="complex"):
        from_text(tmp_path, text, torch.float32, name="x.mtx")
    with pytest.raises(IOFormatError, match=r"line 3: the value .1\.5. does not fit torch.int8"):
        from_text(tmp_path, f"{BANNER} coordinate real general\n1 1 1\n1 1 1.5\n", torch.int8, name="x.mtx")


def test_matrix_market_as_scipy_has_it(tmp_path: Path) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    for dtype in (torch.float64, torch.complex128, torch.int64):
        x = random_tensor((30, 40), 200, dtype)
        sio.write(tmp_path / "x.mtx", x)
        assert same(SparseTensor.from_scipy(scipy_io.mmread(tmp_path / "x.mtx")), x)
        scipy_io.mmwrite(tmp_path / "y.mtx", x.to_scipy())
        assert same(sio.read(tmp_path / "y.mtx", dtype=dtype), x)
    square = random_tensor((20, 20), 60, torch.complex128).to_scipy()
    for matrix in (square + square.T, square - square.T, square + square.conj().T, square):
        scipy_io.mmwrite(tmp_path / "y.mtx", matrix)  # finds the symmetry itself
        back = sio.read(tmp_path / "y.mtx", dtype=torch.complex128)
        np.testing.assert_array_equal(back.to_dense().numpy(), matrix.toarray())


def test_npz_of_others(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, coords=np.array([[0, 1], [1, 2]], np.int32), values=np.ones(2, np.float32), shape=np.array([2, 3]))
    assert same(sio.read(path), SparseTensor([[0, 1], [1, 2]], [1.0, 1.0], (2, 3)))
    assert sio.read(path, dtype=torch.float64).dtype == torch.float64


def test_npz_is_small(tmp_path: Path) -> None:
    x = SparseTensor([[0, 255], [0, 3]], [1.0, 2.0], (256, 300))
    sio.write(tmp_path / "x.npz", x)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as arrays:
        assert arrays["coords"].dtype == np.uint8
        assert str(arrays["dtype"]) == "float32"


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"coords": np.zeros((1, 1), int)}, "no array values among coords"),
        ({"coords": np.array([[5]]), "values": np.ones(1), "shape": np.array([2])}, "size of mode 0 is 2"),
        ({"coords": np.array([[0, 1]]), "values": np.ones(1), "shape": np.array([2])}, "2 columns"),
        ({"coords": np.array([[0]]), "values": np.ones(1), "shape": np.array(2)}, "a size for each of at most 64"),
        ({"coords": np.array([[0]]), "values": np.array([{}]), "shape": np.array([2])}, "pickle"),
        ({"coords": np.array([[0]]), "values": np.ones(1), "shape": np.array([2]), "dtype": "bfloat16"}, "uint16"),
    ],
)
def test_npz_faults(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(IOFormatError, match=words) as caught:
        sio.read(tmp_path / "x.npz")
    assert "x.npz" in str(caught.value)


def test_npy_under_another_name(tmp_path: Path) -> None:
    with open(tmp_path / "x.npz", "wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(IOFormatError, match="single array"):
        sio.read(tmp_path / "x.npz")


# ---- the progress bar -------------------------------------------------------------------------------------------


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tensor((5, 6), 9)
    sio.write(tmp_path / "x.tns", x)
    assert same(sio.read(tmp_path / "x.tns", progress=True), x)
    assert same(sio.read(tmp_path / "x.tns", progress=False), x)
    with entry.bar(3, "title", True, "things") as at:
        at(2)
        at(3, "another title")
    assert capsys.readouterr().out == ""
    imported = builtins.__import__

    def without_tqdm(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tqdm"):
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tqdm)
    with pytest.warns(UserWarning, match="without tqdm"), entry.bar(2, "title", True) as at:
        at(1)
    with entry.bar(2, "title") as at:
        at(1)
    assert capsys.readouterr().err == ""
