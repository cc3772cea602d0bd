"""Files to try readers with: good ones of every kind, some changed to mean the same, others to mean who knows what.

In: a seed. Out: the bytes of a file, and the tensor it must be read as where that is known. Equal seeds make equal
files, as long as scipy and pydata/sparse, whose files are among them, are there or are not.
"""

from __future__ import annotations

import gzip
import io
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

import sparsetc.io as sio
from sparsetc.tensor.sparse_tensor import SparseTensor

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


@dataclass(frozen=True)
class ReaderCase:
    """A file to read.

    Attributes:
        dtype: what to read it as.
        wanted: what must be found in it; None where an error may be found as well.
        text: the text in it, where it is text and whole.
    """

    name: str
    data: bytes
    dtype: torch.dtype | None
    wanted: SparseTensor | None
    text: bytes | None


def draw(random: Random) -> ReaderCase:
    """The file of a seed."""
    kind = random.choice((".tns", ".tns", ".tns.gz", ".mtx", ".mtx", ".mtx.gz", ".npz", ".parquet", *FOREIGN))
    if kind in FOREIGN:
        return _arrays(random, *FOREIGN[kind](random))
    x = _tensor(random, 2 if ".mtx" in kind else random.randint(1, 5), (1, 3, 10, 2000, 2**31, 2**33, 2**62, 2**63 - 1))
    if kind == ".parquet":
        return _packed(random, _written(x, kind), x)
    if kind == ".npz":
        x = _semi_sparse(random, x) if random.random() < 0.3 else x
        return _arrays(random, _written(x, kind), x)
    return _text(random, kind, _written(x, kind.removesuffix(".gz")), x)


