"""Files of packed chunks give what they were written of, or are refused; what fails leaves nothing half done."""

from __future__ import annotations

import errno
import json
import os
import random
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from cases import TILED
from test_stream import EQUATIONS, PLANS, assert_same, operands, tensor

import sparsetc as stc
from sparsetc.codegen.launch import Programs
from sparsetc.streaming import engine, file
from sparsetc.streaming.compiler import Compiler


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,j->ki", "ijk,jr,ks->irs", "ijk->"])
def test_saved_and_opened(plan: str, equation: str, tmp_path: Path) -> None:
    x, dense = tensor(5 if equation.startswith("ijklm") else 3, 900), operands(equation)
    try:
        expected = stc.einsum(equation, x, *dense, plan=plan)
    except stc.PlanError:
        pytest.skip("the plan is not for this einsum")
    path = tmp_path / "x.stcs"
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
    equation, path = EQUATIONS[name], tmp_path / "x.stcs"
    x, dense = tensor(), operands(equation)
    expected = stc.einsum(equation, x, *dense)
    limit = sum(d.numel() * 4 for d in dense) * 2 + 9000
    with stc.stream_kernel(equation, x, *dense, plan="coo", file=path, memory_limit=limit) as s:
        assert_same(s(*dense), expected)
    for again in (limit, None):
        with stc.open_stream(path, memory_limit=again, order="given") as s:
            assert s.device_bytes <= (again or 1 << 40)
            assert_same(s(*dense), expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.stcs"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex128, torch.int64])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    x, dense = tensor(dtype=dtype), operands("ijk,jr,kr->ir", dtype)
    with stc.stream_kernel("ijk,jr,kr->ir", x, *dense, file=tmp_path / "x", chunk_bytes=4096) as s:
        expected = s(*dense)
    with stc.open_stream(tmp_path / "x") as s:
        assert_same(s(*dense), expected)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of several chunks, of a sparse result."""
    path = tmp_path / "x.stcs"
    x = tensor(5, 2000)
    with stc.stream_kernel("ijklm,k->ijlm", x, torch.ones(9), chunk_bytes=4096, file=path) as s:
        assert s.chunks > 3
    return path


def streamed(path: Path) -> object:
    with stc.open_stream(path) as s:
        return s(torch.ones(9))


def test_truncated_files_are_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in (0, 1, 8, 4095, 4096, 5000, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:length])
        with pytest.raises(stc.IOFormatError, match=r"x\.stcs: "):
            streamed(saved)
    saved.write_bytes(whole + b"\0")
    with pytest.raises(stc.IOFormatError, match="truncated or extended"):
        streamed(saved)


def test_altered_files_are_refused(saved: Path) -> None:
    whole, opened = saved.read_bytes(), file.ChunkFile(saved)
    covered = [at for b in opened.blobs for at in range(b.offset, b.offset + b.nbytes, max(1, b.nbytes // 7))]
    opened.close()
    for at in [*range(0, 40), 4000, 4095, *covered, *range(len(whole) - 2000, len(whole), 97)]:
        changed = bytearray(whole)
        changed[at] ^= 16
        saved.write_bytes(changed)
        with pytest.raises(stc.IOFormatError, match=r"x\.stcs: "):
            streamed(saved)
    saved.write_bytes(whole)
    streamed(saved)


def rewritten(path: Path, change, write=lambda number, buffer: None) -> None:
    """The file with another description, or other bytes, all checksums right."""
    opened = file.ChunkFile(path)
    description = json.loads(json.dumps(opened.description))
    change(description)
    buffers = [torch.empty(b.nbytes, dtype=torch.uint8) for b in opened.blobs]
    for number, buffer in enumerate(buffers):
        opened.read(number, buffer)
        write(number, buffer)
    opened.close()
    with open(path, "wb") as new:
        writer = file.ChunkWriter(new)
        for buffer in buffers:
            writer.put(buffer)
        writer.finish(description)


def part(description) -> dict:
    return description["variants"][0]["parts"][0]


def arrays(description) -> list:
    return description["chunks"][0][5][0][0]


def place(description) -> list:
    return description["chunks"][0][5][0][1]


CHANGES = {
    "no chunks": lambda d: d.pop("chunks"),
    "no recipe": lambda d: d.pop("recipe"),
    "another recipe": lambda d: d["recipe"].update(more=1),
    "a size below 0": lambda d: d["recipe"]["shapes"][0].__setitem__(0, -1),
    "a dtype that is none": lambda d: d["recipe"].update(dtype="float7"),
    "values beyond the chunk": lambda d: place(d).__setitem__(2, 1 << 40),
    "values before the chunk": lambda d: place(d).__setitem__(2, -8),
    "values in the place of coordinates": lambda d: place(d).__setitem__(2, 0),
    "an array fewer": lambda d: d["chunks"][0][5][0][0].pop(),
    "an array twice": lambda d: arrays(d).append(arrays(d)[0]),
    "arrays of another type": lambda d: arrays(d)[0].__setitem__(0, "int64"),
    "arrays of fewer elements": lambda d: arrays(d)[0][1].__setitem__(0, arrays(d)[0][1][0] - 1),
    "an array of two dimensions": lambda d: arrays(d)[0].__setitem__(1, [1, *arrays(d)[0][1]]),
    "more items": lambda d: d["chunks"][0][5][0].__setitem__(2, 1 << 40),
    "more values": lambda d: d["chunks"][0][5][0].__setitem__(3, 1 << 40),
    "nonzeros that are no number": lambda d: d["chunks"][0].__setitem__(0, "7"),
    "a precision that is none": lambda d: d["recipe"].update(precision="some"),
    "an equation that is none": lambda d: d["recipe"].update(equation="ijkl,k->ijl"),
    "a form that is none": lambda d: d["recipe"].update(output="some"),
    "a place that is none": lambda d: place(d).__setitem__(1, ["a"]),
    "rows beyond the result": lambda d: d["chunks"][0].__setitem__(2, d["rows"]),
    "rows before the result": lambda d: d["chunks"][0].__setitem__(2, -1),
    "programs that are not there": lambda d: d["chunks"][0].__setitem__(4, 7),
    "a chunk of another size": lambda d: d["chunks"][0].__setitem__(1, d["chunks"][0][1] + 1),
    "fewer rows": lambda d: d.update(rows=d["rows"] - 1),
    "no rows": lambda d: d.update(rows=0),
    "a chunk too many": lambda d: d["chunks"].append(d["chunks"][0]),
    "another format": lambda d: part(d).update(format="absent"),
    "another storage": lambda d: part(d)["storage"].update(lanes=3),
    "modes of another tensor": lambda d: part(d)["storage"].update(leaf=[0, 1]),
    "a text that ends a comment": lambda d: part(d)["schedule"].update(blocks=[['"""\nimport os', 8]]),
    "a tree that is none": lambda d: part(d)["schedule"].update(tree="import os"),
    "another schedule": lambda d: part(d)["schedule"].update(unroll=part(d)["schedule"]["unroll"] + 1),
    "a digest of other programs": lambda d: d["variants"][0].update(digest="0"),
    "an unknown field": lambda d: part(d)["schedule"].update(more=1),
}


