"""Files of packed chunks give what they were written of, or are refused; what fails leaves nothing half done."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import random
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from cases import TILED
from safetensors import safe_open
from test_stream import EQUATIONS, PLANS, assert_same, operands, tensor

import sparsetc as stc
from sparsetc.codegen.programs import Programs
from sparsetc.streaming import engine, store
from sparsetc.streaming.compiler import Compiler
from sparsetc.streaming.cutting import ALIGNED, DTYPES


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,j->ki", "ijk,jr,ks->irs", "ijk->"])
def test_saved_and_opened(plan: str, equation: str, tmp_path: Path) -> None:
    x, dense = tensor(5 if equation.startswith("ijklm") else 3, 900), operands(equation)
    try:
        expected = stc.einsum(equation, x, *dense, plan=plan)
    except stc.PlanError:
        pytest.skip("the plan is not for this einsum")
    path = tmp_path / "x.safetensors"
    with stc.stream_kernel(equation, x, *dense, plan=plan, chunk_bytes=24_576 if plan in TILED else 4096) as s:
        s.save(path)
        chunks, nbytes = s.chunks, s.nbytes
    for _ in range(2):
        with stc.open_stream(path) as s:
            assert (s.chunks, s.nbytes, s.nnz) == (chunks, nbytes, s.nnz)
            assert_same(s(*dense), expected)
            assert_same(s(*dense), expected)
            s.save(path)  # over the file that it reads


@pytest.mark.parametrize("name", EQUATIONS)
def test_packed_to_a_file(name: str, tmp_path: Path) -> None:
    equation, path = EQUATIONS[name], tmp_path / "x.safetensors"
    x, dense = tensor(), operands(equation)
    expected = stc.einsum(equation, x, *dense)
    limit = sum(d.numel() * 4 for d in dense) * 2 + 9000
    with stc.stream_kernel(equation, x, *dense, plan="coo", file=path, memory_limit=limit) as s:
        assert_same(s(*dense), expected)
    for again in (limit, None):
        with stc.open_stream(path, memory_limit=again, order="given") as s:
            assert s.device_bytes <= (again or 1 << 40)
            assert_same(s(*dense), expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex128, torch.int64])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    x, dense = tensor(dtype=dtype), operands("ijk,jr,kr->ir", dtype)
    with stc.stream_kernel("ijk,jr,kr->ir", x, *dense, file=tmp_path / "x", chunk_bytes=4096) as s:
        expected = s(*dense)
    with stc.open_stream(tmp_path / "x") as s:
        assert_same(s(*dense), expected)


@pytest.fixture(autouse=True)
def _short_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RESERVED", 1 << 16)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of several chunks, of a sparse result."""
    path = tmp_path / "x.safetensors"
    x = tensor(5, 2000)
    with stc.stream_kernel("ijklm,k->ijlm", x, torch.ones(9), chunk_bytes=4096, file=path) as s:
        assert s.chunks > 3
    return path


def streamed(path: Path) -> object:
    with stc.open_stream(path) as s:
        return s(torch.ones(9))


def test_any_reader_of_safetensors_has_the_arrays(saved: Path) -> None:
    with safe_open(saved, "pt") as opened:
        names = [name for name in opened.keys() if not name.endswith(".gap")]  # noqa: SIM118
        assert len(names) == len(set(names)) > 9
        assert {name.rpartition(".")[2] for name in names} >= {"values", "rows"}
        values = [opened.get_tensor(name) for name in names if name.endswith(".values")]
        assert sum(v.double().sum().item() for v in values) == tensor(5, 2000).values.sum().item()
        rows = opened.get_tensor("rows")
    with stc.open_stream(saved) as s:
        assert torch.equal(rows, s(torch.ones(9)).coords)


def test_a_header_that_needs_more_than_was_left_for_it(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BLOCK", 3000)
    saved = request.getfixturevalue("saved")
    expected, path = streamed(saved), tmp_path / "y.safetensors"
    monkeypatch.setattr(store, "RESERVED", store.PAGE)
    with stc.open_stream(saved) as s:
        s.save(path)
    assert path.stat().st_size < saved.stat().st_size
    assert_same(streamed(path), expected)
    path.unlink()
    with stc.open_stream(saved) as s:
        monkeypatch.setattr(store, "MOST", 5000)
        with pytest.raises(stc.PlanError, match="larger chunk_bytes="):
            s.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_truncated_files_are_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in (0, 1, 7, 8, 4095, 4096, 5000, store.RESERVED, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:length])
        with pytest.raises(stc.IOFormatError, match=r"x\.safetensors: "):
            streamed(saved)
    saved.write_bytes(whole + b"\0")
    with pytest.raises(stc.IOFormatError, match="truncated or extended"):
        streamed(saved)


