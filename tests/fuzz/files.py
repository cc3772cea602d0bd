"""Files to try readers with, some good, some damaged, and what a reader must do: read what is meant, or say why not.

A file is read as it comes and, but for .npz and .parquet, in blocks of another size, which must give the same; in text
it must be what Python's own ``int`` and ``float`` read there. Any error must be the package's own and name the file.
"""

from __future__ import annotations

import gzip
import io
import math
import re
import resource
import tempfile
import time
import warnings
import zipfile
from pathlib import Path
from random import Random
from typing import NamedTuple
from unittest import mock

import numpy as np
import scipy.sparse
import sparse
import torch
from fuzz.check import Wrong
from fuzz.strategies import Draw, of, one_in
from hypothesis import strategies as st

import sparsetc as stc
from sparsetc.io import lines

NASTY = (
    *b"0 -1 +1 1.0 1e3 9223372036854775807 9223372036854775808 00000000000000000000001".split(),
    *b"-9223372036854775808 -9223372036854775809".split(),
    *b"1e39 -1e400 nan -inf Infinity infinite 1_0 0x10 . - e5 1e 1e-99999".split(),
    *(b"\0", b"\x1c", b"\x85", b"\xa0", b"\xc2\xa0", b"\xff\xfe", b"\r", b"\r\n", b"\n", b"\x0b", b"\x0c"),
    *(b"# shape: 2 3", b"3\n4 5 6\n", b"%%MatrixMarket", b"0." + b"1" * 30, b"0" * 5000),
    *(b"symmetric", b"skew-symmetric", b"complex"),
)
"""Pieces of text that readers of numbers have fallen over."""
REPEATED = (b"\n", b"\r", b" ", b"1", b"#", b"%", b"1 1 1\n")
"""Pieces that long files may consist of."""
ARRAYS = (np.zeros(3), np.array("csr"), np.array([[1]]), np.ones((0, 3)), np.array(["a"]), np.array(2**63))
LAYOUTS = ("coo", "csr", "csc", "bsr", "dia")
SIZES = (3, 1, 10, 2000, 2**31, 2**33, 2**62, 2**63 - 1)
LIMIT = 50_000_000
"""Bytes of the memory limit under which files are read."""
SECONDS, GROWTH = 2.0, 200_000
"""Processor time that a file may take, and kilobytes by which it may raise the largest memory of the process."""


class File(NamedTuple):
    """A file to read.

    Attributes:
        dtype: what to read it as.
        wanted: what must be found in it; None where an error may be found as well.
        text: the text in it, where it is text and whole.
        block: bytes that are read at a time.
    """

    name: str
    data: bytes
    dtype: torch.dtype | None = None
    wanted: stc.SparseTensor | None = None
    text: bytes | None = None
    block: int = 1000


# -- strategies -------------------------------------------------------------------------------------------------------


