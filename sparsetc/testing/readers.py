"""Fuzzing of the readers of files: whatever a file holds, a tensor that it means, or an error that says why not.

In: a deadline and a seed. Out: the number of files tried, and a reproducer of each finding. A file is read as it comes
and, but for .npz and .parquet, in blocks of another size; what is found must be the same, and in text it must be what
Python's own ``int`` and ``float`` read there.
"""

from __future__ import annotations

import base64
import math
import re
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from unittest import mock

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

import sparsetc.io as sio
from sparsetc.errors import SparsetcError
from sparsetc.io import lines
from sparsetc.options import options
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.testing.reader_cases import ReaderCase, draw

SECONDS = 2.0
"""Seconds of processor time that a file of a case may take; all are below 1 MB."""
GROWTH = 200_000
"""Kilobytes by which a case may raise the largest memory of the process; most of it is what a process takes once."""
LIMIT = 50_000_000
"""Bytes of the memory limit under which files are read."""


class ReaderFinding(Exception):
    """Something that a reader must not do."""


def fuzz_readers(deadline: float, seed: int, report: Callable[[str], None]) -> int:
    """Read files until ``deadline`` (of `time.monotonic`); returns their number.

    ``report`` is given a reproducer, of at most ten lines of Python, for each distinct finding. Equal seeds try equal
    files in the same order.
    """
    tried, seen = 0, set()
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < deadline:
            found = try_one(seed, tried, Path(folder))
            tried += 1
            if found and found[0] not in seen:
                seen.add(found[0])
                report(found[1])
    return tried


def try_one(seed: int, number: int, folder: Path) -> tuple[str, str] | None:
    """Read the file of that number of a seed, written to ``folder``.

    The kind of what a reader must not do and did, and a reproducer; None where it did nothing of that kind.
    """
    random = Random(f"{seed}, {number}")
    case, block = draw(random), random.choice((1, 2, 3, 7, 30, 1000))
    if case.text is None or len(case.text) >= 5000:  # of damaged or long text small blocks take too long
        block *= 1000
    try:
        check(case, block, folder)
    except ReaderFinding as finding:
        return re.sub(r"\d+|'.*'", "", str(finding)), reproducer(case, block, str(finding))
    return None


def check(case: ReaderCase, block: int, folder: Path) -> None:
    """Read a case, and again in blocks of ``block`` bytes; `ReaderFinding` for what a reader must not do."""
    path = folder / case.name
    path.write_bytes(case.data)
    started, memory = time.thread_time(), _peak()  # torch's own threads spin where others wait
    found = _read(path, case.dtype)
    seconds, growth = time.thread_time() - started, _peak() - memory
    if seconds > SECONDS or growth > GROWTH:
        raise ReaderFinding(f"{seconds:.1f} s and {growth} KB for a file of {len(case.data)} bytes")
    if case.wanted is not None and not (isinstance(found, SparseTensor) and _equal(found, case.wanted)):
        raise ReaderFinding(f"other than what was written: {found}")
    if isinstance(found, SparseTensor):
        _check_tensor(found)
        if case.text is not None:
            _check_meaning(found, case)
    if not case.name.endswith((".npz", ".parquet")):
        with mock.patch.object(lines, "BLOCK", block):
            again = _read(path, case.dtype)
        if not _same(found, again, case.name.endswith(".gz")):
            raise ReaderFinding(f"blocks of {block} bytes give {again!s:.300}, not {found!s:.300}")


def reproducer(case: ReaderCase, block: int, what: str) -> str:
    """Python that reads the file of a case again."""
    data = base64.b85encode(zlib.compress(case.data, 9)).decode()
    return "\n".join(
        (
            f"# {what.splitlines()[0][:300]}",
            "import base64, pathlib, tempfile, torch, warnings, zlib",
            "import sparsetc as stc",
            "from sparsetc.io import lines",
            "warnings.simplefilter('error')",
            f"path = pathlib.Path(tempfile.mkdtemp()) / {case.name!r}",
            f"path.write_bytes(zlib.decompress(base64.b85decode({data!r})))",
            f"for lines.BLOCK in ({lines.BLOCK}, {block}):",
            f"    with stc.options(memory_limit={LIMIT}):",
            f"        print(stc.read(path, dtype={case.dtype}))",
        )
    )


def _peak() -> int:
    """Kilobytes of the largest memory that the process has had; 0 where that is not counted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if resource else 0


def _read(path: Path, dtype: torch.dtype | None) -> SparseTensor | Exception:
    """What is in the file, or the error; `ReaderFinding` for an exception that a reader should not raise."""
    try:
        with warnings.catch_warnings(), options(memory_limit=LIMIT):
            warnings.simplefilter("error")
            return sio.read(path, dtype=dtype)
    except (SparsetcError, OSError) as error:
        if path.name not in str(error):
            raise ReaderFinding(f"{type(error).__name__} that does not name the file: {error}") from error
        return error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ReaderFinding(f"{type(error).__name__} in {where.name}, {Path(where.filename).name}: {error}") from error


def _written(values: torch.Tensor) -> list[str]:
    """Values as Python writes them, so that 0.0 and -0.0 differ, and NaN is itself."""
    return [repr(value) for value in values.tolist()]


def _equal(x: SparseTensor, y: SparseTensor) -> bool:
    same = x.shape == y.shape and x.dtype == y.dtype and torch.equal(x.coords, y.coords)
    return same and _written(x.values) == _written(y.values)


def _same(x: SparseTensor | Exception, y: SparseTensor | Exception, zipped: bool) -> bool:
    if isinstance(x, SparseTensor) and isinstance(y, SparseTensor):
        return _equal(x, y)
    # Of two faults of a damaged gzip file, one in the text and one in the compression, either may be met first.
    return type(x) is type(y) and (zipped or str(x) == str(y))


def _check_tensor(x: SparseTensor) -> None:
    if not x.is_coalesced or x.coords.shape != (x.sparse_order, x.nnz) or x.values.shape[0] != x.nnz:
        raise ReaderFinding(f"no tensor that is sorted and fits together: {x}")
    if x.nnz and not bool(
        (x.coords.amin(1) >= 0).all() and (x.coords.amax(1) < torch.tensor(x.shape[: x.sparse_order])).all()
    ):
        raise ReaderFinding(f"coordinates outside the shape: {x}")


def _check_meaning(x: SparseTensor, case: ReaderCase) -> None:
    """Compare with a reader that knows nothing of blocks, for the simplest of each format."""
    assert case.text is not None
    rows = re.split(r"\r\n|\r|\n", case.text.decode("latin-1"))
    plain = [re.sub("[#%].*" if ".mtx" in case.name else "#.*", "", row).split() for row in rows]
    fields = [row for row in plain if row]
    if ".mtx" in case.name:
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
        raise ReaderFinding(f"coordinates {sorted(found)[:3]}, where Python reads {sorted(sums)[:3]}")
    for at, numbers in sums.items():
        if len(numbers) > 1 or (not x.dtype.is_floating_point and abs(numbers[0]) > 2**53):
            continue  # sums are rounded in another way
        wanted = torch.tensor(numbers[0], dtype=torch.float64).to(x.dtype).item()
        if not math.isclose(found[at], wanted, rel_tol=2e-7, abs_tol=2e-45) and found[at] == found[at]:
            raise ReaderFinding(f"the value {found[at]}, where Python reads {wanted}")