def test_altered_files_are_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    text = whole.index(b"    ", 8)
    for at in [
        *range(0, 300, 3),
        *range(300, text, 131),
        text,
        store.RESERVED - 1,
        *range(store.RESERVED, len(whole), 463),
    ]:
        changed = bytearray(whole)
        changed[at] ^= 16
        saved.write_bytes(changed)
        with pytest.raises(stc.IOFormatError, match=r"x\.safetensors: "):
            streamed(saved)
    saved.write_bytes(whole)
    streamed(saved)


class Parts:
    """A file in parts, which can be changed: its arrays, what it says of the stream, and its bytes."""

    def __init__(self, path: Path) -> None:
        self.path, whole = path, path.read_bytes()
        begin = 8 + int.from_bytes(whole[:8], "little")
        self.arrays, self.data = json.loads(whole[8:begin]), bytearray(whole[begin:])
        self.stream = json.loads(self.arrays.pop("__metadata__")["stream"])["Contents"]

    def write(self, text: str | None = None) -> None:
        """Write it again, its checksums right."""
        if text is None:
            text = json.dumps({"Contents": self.stream})
        metadata = {"stream": text, "crc32": str(zlib.crc32(text.encode()))}
        header = json.dumps({"__metadata__": metadata, **self.arrays}).encode()
        self.path.write_bytes(len(header).to_bytes(8, "little") + header + self.data)

    def sums(self) -> None:
        """Make the checksums those of the bytes."""
        at = 0
        for number, chunk in enumerate([*self.stream["chunks"], None]):
            arrays = chunk["Chunk"]["parts"] if chunk else []
            sizes = [n * DTYPES[name].itemsize for own in arrays for name, n in own["StoredPart"]["arrays"]]
            nbytes = sum(-(-size // ALIGNED) * ALIGNED for size in sizes) if chunk else len(self.data) - at
            blocks = range(at, at + nbytes, store.BLOCK)
            self.stream["checksums"][number] = [
                zlib.crc32(self.data[b : b + store.BLOCK][: at + nbytes - b]) for b in blocks
            ]
            at += nbytes

    def recipe(self) -> dict:
        return self.stream["recipe"]["Recipe"]

    def chunk(self, number: int = 0) -> dict:
        return self.stream["chunks"][number]["Chunk"]

    def part(self) -> dict:
        return self.stream["variants"][0]["Variant"]["parts"][0]["Part"]

    def storage(self) -> dict:
        return self.part()["storage"]["Storage"]

    def schedule(self) -> dict:
        return self.part()["schedule"]["Schedule"]

    def stored(self) -> list:
        return self.chunk()["parts"][0]["StoredPart"]["arrays"]

    def swap(self, one: str, other: str) -> None:
        self.arrays[one], self.arrays[other] = self.arrays[other], self.arrays[one]


CHANGES = {
    "no chunks": lambda f: f.stream.pop("chunks"),
    "no recipe": lambda f: f.stream.pop("recipe"),
    "no checksums": lambda f: f.stream.pop("checksums"),
    "a list in place of the stream": lambda f: setattr(f, "stream", []),
    "another recipe": lambda f: f.recipe().update(more=1),
    "a size below 0": lambda f: f.recipe()["shapes"][0].__setitem__(0, -1),
    "a dtype that is none": lambda f: f.recipe().update(dtype="float7"),
    "another dtype": lambda f: f.recipe().update(dtype="float64"),
    "values beyond the file": lambda f: f.arrays["0.0.values"].update(data_offsets=[1 << 40, 1 << 41]),
    "values before the file": lambda f: f.arrays["0.0.values"].update(data_offsets=[-8, 8]),
    "values in the place of others": lambda f: f.swap("0.0.values", "1.0.values"),
    "an array fewer": lambda f: f.stored().pop(),
    "an array that is not listed": lambda f: f.arrays.pop("0.0.values"),
    "an array that no program reads": lambda f: f.arrays.update(more=f.arrays["0.0.values"]),
    "an array twice": lambda f: f.stored().append(f.stored()[0]),
    "arrays of another type": lambda f: f.stored()[0].__setitem__(0, "I64"),
    "arrays of a type that is none": lambda f: f.stored()[0].__setitem__(0, "I7"),
    "arrays of fewer elements": lambda f: f.stored()[0].__setitem__(1, f.stored()[0][1] - 1),
    "arrays of half an element": lambda f: f.stored()[0].__setitem__(1, f.stored()[0][1] + 0.5),
    "arrays of fewer elements than none": lambda f: f.stored()[0].__setitem__(1, -64),
    "an array of two dimensions": lambda f: f.arrays["0.0.values"]["shape"].insert(0, 1),
    "more items": lambda f: f.chunk()["parts"][0]["StoredPart"].update(items=1 << 40),
    "fewer items than none": lambda f: f.chunk()["parts"][0]["StoredPart"].update(items=-1),
    "more values": lambda f: f.stored()[-1].__setitem__(1, 1 << 40),
    "nonzeros that are no number": lambda f: f.chunk().update(nnz="7"),
    "rows that are not numbered": lambda f: f.recipe().update(numbered=False),
    "dense operands of any size": lambda f: f.recipe()["shapes"].__setitem__(1, [1 << 62]),
    "a precision that is none": lambda f: f.recipe().update(precision="some"),
    "an equation that is none": lambda f: f.recipe().update(equation="ijkl,k->ijl"),
    "a form that is none": lambda f: f.recipe().update(output="some"),
    "rows beyond the result": lambda f: f.chunk().update(first=10**6),
    "rows before the result": lambda f: f.chunk().update(first=-1),
    "programs that are not there": lambda f: f.chunk().update(variant=7),
    "fewer rows": lambda f: f.chunk(-1).update(rows=f.chunk(-1)["rows"] - 1),
    "no rows": lambda f: [c["Chunk"].update(rows=0, first=0) for c in f.stream["chunks"]],
    "rows without end": lambda f: f.chunk(-1).update(rows=1 << 60),
    "a chunk too many": lambda f: f.stream["chunks"].append(f.stream["chunks"][0]),
    "another format": lambda f: f.part().update(format="absent"),
    "another storage": lambda f: f.storage().update(lanes=3),
    "modes of another tensor": lambda f: f.storage().update(leaf=[0, 1]),
    "a text that ends a comment": lambda f: f.schedule().update(blocks=[['"""\nimport os', 8]]),
    "a tree that is none": lambda f: f.schedule().update(tree={"Tree": "import os"}),
    "a tree that is text": lambda f: f.schedule().update(tree="X"),
    "another schedule": lambda f: f.schedule().update(unroll=f.schedule().get("unroll", 1) + 1),
    "a record of another kind": lambda f: f.stream["variants"][0]["Variant"].update(parts=[{"Plan": f.part()}]),
    "a part that is a schedule": lambda f: f.stream["variants"][0]["Variant"].update(parts=[f.part()["schedule"]]),
    "a digest of other programs": lambda f: f.stream.update(digests=["0"]),
    "an unknown field": lambda f: f.schedule().update(more=1),
}


def test_a_mode_that_is_not_there_is_named(saved: Path) -> None:
    parts = Parts(saved)
    parts.storage()["leaf"].append(5)
    parts.write()
    with pytest.raises(stc.IOFormatError, match="has 6 modes, the tensor 5: there is no mode 5"):
        streamed(saved)


@pytest.mark.parametrize("name", CHANGES)
def test_headers_that_do_not_fit_are_refused(name: str, saved: Path) -> None:
    parts = Parts(saved)
    parts.write()
    streamed(saved)
    CHANGES[name](parts)
    parts.write()
    with pytest.raises(stc.IOFormatError, match=r"x\.safetensors: "):
        streamed(saved)


ODD = [0, 1, -1, 7, 256, 2**31, 2**40, 2**63, -(2**63), 10**30, 1.5, float("nan"), None, True, "7", "", "I64", "F64"]
ODD += ["coo", "Plan", "sparse", "dense", "ijk->", '"""', "\0", [], {}, [[]]]


def alter(tree, r: random.Random) -> None:
    """Drop, repeat or replace something anywhere in what JSON holds."""
    at = tree
    while True:
        key = r.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if not at[key] or not isinstance(at[key], dict | list) or not r.randrange(5):
            break
        at = at[key]
    old, kind = at[key], r.randrange(6)
    if kind == 0:
        del at[key]
    elif kind == 1 and isinstance(at, list):
        at.insert(key, copy.deepcopy(old))
    elif isinstance(old, int) and kind < 5:
        at[key] = r.choice((old + 1, old - 1, 2 * old, -old, not old))
    else:
        at[key] = r.choice(ODD)


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows", "hls", "mm-csf"])
@pytest.mark.parametrize("equation", ["ijk,kr->ijr", "ijk,jr,kr->ir"])
def test_files_that_were_altered_anywhere_are_read_or_refused(equation: str, plan: str, tmp_path: Path) -> None:
    path, r, refused = tmp_path / "x.safetensors", random.Random(f"{equation} {plan}"), 0
    dense = operands(equation)
    try:
        stc.stream_kernel(equation, tensor(), *dense, plan=plan, chunk_bytes=32_768, file=path).close()
    except stc.PlanError:
        pytest.skip("the plan is not for this einsum")
    whole = path.read_bytes()
    for _ in range(40):
        path.write_bytes(whole)
        parts = Parts(path)
        for _ in range(r.choice((1, 1, 3))):
            alter(r.choice((parts.arrays, parts.stream, parts.stream)), r)
        if parts.stream.keys() >= {"chunks", "checksums"}:
            with contextlib.suppress(KeyError, TypeError, IndexError, AttributeError, ValueError):
                parts.sums()
        parts.write()
        try:
            with stc.open_stream(path, memory_limit="1GiB") as s:
                s(*dense)
        except stc.SparsetcError as error:
            assert "x.safetensors: " in str(error) or isinstance(error, stc.OutOfMemoryError)  # noqa: PT017
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows", *TILED])
def test_nothing_is_read_outside_of_what_is_there(plan: str, tmp_path: Path) -> None:
    equation, path, r = "ijk,kr->ijr", tmp_path / "x.safetensors", random.Random(plan)
    x, dense = tensor(), operands(equation)
    try:
        stc.stream_kernel(equation, x, *dense, plan=plan, chunk_bytes=32_768, file=path).close()
    except stc.PlanError:
        equation = "ijk,jr,kr->ir"
        dense = operands(equation)
        stc.stream_kernel(equation, x, *dense, plan=plan, chunk_bytes=32_768, file=path).close()
    whole, refused = path.read_bytes(), 0
    for _ in range(40):
        path.write_bytes(whole)
        parts = Parts(path)
        for place in [entry["data_offsets"] for name, entry in parts.arrays.items() if not name.endswith(".gap")]:
            if place[0] < place[1]:
                parts.data[r.randrange(*place)] = r.choice((1, 127, 128, 255))
        parts.sums()
        parts.write()
        try:
            with stc.open_stream(path) as s:
                s(*dense)
        except stc.IOFormatError as error:
            assert "x.safetensors: " in str(error)  # noqa: PT017
            assert "checksum" not in str(error)  # noqa: PT017
            refused += 1
    assert refused


@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 100_000, '{"a":' * 100_000, "9" * 5000, "nan", "", "null", "\0"])
def test_headers_that_are_none(text: str, saved: Path) -> None:
    parts = Parts(saved)
    parts.write(text)
    with pytest.raises(stc.IOFormatError, match=r"x\.safetensors: "):
        stc.open_stream(saved)
    saved.write_bytes(len(text).to_bytes(8, "little") + text.encode() + parts.data)
    with pytest.raises(stc.IOFormatError, match=r"x\.safetensors: "):
        stc.open_stream(saved)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")  # nobody writes: opening it would wait for ever
    with pytest.raises(stc.IOFormatError, match=r"x\.safetensors: .* must be a file on disk"):
        stc.open_stream(tmp_path / "x.safetensors")