def test_a_mode_that_is_not_there_is_named(saved: Path) -> None:
    rewritten(saved, lambda d: part(d)["storage"]["leaf"].append(5))
    with pytest.raises(stc.IOFormatError, match="deals 6 modes, the tensor has 5: there is no mode 5"):
        streamed(saved)


@pytest.mark.parametrize("name", CHANGES)
def test_descriptions_that_do_not_fit_are_refused(name: str, saved: Path) -> None:
    rewritten(saved, lambda d: None)
    streamed(saved)
    rewritten(saved, CHANGES[name])
    with pytest.raises(stc.IOFormatError, match=r"x\.stcs: "):
        streamed(saved)


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows", *TILED])
def test_nothing_is_read_outside_of_what_is_there(plan: str, tmp_path: Path) -> None:
    equation, path, r = "ijk,kr->ijr", tmp_path / "x.stcs", random.Random(plan)
    x, dense = tensor(), operands(equation)
    try:
        stc.stream_kernel(equation, x, *dense, plan=plan, chunk_bytes=32_768, file=path).close()
    except stc.PlanError:
        equation = "ijk,jr,kr->ir"
        dense = operands(equation)
        stc.stream_kernel(equation, x, *dense, plan=plan, chunk_bytes=32_768, file=path).close()
    whole, refused = path.read_bytes(), 0

    def write(number: int, buffer: torch.Tensor) -> None:
        buffer[r.randrange(len(buffer))] = r.choice((1, 127, 128, 255))

    for _ in range(40):
        path.write_bytes(whole)
        rewritten(path, lambda d: None, write)
        try:
            with stc.open_stream(path) as s:
                s(*dense)
        except stc.IOFormatError as error:
            assert "x.stcs: " in str(error)  # noqa: PT017
            refused += 1
    assert refused