@st.composite
def files(draw: Draw) -> File:
    """A file of any format."""
    kind = draw(of(".tns", ".mtx", ".tns", ".mtx", ".tns.gz", ".mtx.gz", ".npz", ".parquet", "scipy", "sparse"))
    if kind in ("scipy", "sparse"):
        return _arrays(draw, *_foreign(draw, kind))
    x = _tensor(draw, 2 if ".mtx" in kind else draw(of(2, 1, 3, 4, 5)), SIZES)
    if kind == ".npz" and draw(one_in(3)):  # with dense modes, and values that numpy has no dtype for
        values = x.values[:, None, None].expand(-1, 2, draw(of(1, 0, 3))).to(torch.bfloat16).contiguous()
        x = stc.SparseTensor(x.coords, values, (*x.shape, *values.shape[1:]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x{kind.removesuffix('.gz')}"
        stc.write(path, x)
        data = path.read_bytes()
    return {".npz": _arrays, ".parquet": _packed}.get(kind, _text)(draw, data, x, kind)


def _tensor(draw: Draw, order: int, sizes: tuple[int, ...]) -> stc.SparseTensor:
    shape, r = [draw(of(*sizes)) for _ in range(order)], Random(draw(st.integers(0, 999)))
    dtype, count = draw(of(torch.float32, torch.float64, torch.int64, torch.int8)), draw(of(1, 0, 2, 10, 60))
    special = {torch.int64: (2**63 - 1, -(2**63), 2**53 + 1), torch.int8: (1, 127)}
    special = special.get(dtype, (0.0, -0.0, 1e-30, -3e38, math.inf, r.gauss(0, 1), r.gauss(0, 1)))
    coords = {tuple(min(r.randrange(n), r.choice((0, 5, n))) for n in shape) for _ in range(count)}
    values = torch.tensor([r.choice((r.randint(-99, 99), r.choice(special))) for _ in coords], dtype=dtype)
    return stc.SparseTensor(torch.tensor(sorted(coords)).view(-1, order).long().T, values, shape)


def _damaged(draw: Draw, data: bytes) -> bytes:
    """Up to three changes, each anywhere, and perhaps the end missing."""
    for _ in range(draw(of(1, 2, 3))):
        at = draw(st.integers(0, len(data)))
        old, rest = data[at : at + (size := draw(of(1, 2, 5, 40)))], data[at + size :]
        old = draw(of(old, b"", old + old, old[::-1]))
        repeated = st.builds(bytes.__mul__, of(*REPEATED), of(2, 50, 3000, 70_000, 300_000))
        new = draw(st.one_of(st.binary(max_size=4), of(*NASTY), of(*NASTY).map(lambda b: b" " + b + b" "), repeated))
        data = data[:at] + new + old + rest
    return data[: draw(st.integers(0, len(data)))] if draw(one_in(10)) else data


def _text(draw: Draw, text: bytes, x: stc.SparseTensor, kind: str) -> File:
    text = _spelt(draw, text, b"%" if ".mtx" in kind else b"#")
    damaged, whole = draw(st.booleans()), True
    data = text = _damaged(draw, text) if damaged else text
    if kind.endswith(".gz"):
        cut = draw(st.integers(0, len(text)))
        data = b"".join(gzip.compress(part, 6, mtime=0) for part in (text[:cut], text[cut:]))
        data += b"\0" * draw(of(0, 0, 512))
        if draw(one_in(3)):
            data, damaged, whole = _damaged(draw, data), True, False
    block = draw(of(1000, 1, 2, 3, 7, 30)) * (1 if whole and len(text) < 5000 else 1000)  # small ones take too long
    return File(f"x{kind}", data, x.dtype, None if damaged else x, text if whole else None, block)


def _spelt(draw: Draw, text: bytes, comment: bytes) -> bytes:
    """Lines, blanks, comments and line ends that change nothing."""
    first, *rows = text.split(b"\n")[:-1]
    for _ in range(draw(of(0, 1, 3))):
        line = draw(of(b"", b" \t", comment, comment + b" 7 7 7", b"  " + comment + b"\xff\0"))
        rows.insert(draw(st.integers(0, len(rows))), line)
        at, blank = draw(st.integers(0, len(rows) - 1)), draw(of(b" ", b"  ", b"\t"))
        rows[at] = draw(of(b"", b" ", b"\t\t")) + rows[at] + draw(of(b" ", b"\t" + comment, b" " * 300))
        rows[at] = rows[at].replace(b" ", blank)
    end = draw(of(b"\n", b"\n", b"\r\n", b"\r"))
    return end.join((first, *rows)) + draw(of(end, b""))


def _packed(draw: Draw, data: bytes, x: stc.SparseTensor, kind: str) -> File:
    """A packed file, perhaps damaged, mostly in what says how it is to be read, at its end."""
    if not draw(one_in(3)):
        made, x = bytearray(data), None
        for _ in range(draw(of(1, 2, 3))):
            at = draw(st.one_of(st.integers(len(data) // 2, len(data) - 1), st.integers(0, len(data) - 1)))
            made[at] = draw(st.one_of(of(0, 1, made[at] ^ 1, 255), st.integers(0, 255)))
        data = _damaged(draw, data) if draw(one_in(3)) else bytes(made)
    return File("x.parquet", data, None, x)


def _foreign(draw: Draw, library: str) -> tuple[bytes, stc.SparseTensor]:
    """A file of another library."""
    file, packed = io.BytesIO(), draw(st.booleans())
    x = _tensor(draw, 2 if library == "scipy" else draw(of(2, 1, 3, 5)), (3, 1, 10))
    if library == "scipy":
        made = getattr(scipy.sparse, f"{draw(of(*LAYOUTS))}_{draw(of('array', 'matrix'))}")(x.to_scipy())
        x = stc.SparseTensor.from_scipy(made)
    else:
        made = x.to_pydata()
        if x.order > 1 and draw(st.booleans()):
            made = sparse.GCXS.from_coo(made, compressed_axes=[draw(of(*range(x.order)))])
    (scipy.sparse if library == "scipy" else sparse).save_npz(file, made, compressed=packed)
    return file.getvalue(), x


def _arrays(draw: Draw, data: bytes, x: stc.SparseTensor, kind: str = "") -> File:
    """An archive of arrays in any order, one of them perhaps renamed, gone, damaged, or another."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    wanted, file = None if draw(st.booleans()) else x, io.BytesIO()
    if wanted is None:
        name, member = members.pop(draw(of(*range(len(members)))))
        np.save(file, ARRAYS[draw(of(*range(len(ARRAYS))))])
        number = draw(of(b"0", b"1", b"3", b"8", b"4000000000", b"9" * 19))
        header = re.sub(rb"\d+", number, member[:128], count=draw(of(1, 2, 3))) + member[128:]
        renamed = draw(of("values.npy", "data.npy", "coords.npy", "format.npy", "shape", "row.npy"))
        others = [(renamed, member), *((name, m) for m in (header, file.getvalue(), _damaged(draw, member)))]
        members += draw(of((), *((other,) for other in others), *(((name, m),) for _, m in members)))
    members = draw(st.permutations([*members, *[("more.npy", bytes(50))] * draw(of(0, 0, 1))]))
    file, method = io.BytesIO(), draw(of(zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
        warnings.simplefilter("ignore", UserWarning)  # of two members with one name
        for name, member in members:
            archive.writestr(zipfile.ZipInfo(name), member, method)  # without the time
    data = file.getvalue()
    if draw(one_in(3)):
        data, wanted = _damaged(draw, data), None
    dtype = draw(of(None, None, torch.float32, torch.int8, torch.complex64)) if wanted is None else None
    return File("x.npz", data, dtype, wanted)


# -- the check --------------------------------------------------------------------------------------------------------


def check_file(file: File) -> str:
    """Read a file, and again in blocks of another size; `Wrong` for what a reader must not do."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / file.name
        path.write_bytes(file.data)
        started, memory = time.thread_time(), _peak()  # torch's own threads spin where others wait
        found = _read(path, file.dtype)
        seconds, growth = time.thread_time() - started, _peak() - memory
        with mock.patch.object(lines, "BLOCK", file.block):
            again = found if file.name.endswith((".npz", ".parquet")) else _read(path, file.dtype)
        if isinstance(again, tuple) and "longer than" in str(again):  # a line within one block may be as long as that
            return "refused"
    if seconds > SECONDS or growth > GROWTH:
        raise Wrong(f"cost: {seconds:.1f} s and {growth} KB for a file of {len(file.data)} bytes")
    if file.wanted is not None and _said(found) != _said(file.wanted):
        raise Wrong(f"tensor: {found} is other than what was written: {file.wanted}")
    # Of two faults of a damaged gzip file, one in the text and one in the compression, either may be met first.
    zipped = file.name.endswith(".gz") and isinstance(found, tuple)
    if _said(found)[: 1 if zipped else 4] != _said(again)[: 1 if zipped else 4]:
        raise Wrong(f"blocks: blocks of {file.block} bytes give {again!s:.300}, not {found!s:.300}")
    if isinstance(found, tuple):
        return "refused"
    inside = (found.coords >= 0) & (found.coords < torch.tensor(found.shape[: found.sparse_order])[:, None])
    if not found.is_coalesced or found.values.shape[0] != found.coords.shape[1] or not bool(inside.all()):
        raise Wrong(f"tensor: it is not sorted, does not fit together or has coordinates outside: {found}")
    if file.text is not None:
        _check_meaning(found, file.name, file.text)
    return "checked"


def _peak() -> int:
    """Kilobytes of the largest memory that the process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _read(path: Path, dtype: torch.dtype | None) -> stc.SparseTensor | tuple[type, str]:
    """What is in the file, or the error."""
    try:
        with warnings.catch_warnings(), stc.options(memory_limit=LIMIT):
            warnings.simplefilter("error")
            return stc.read(path, dtype=dtype)
    except (stc.SparsetcError, OSError) as error:
        if path.name not in str(error):
            raise Wrong(f"error: {type(error).__name__} that does not name the file: {error}") from error
        return type(error), str(error).replace(str(path.parent), "")


def _said(x: stc.SparseTensor | tuple[type, str]) -> tuple[object, ...]:
    """What is compared: values as Python writes them, so that 0.0 and -0.0 differ, and NaN is itself."""
    if isinstance(x, tuple):
        return x
    return x.shape, x.dtype, x.coords.tolist(), repr(x.values.tolist())


def _check_meaning(x: stc.SparseTensor, name: str, text: bytes) -> None:
    """Compare with a reader that knows nothing of blocks, for the simplest of each format."""
    rows = re.split(r"\r\n|\r|\n", text.decode("latin-1"))
    fields = [words for row in rows if (words := re.sub("[#%].*" if ".mtx" in name else "#.*", "", row).split())]
    if ".mtx" in name:
        if "general" not in rows[0].lower() or any(word in rows[0].lower() for word in ("complex", "pattern")):
            return
        fields = fields[1:]
    elif fields and len(fields[0]) == 1:
        fields = fields[2:]
    sums: dict[tuple[int, ...], list[float]] = {}
    for *coordinates, value in fields:
        sums.setdefault(tuple(int(c) - 1 for c in coordinates), []).append(float(value))
    found = dict(zip(map(tuple, x.coords.T.tolist()), x.values.tolist(), strict=True))
    if set(found) != set(sums):
        raise Wrong(f"coordinates: {sorted(found)[:3]}, where Python reads {sorted(sums)[:3]}")
    for at, numbers in sums.items():
        if len(numbers) > 1 or (not x.dtype.is_floating_point and abs(numbers[0]) > 2**53):
            continue  # sums are rounded in another way
        wanted = torch.tensor(numbers[0], dtype=torch.float64).to(x.dtype).item()
        if not math.isclose(found[at], wanted, rel_tol=2e-7, abs_tol=2e-45) and found[at] == found[at]:
            raise Wrong(f"values: {found[at]}, where Python reads {wanted}")


def program(file: File) -> str:
    """Lines that read the file again."""
    path = f"path = pathlib.Path(tempfile.mkdtemp()) / {file.name!r}\npath.write_bytes({file.data!r})"
    return f"import pathlib, tempfile, torch, sparsetc as stc\n{path}\nprint(stc.read(path, dtype={file.dtype}))"