def test_a_file_that_is_shortened_while_it_is_open(saved: Path) -> None:
    with stc.open_stream(saved) as s:
        s(torch.ones(9))
        os.truncate(saved, store.RESERVED + 6000)
        with pytest.raises(stc.IOFormatError, match="shortened while it was open"):
            s(torch.ones(9))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    stc.write(path, tensor())
    with pytest.raises(stc.IOFormatError, match=r"x\.parquet: "):
        stc.open_stream(path)
    with pytest.raises(FileNotFoundError):
        stc.open_stream(tmp_path / "absent")
    with pytest.raises(stc.PlanError, match="streams must be"):
        stc.open_stream(path, streams=0)


def test_programs_of_another_version_are_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = Compiler.lowered
    monkeypatch.setattr(Compiler, "lowered", lambda self, one: lowered(self, one)[:0])
    with pytest.raises(stc.IOFormatError, match="pack them again"):
        streamed(saved)


def test_files_for_a_gpu_are_no_files_for_the_cpu(saved: Path) -> None:
    with pytest.raises(stc.DeviceError, match="packed for torch"):
        stc.open_stream(saved, backend="triton")


@pytest.mark.parametrize("plan", TILED)
def test_infinities_need_a_file_without_tiles(plan: str, tmp_path: Path) -> None:
    x, (b, c), tiles = tensor(), operands("ijk,jr,kr->ir"), stc.plans.Plan(plan, options=(("threshold", 0),))
    with stc.stream_kernel("ijk,jr,kr->ir", x, b, c, plan=tiles, file=tmp_path / "x"):
        pass
    with stc.open_stream(tmp_path / "x") as s, pytest.raises(stc.PlanError, match="infinities"):
        s(b * float("inf"), c)