def test_a_description_that_is_nested_without_end(saved: Path) -> None:
    whole, text = saved.read_bytes(), b"[" * 100_000
    *_, version, at, _, _ = file.HEADER.unpack_from(whole)
    head = file.HEADER.pack(file.MAGIC, version, at, len(text), zlib.crc32(text)).ljust(file.PAGE - 4, b"\0")
    saved.write_bytes(head + struct.pack("<I", zlib.crc32(head)) + whole[file.PAGE : at] + text)
    with pytest.raises(stc.IOFormatError, match=r"x\.stcs: its description is none"):
        stc.open_stream(saved)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.stcs")  # nobody writes: opening it would wait for ever
    with pytest.raises(stc.IOFormatError, match=r"x\.stcs: a file of packed chunks is a file on disk"):
        stc.open_stream(tmp_path / "x.stcs")


def test_a_file_that_is_shortened_while_it_is_open(saved: Path) -> None:
    with stc.open_stream(saved) as s:
        s(torch.ones(9))
        os.truncate(saved, 6000)
        with pytest.raises(stc.IOFormatError, match="shortened while it was open"):
            s(torch.ones(9))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    stc.write(path, tensor())
    with pytest.raises(stc.IOFormatError, match="not a file of packed chunks"):
        stc.open_stream(path)
    with pytest.raises(FileNotFoundError):
        stc.open_stream(tmp_path / "absent")
    with pytest.raises(stc.PlanError, match="streams must be"):
        stc.open_stream(path, streams=0)


def test_programs_of_another_version_are_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = Compiler.lowered
    monkeypatch.setattr(Compiler, "lowered", lambda self, p, o, w: lowered(self, p, [not one for one in o], w)[:0])
    with pytest.raises(stc.IOFormatError, match="pack them again"):
        streamed(saved)


def test_files_for_a_gpu_are_no_files_for_the_cpu(saved: Path) -> None:
    with pytest.raises(stc.DeviceError, match="packed for torch"):
        stc.open_stream(saved, backend="triton")


@pytest.mark.parametrize("plan", TILED)
def test_infinities_need_a_file_without_tiles(plan: str, tmp_path: Path) -> None:
    x, (b, c), tiles = tensor(), operands("ijk,jr,kr->ir"), stc.Plan(plan, options=(("threshold", 0),))
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


@pytest.mark.parametrize("room", [0, 4096, 9000, 20_000])
def test_a_full_disk_leaves_no_file(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, path = tensor(5, 2000), tmp_path / "x.stcs"
    path.write_bytes(b"the old one")
    start = file.ChunkWriter.__init__
    monkeypatch.setattr(file.ChunkWriter, "__init__", lambda self, opened: start(self, Disk(opened, room)))
    with pytest.raises(OSError, match="No space left"):
        stc.stream_kernel("ijklm,k->ijlm", x, torch.ones(9), chunk_bytes=4096, file=path)
    with stc.stream_kernel("ijklm,k->ijlm", x, torch.ones(9), chunk_bytes=4096) as s:
        with pytest.raises(OSError, match="No space left"):
            s.save(path)
        s(torch.ones(9))
    assert path.read_bytes() == b"the old one"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.stcs"]


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
    path = tmp_path / "x.stcs" if from_file else None
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
    with stc.stream_kernel("ijk,jr,kr->ir", x, *dense, file=tmp_path / "x.stcs", chunk_bytes=4096) as s:
        streams = [s, s.on(order="given")]
        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(lambda n: streams[n % 2](*dense), range(40)):
                assert_same(found, expected)