def _tensor(random: Random, order: int, sizes: tuple[int, ...]) -> SparseTensor:
    shape = [random.choice(sizes) for _ in range(order)]
    nonzeros = random.choice((0, 1, 2, 10, 60))
    coords = [[min(random.randrange(size), random.choice((0, 5, size))) for _ in range(nonzeros)] for size in shape]
    dtype = random.choice((torch.float32, torch.float64, torch.int64, torch.int8))
    limit = 60 if dtype == torch.int8 else 10**9
    numbers: tuple[Callable[[], float], ...] = (lambda: random.randint(-limit // 60, limit // 60),)
    if dtype.is_floating_point:
        numbers += (lambda: random.gauss(0, 1), lambda: random.choice((0.0, -0.0, 1e-30, -3e38, float("inf"))))
    elif dtype == torch.int64:
        numbers += (lambda: random.choice((2**63 - 1, -(2**63), 2**53 + 1)),)
    values = torch.tensor([random.choice(numbers)() for _ in range(nonzeros)], dtype=dtype)
    held = torch.tensor(coords, dtype=torch.int64).clamp(max=torch.tensor(shape)[:, None] - 1)
    unique = torch.unique(held, dim=1)  # so that no sum depends on an order
    return SparseTensor(unique, values[: unique.shape[1]], shape)


def _semi_sparse(random: Random, x: SparseTensor) -> SparseTensor:
    """With two dense modes, and values that numpy has no dtype for."""
    wide = random.choice((0, 1, 3))
    values = x.values[:, None, None].expand(-1, 2, wide).to(torch.bfloat16)
    return SparseTensor(x.coords, values.contiguous(), (*x.shape, 2, wide))


def _written(x: SparseTensor, suffix: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x{suffix}"
        sio.write(path, x)
        return path.read_bytes()


# -- text -------------------------------------------------------------------------------------------------------------


def _text(random: Random, kind: str, text: bytes, x: SparseTensor) -> ReaderCase:
    text = _spelt(random, text, b"%" if ".mtx" in kind else b"#")
    damaged = random.random() < 0.6
    if damaged:
        text = _damaged(random, text)
    data, whole = text, True
    if kind.endswith(".gz"):
        cut = random.randint(0, len(text)) if random.random() < 0.5 else len(text)
        parts = [text[:cut], text[cut:]] if cut < len(text) else [text]
        data = b"".join(gzip.compress(part, random.randint(0, 9), mtime=0) for part in parts)
        data += b"\0" * random.choice((0, 0, 512))
        if random.random() < 0.3:
            data, damaged, whole = _damaged(random, data), True, False
    return ReaderCase(f"x{kind}", data, x.dtype, None if damaged else x, text if whole else None)


def _spelt(random: Random, text: bytes, comment: bytes) -> bytes:
    """Lines, blanks, comments and line ends that change nothing."""
    rows = text.split(b"\n")[:-1]
    for _ in range(random.choice((0, 1, 5))):
        at = random.randint(1, len(rows))
        rows.insert(at, random.choice((b"", b" \t", comment, comment + b" 7 7 7", b"  " + comment + b"\xff\0")))
    for _ in range(random.choice((0, 1, 5))):
        at = random.randrange(len(rows))
        if at:
            rows[at] = (
                random.choice((b" ", b"\t\t", b"")) + rows[at] + random.choice((b" ", b"\t" + comment, b" " * 300))
            )
            rows[at] = rows[at].replace(b" ", random.choice((b" ", b"  ", b"\t")))
    end = random.choice((b"\n", b"\n", b"\r\n", b"\r"))
    return end.join(rows) + random.choice((end, end, b""))


CHANGES: tuple[Callable[[Random, bytes], bytes], ...] = (
    lambda random, old: bytes([random.randrange(256)]) + old[1:],
    lambda random, old: random.randbytes(len(old)),
    lambda random, old: old[::-1],
    lambda random, old: b"",
    lambda random, old: old + old,
    lambda random, old: random.choice(NASTY) + old,
    lambda random, old: b" " + random.choice(NASTY) + b" " + old,
    lambda random, old: random.choice(REPEATED) * random.choice((2, 50, 3000, 70_000, 300_000)) + old,
)
"""What becomes of a few bytes of a file."""


def _damaged(random: Random, data: bytes) -> bytes:
    """Up to three changes, each anywhere, and perhaps the end missing."""
    for _ in range(random.randint(1, 3)):
        at = random.randint(0, len(data))
        to = at + random.choice((1, 1, 2, 5, 40))
        data = data[:at] + random.choice(CHANGES)(random, data[at:to]) + data[to:]
    return data[: random.randint(0, len(data))] if random.random() < 0.1 else data


# -- packed files -----------------------------------------------------------------------------------------------------


def _packed(random: Random, data: bytes, x: SparseTensor) -> ReaderCase:
    """A packed file, perhaps damaged."""
    damaged = random.random() < 0.7
    return ReaderCase("x.parquet", _altered(random, data) if damaged else data, None, None if damaged else x, None)


def _altered(random: Random, data: bytes) -> bytes:
    """Bytes changed, mostly those that say something."""
    if random.random() < 0.3:
        return _damaged(random, data)
    made = bytearray(data)
    for _ in range(random.randint(1, 3)):
        at = random.choice((random.randrange(len(data) // 2, len(data)), random.randrange(len(data))))
        made[at] = random.choice((0, 1, made[at] ^ 1, 255, random.randrange(256)))
    return bytes(made)


# -- arrays -----------------------------------------------------------------------------------------------------------


def _scipy(random: Random) -> tuple[bytes, SparseTensor]:
    import scipy.sparse

    made = _tensor(random, 2, (1, 3, 10, 2000)).to_scipy().asformat(random.choice(("coo", "csr", "csc", "bsr", "dia")))
    if random.random() < 0.5:
        made = getattr(scipy.sparse, f"{made.format}_matrix")(made)
    file = io.BytesIO()
    scipy.sparse.save_npz(file, made, compressed=random.random() < 0.5)
    return file.getvalue(), SparseTensor.from_scipy(made)


def _pydata(random: Random) -> tuple[bytes, SparseTensor]:
    import sparse

    x = _tensor(random, random.randint(1, 5), (1, 3, 10))
    made: Any = x.to_pydata()
    axes = sorted(random.sample(range(x.order), random.randint(1, max(x.order - 1, 1))))
    if random.random() < 0.5 and x.order > 1:
        made = sparse.GCXS.from_coo(made, compressed_axes=axes)
    file = io.BytesIO()
    sparse.save_npz(file, made, compressed=random.random() < 0.5)
    return file.getvalue(), x


FOREIGN: dict[str, Callable[[Random], tuple[bytes, SparseTensor]]] = {
    name: made for name, made in (("scipy", _scipy), ("sparse", _pydata)) if find_spec(name)
}
"""What writes files of other libraries, for those that are there."""


def _arrays(random: Random, data: bytes, x: SparseTensor) -> ReaderCase:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    wanted: SparseTensor | None = x
    if random.random() < 0.5:
        members, wanted = _exchanged(random, members), None
    random.shuffle(members)
    if random.random() < 0.3:
        members.insert(random.randint(0, len(members)), ("more.npy", random.randbytes(50)))
    file = io.BytesIO()
    method = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
        warnings.simplefilter("ignore", UserWarning)  # of two members with one name
        for name, member in members:
            archive.writestr(zipfile.ZipInfo(name), member, method)  # without the time
    data = file.getvalue()
    if random.random() < 0.4:
        data, wanted = _damaged(random, data), None
    asked = (None, None, torch.float32, torch.float16, torch.int8, torch.complex64)
    dtype = random.choice(asked) if wanted is None else None
    return ReaderCase("x.npz", data, dtype, wanted, None)


def _exchanged(random: Random, members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """One member renamed, gone, damaged, with another header, or with the bytes of another."""
    at = random.randrange(len(members))
    name, member = members[at]
    header = re.sub(
        rb"\d+", lambda _: random.choice((b"0", b"1", b"3", b"8", b"4000000000", b"9" * 19)), member[:128], count=3
    )
    array = random.choice(
        (np.zeros(3), np.array("csr"), np.array([[1]]), np.ones((0, 3)), np.array(["a"]), np.array(2**63))
    )
    other = io.BytesIO()
    np.save(other, array)
    changed: tuple[tuple[str, bytes], ...] = (
        (random.choice(("values.npy", "data.npy", "coords.npy", "format.npy", "shape", "row.npy")), member),
        (name, _damaged(random, member)),
        (name, header + member[128:]),
        (name, random.choice(members)[1]),
        (name, other.getvalue()),
    )
    chosen = random.choice((*changed, None))
    return members[:at] + ([] if chosen is None else [chosen]) + members[at + 1 :]