# -- failures ---------------------------------------------------------------------------------------------------------
class Disk:
    """A disk that is full after so many bytes."""

    def __init__(self, opened, room: int) -> None:
        self._opened, self._room = opened, room

    def write(self, data) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._opened.write(data)

    def __getattr__(self, name: str):
        return getattr(self._opened, name)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> Iterator[None]:
    """Chunk number `at` of a run fails as it is started."""
    bind, count = Programs.bind, [0]

    def bound(self, *arrays):
        call = bind(self, *arrays)

        def run(*given):
            count[0] += 1
            if count[0] > at:
                raise error
            call(*given)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(Programs, "bind", bound)
        yield


@pytest.mark.parametrize("room", [0, 4096, 9000, 20_000, 100_000])
def test_a_full_disk_leaves_no_file(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, path = tensor(5, 2000), tmp_path / "x.safetensors"
    path.write_bytes(b"the old one")
    whole = store.replacing

    @contextmanager
    def replacing(path: Path) -> Iterator[Disk]:
        with whole(path) as opened:
            yield Disk(opened, room)

    monkeypatch.setattr(store, "replacing", replacing)
    with pytest.raises(OSError, match="No space left"):
        stc.stream_kernel("ijklm,k->ijlm", x, torch.ones(9), chunk_bytes=4096, file=path)
    with stc.stream_kernel("ijklm,k->ijlm", x, torch.ones(9), chunk_bytes=4096) as s:
        with pytest.raises(OSError, match="No space left"):
            s.save(path)
        s(torch.ones(9))
    assert path.read_bytes() == b"the old one"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors"]


@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("limit", [None, 9000])
@pytest.mark.parametrize("from_file", [False, True])
def test_a_failing_chunk_leaves_nothing(
    error: BaseException, limit: int | None, from_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, v = tensor(5, 2000), torch.ones(9)
    out = torch.full((11, 11, 4, 3), 7.0)
    arguments = {"output": "dense", "chunk_bytes": 4096, "memory_limit": limit, "plan": "coo"}
    expected = stc.einsum("ijklm,k->ijlm", x, v, output="dense")
    kind = stc.OutOfMemoryError if isinstance(error, MemoryError) else type(error)
    path = tmp_path / "x.safetensors" if from_file else None
    with stc.stream_kernel("ijklm,k->ijlm", x, v, file=path, **arguments) as s:
        assert s.chunks > 2
        assert s.resident == (limit is None)
        with failing(monkeypatch, 2, error), pytest.raises(kind):
            s(v, out=out)
        assert bool((out == 7).all())
        s._engine.close()
        assert_same(s(v, out=out), expected)  # it can be called again


@pytest.mark.parametrize("error", [RuntimeError("no such chunk"), KeyboardInterrupt()])
def test_a_failure_while_packing_leaves_no_file(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, count = Compiler.pack, [0]

    def packed(self, *given):
        count[0] += 1
        if count[0] > 2:
            raise error
        return pack(self, *given)

    monkeypatch.setattr(Compiler, "pack", packed)
    with pytest.raises(type(error)):
        stc.stream_kernel("ijklm,k->ijlm", tensor(5, 2000), torch.ones(9), chunk_bytes=4096, file=tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_damaged_packed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    stc.write(path, tensor())
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 4] ^= 1
    path.write_bytes(whole)
    with pytest.raises(stc.IOFormatError, match="damaged"):
        stc.stream("ijk,jr,kr->ir", path, *operands("ijk,jr,kr->ir"))


# -- memory -----------------------------------------------------------------------------------------------------------
def test_what_does_not_fit_is_refused_with_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object) -> None:
        raise AssertionError("nothing is packed")

    monkeypatch.setattr(Compiler, "pack", never)
    x, dense = tensor(), operands("ijk,jr,kr->ir")
    for limit in (0, 400, 4000, 4300):
        with pytest.raises(stc.OutOfMemoryError, match=r"the dense operands take [0-9,]+ bytes, .* the limit is"):
            stc.stream("ijk,jr,kr->ir", x, *dense, memory_limit=limit)
    with pytest.raises(stc.OutOfMemoryError, match="the result"):
        stc.stream("ijk->", x, memory_limit=4000)


def test_a_file_that_does_not_fit_is_refused(saved: Path) -> None:
    with pytest.raises(stc.OutOfMemoryError, match="smaller chunks"):
        stc.open_stream(saved, memory_limit=4000)


def test_chunks_are_smaller_where_memory_is_short() -> None:
    x, dense = tensor(5, 4000), operands("ijklm,jr,kr->ir")
    expected = stc.einsum("ijklm,jr,kr->ir", x, *dense)
    fewest = 0
    for limit in (200_000, 40_000, 20_000, 10_000, 6000):
        with stc.stream_kernel("ijklm,jr,kr->ir", x, *dense, plan="coo", memory_limit=limit, chunk_bytes="1MiB") as s:
            assert s.device_bytes <= limit
            assert s.chunks >= fewest
            fewest = s.chunks
            assert_same(s(*dense), expected)
    assert fewest > 3


def test_a_plan_whose_tiles_do_not_fit_is_refused() -> None:
    x, dense = tensor(), operands("ijk,jr,kr->ir")
    with pytest.raises(stc.PlanError, match="a chunk of one nonzero takes"):
        stc.stream("ijk,k->ij", x, torch.ones(9), plan="hls", chunk_bytes=4096)
    assert engine.ChunkTimes is not None
    assert dense


def test_what_was_fixed_when_chunks_were_packed(saved: Path) -> None:
    for settings in ({"plan": "coo"}, {"precision": "medium"}):
        with pytest.raises(stc.PlanError, match="when the chunks were packed"):
            stc.open_stream(saved, **settings)


def test_streams_of_one_file_take_turns(tmp_path: Path) -> None:
    """They read through the same buffers: in two threads at once they overwrote each other's chunks."""
    x, dense = tensor(3, 4000), operands("ijk,jr,kr->ir")
    expected = stc.einsum("ijk,jr,kr->ir", x, *dense)
    with stc.stream_kernel("ijk,jr,kr->ir", x, *dense, file=tmp_path / "x.safetensors", chunk_bytes=4096) as s:
        streams = [s, s.on(order="given")]
        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(lambda n: streams[n % 2](*dense), range(40)):
                assert_same(found, expected)


def test_a_result_past_the_limit_names_the_file(tmp_path: Path) -> None:
    path, x, b = tmp_path / "x.safetensors", stc.eye(3000), torch.ones(3000, 1000)
    with stc.stream_kernel("ij,jr->ir", x, b) as stream:
        stream.save(path)
    with (
        stc.options(memory_limit=10_000_000),
        pytest.raises(stc.OutOfMemoryError, match=r"x\.safetensors: .* would take"),
    ):
        stc.open_stream(path)
