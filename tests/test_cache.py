"""The cache of generated source: damaged files, other processes, bounds, folders that cannot be written to."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from cases import Problem, assert_matches

import sparsetc as stc
from sparsetc.codegen import cache

SOURCE = '"""A generated file."""\n\nanswer = 42\n'


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: no module is in memory."""
    monkeypatch.setattr(cache, "_modules", type(cache._modules)())
    monkeypatch.setattr(cache, "_private", [])


def test_a_file_is_written_imported_and_named_by_its_content(tmp_path: Path) -> None:
    module, path = cache.load(SOURCE, tmp_path, "name")
    assert module.answer == 42
    assert path.parent == tmp_path
    assert path.name.startswith("name_")
    assert path.read_text(encoding="utf-8") == SOURCE
    _, other = cache.load(SOURCE + "\n", tmp_path, "name")
    assert other != path
    assert not [f for f in tmp_path.iterdir() if f.suffix == ".tmp"]


def test_the_second_load_is_the_same_module(tmp_path: Path) -> None:
    assert cache.load(SOURCE, tmp_path) == cache.load(SOURCE, tmp_path)


@pytest.mark.parametrize(
    "damage", [b"", b"raise SystemExit\n", b"\xff\xfe\x00binary", SOURCE.encode()[:-3], b"def broken("], ids=repr
)
def test_a_damaged_file_is_rebuilt(damage: bytes, tmp_path: Path) -> None:
    path = cache.path_of(SOURCE, tmp_path, "kernel")
    path.write_bytes(damage)
    module, found = cache.load(SOURCE, tmp_path)
    assert found == path
    assert module.answer == 42
    assert path.read_text(encoding="utf-8") == SOURCE


def test_a_damaged_kernel_runs_as_if_nothing_had_happened(tmp_path: Path) -> None:
    problem = Problem("ij,jr->ir", dtype=torch.float64)
    operands = problem.operands()
    path = stc.compile(problem.equation, *operands, cache_dir=tmp_path).path
    text = path.read_text(encoding="utf-8")
    path.write_bytes(os.urandom(500))
    cache._modules.clear()
    kernel = stc.compile(problem.equation, *operands, cache_dir=tmp_path)
    assert kernel.path == path
    assert path.read_text(encoding="utf-8") == text
    assert_matches(kernel(operands[1]), problem.equation, operands)


def test_an_intact_file_is_not_written_again(tmp_path: Path) -> None:
    _, path = cache.load(SOURCE, tmp_path)
    os.utime(path, (1, 1))
    inode = path.stat().st_ino
    cache._modules.clear()
    cache.load(SOURCE, tmp_path)
    assert path.stat().st_ino == inode
    assert path.stat().st_mtime > 1, "its use is noted, so that it is not the next to go"


def _load_many(folder: str, number: int) -> None:
    for n in range(20):
        module, _ = cache.load(f"answer = {n}\n", Path(folder), "shared")
        assert module.answer == n


def test_two_processes_may_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    workers = [context.Process(target=_load_many, args=(str(tmp_path), n)) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [w.exitcode for w in workers] == [0, 0]
    assert len(list(tmp_path.glob("*.py"))) == 20
    assert not list(tmp_path.glob("*.tmp"))


def test_the_least_recently_used_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_FILES", 3)
    paths = []
    for n in range(3):
        paths.append(cache.load(f"answer = {n}\n", tmp_path)[1])
        os.utime(paths[-1], (1000 + n, 1000 + n))
    cache._modules.clear()
    cache.load("answer = 0\n", tmp_path)  # used now, so that the second is the oldest
    cache.load("answer = 3\n", tmp_path)
    assert [p.exists() for p in paths] == [True, False, True]
    assert len(list(tmp_path.glob("*.py"))) == 3
    assert len(list(tmp_path.rglob("*.pyc"))) <= 3


def test_modules_in_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_MODULES", 4)
    before = {name for name in sys.modules if name.startswith("sparsetc_generated.bounded")}
    for n in range(10):
        cache.load(f"answer = {n}\n", tmp_path, "bounded")
    kept = {name for name in sys.modules if name.startswith("sparsetc_generated.bounded")} - before
    assert len(cache._modules) == 4
    assert len(kept) == 4


@pytest.mark.parametrize("name", ["a file, not a folder", "below a file/folder"])
def test_a_folder_that_cannot_be_written_to_is_replaced_with_a_warning(name: str, tmp_path: Path) -> None:
    (tmp_path / name.partition("/")[0]).write_text("in the way", encoding="utf-8")
    problem = Problem("ij,jr->ir", dtype=torch.float64)
    operands = problem.operands()
    with pytest.warns(UserWarning, match=r"cannot write generated source to .*Set SPARSETC_CACHE_DIR"):
        kernel = stc.compile(problem.equation, *operands, cache_dir=tmp_path / name)
    assert_matches(kernel(operands[1]), problem.equation, operands)
    assert kernel.path.exists()
    assert tmp_path not in kernel.path.parents
    assert kernel.path.parent.stat().st_mode & 0o077 == 0, "nobody else may put code there"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = stc.compile(problem.equation, *operands, cache_dir=tmp_path / name)
        stc.compile("ij,j->i", operands[0], operands[1][:, 0], cache_dir=tmp_path / name)
    assert again.path == kernel.path


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_still_serves_what_it_has(tmp_path: Path) -> None:
    _, path = cache.load(SOURCE, tmp_path)
    cache._modules.clear()
    tmp_path.chmod(0o500)
    try:
        module, found = cache.load(SOURCE, tmp_path)
        assert (module.answer, found) == (42, path)
        with pytest.warns(UserWarning, match="cannot write generated source"):
            cache.load("answer = 1\n", tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_the_folder_is_the_first_of_option_variable_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSETC_CACHE_DIR", str(tmp_path / "chosen"))
    assert cache.default_directory() == tmp_path / "chosen"
    monkeypatch.delenv("SPARSETC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default_directory() == tmp_path / "xdg" / "sparsetc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_directory() == tmp_path / ".cache" / "sparsetc"
    monkeypatch.setenv("SPARSETC_CACHE_DIR", str(tmp_path / "chosen"))
    assert cache.load(SOURCE)[1].parent == tmp_path / "chosen"


def test_importing_the_package_touches_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "SPARSETC_CACHE_DIR": str(tmp_path / "never"), "HOME": str(tmp_path)}
    code = "import sparsetc, sys; sys.exit('triton' in sys.modules)"
    before = time.time()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"triton was imported, or: {done.stderr}"
    assert not list(tmp_path.iterdir())
    assert time.time() - before < 60
