"""Files take the place of others whole, with their mode, and leave nothing behind."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch

import sparsetc as stc
import sparsetc.io as sio
from sparsetc.io import atomic
from sparsetc.io.atomic import replacing
from sparsetc.support.files import renamed, write_private
from sparsetc.tensor.sparse_tensor import SparseTensor

posix = pytest.mark.skipif(os.name != "posix", reason="modes, owners and locks of POSIX")
ONE = SparseTensor([[0], [0]], [1.0])


def mode(path: Path | str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def temporaries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith(".sparsetc-"))


@pytest.fixture
def umask() -> object:
    """Sets the umask for one test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("suffix", sio.SUFFIXES)
def test_a_file_is_on_disk_before_it_takes_its_name(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that stops may leave an empty file in the place of the old one."""
    synced: dict[int, int] = {}
    fsync, replace = os.fsync, os.replace

    def watched_sync(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    def watched_replace(temporary: Path, target: Path) -> None:
        status = os.stat(temporary)
        assert synced.get(status.st_ino) == status.st_size > 0
        replace(temporary, target)
        replaced.append(target)

    replaced: list[Path] = []
    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "replace", watched_replace)
    sio.write(tmp_path / f"x{suffix}", ONE)
    assert replaced == [tmp_path / f"x{suffix}"]


# ---- modes and owners -------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("old", [0o600, 0o640, 0o644, 0o444, 0o666])
def test_the_mode_is_that_of_the_file_before(tmp_path: Path, umask: object, mask: int, old: int) -> None:
    umask(mask)  # type: ignore[operator]
    path = tmp_path / "x.tns"
    sio.write(path, ONE)
    assert mode(path) == 0o666 & ~mask
    path.chmod(old)
    sio.write(path, ONE)
    assert mode(path) == old


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, rename = os.fsync, os.replace
    synced: dict[int, int] = {}  # sizes by inode

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def replace(source: Path, target: Path) -> None:
        status = os.stat(source)
        assert synced[status.st_ino] == status.st_size > 0
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    for suffix in sio.SUFFIXES:
        sio.write(tmp_path / f"x{suffix}", ONE)
        assert (tmp_path / f"x{suffix}").exists()


@posix
def test_a_temporary_is_no_more_open_than_what_it_becomes(
    tmp_path: Path, umask: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    umask(0)  # type: ignore[operator]
    seen: list[int] = []
    created = os.open

    def watched(name: Path, flags: int, bits: int = 0o777) -> int:
        descriptor = created(name, flags, bits)
        seen.append(mode(name))
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    path = tmp_path / "x"
    path.write_bytes(b"secret")
    for old in (0o600, 0o640, 0o400):
        path.chmod(old)
        with replacing(path) as file:
            seen.append(mode(temporaries(tmp_path)[0]))
            file.write(b"secret too")
        assert all(one & ~old & 0o077 == 0 for one in seen)
        seen.clear()


# ---- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", sio.SUFFIXES)
def test_the_longest_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / ("x" * (255 - len(suffix)) + suffix)
    sio.write(path, ONE)
    assert sio.read(path).nnz == 1
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(OSError, match="name too long") as caught:
        sio.write(tmp_path / f"x{path.name}", ONE)
    assert caught.value.filename == str(tmp_path / f"x{path.name}")


@pytest.mark.parametrize("suffix", sio.SUFFIXES)
def test_a_missing_folder_is_named(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("missing", str(tmp_path / "not" / "there")):
        with pytest.raises(FileNotFoundError) as caught:
            sio.write(f"{folder}/x{suffix}", ONE)
        assert caught.value.filename == folder
        assert str(caught.value) == f"[Errno 2] cannot write to the folder: No such file or directory: {folder!r}"
    Path("link").symlink_to("gone/x.tns")
    with pytest.raises(FileNotFoundError, match="gone'"), replacing("link"):
        pass


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.tns").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        sio.write(tmp_path / "x.tns", ONE)
    assert caught.value.filename == str(tmp_path / "x.tns")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "y.tns")
        with pytest.raises(OSError, match=r"not a regular file.*y\.tns"):
            sio.write(tmp_path / "y.tns", ONE)
    assert temporaries(tmp_path) == []


# ---- what goes wrong --------------------------------------------------------------------------------------------


def _fail(file: BinaryIO, error: type[BaseException]) -> None:
    file.write(b"half")
    assert len(temporaries(Path(os.fsdecode(file.name)).parent)) == 1
    raise error


@posix
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError, SystemExit])
def test_whatever_happens_the_old_file_stays_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    for writer in (replacing(path), renamed(path, 0o600)):
        with pytest.raises(error), writer as file:
            _fail(file, error)
        assert [p.name for p in tmp_path.iterdir()] == ["x"]
        assert path.read_bytes() == b"old"


@posix
def test_what_is_private_takes_the_place_of_a_link(tmp_path: Path, umask: object) -> None:
    umask(0)  # type: ignore[operator]
    (tmp_path / "other").write_bytes(b"precious")
    (tmp_path / "x").symlink_to(tmp_path / "other")
    write_private(tmp_path / "x", b"new")
    assert not (tmp_path / "x").is_symlink()
    assert (mode(tmp_path / "x"), (tmp_path / "other").read_bytes()) == (0o600, b"precious")


@pytest.mark.parametrize("name", ["x.tns", "x.tns.gz", "x.mtx", "x.npz", "x.parquet"])
def test_a_full_disk_names_the_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as refused:
        stc.write(tmp_path / name, stc.SparseTensor([[0], [1]], [1.0], (2, 2)))
    assert refused.value.filename == str(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_paths_of_any_kind(tmp_path: Path) -> None:
    x = stc.SparseTensor([[0], [1]], [1.0], (2, 2))
    for name in ("x.tns", "x.mtx", "x.npz", "x.parquet"):
        path = os.fsencode(tmp_path / name)
        stc.write(path, x)
        assert torch.equal(stc.read(path).coords, x.coords)
        with pytest.raises(stc.IOFormatError, match=r"names no file: it has a NUL"):
            stc.read(f"a\0{name}")
    with pytest.raises(stc.PlanError, match="cache_dir must be a path, found 3"), stc.options(cache_dir=3):
        pass


def test_what_a_file_says_is_no_command_of_a_terminal(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **{"\x1b[31mred": np.ones(1)})
    with pytest.raises(stc.IOFormatError) as refused:
        stc.read(tmp_path / "x.npz")
    assert "\x1b" not in str(refused.value)
    arrays = {"data": np.ones(1), "coords": np.zeros((2, 1), np.int64), "shape": np.array([2, 2])}
    np.savez(tmp_path / "y.npz", **arrays, fill_value=np.array(0.0), format=np.array("\x1b[31m"))
    with pytest.raises(stc.IOFormatError, match=r"\\x1b\[31M") as refused:
        stc.read(tmp_path / "y.npz")
    assert "\x1b" not in str(refused.value)
