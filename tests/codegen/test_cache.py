"""The cache of generated source: what runs, damaged and planted files, other processes, bounds, folders of others."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import linecache
import marshal
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cases import Problem, assert_matches

import sparsetc as stc
from sparsetc.codegen import cache
from sparsetc.support import files

SOURCE = '"""A generated file."""\n\nanswer = 42\n'


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process: no module is in memory, and no folder was refused. Others may not write to what is made."""
    before = os.umask(0o022)
    monkeypatch.setattr(cache, "_modules", type(cache._modules)())
    cache._temporary_folder.cache_clear()
    monkeypatch.setattr(cache, "_refused", set())
    yield
    os.umask(before)


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


def test_a_file_that_was_seen_is_compared_again_only_once_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path = cache.load(SOURCE, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(cache, "keep", lambda *_: pytest.fail("the file was looked at again"))
        assert cache.load(SOURCE, tmp_path) == (module, path)
    path.write_text("damaged", encoding="utf-8")
    assert cache.load(SOURCE, tmp_path) == (module, path)
    assert path.read_text(encoding="utf-8") == SOURCE
    path.unlink()
    assert cache.load(SOURCE, tmp_path) == (module, path)
    assert path.read_text(encoding="utf-8") == SOURCE


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


def _looks_at_each_write(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(files, "MAX_FILES", most)
    monkeypatch.setattr(files, "WRITES_AN_EVICTION", 1)


def test_the_least_recently_used_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _looks_at_each_write(monkeypatch, most=3)
    paths = []
    for n in range(3):
        paths.append(cache.load(f"answer = {n}\n", tmp_path)[1])
        os.utime(paths[-1], (1000 + n, 1000 + n))
    cache._modules.clear()
    cache.load("answer = 0\n", tmp_path)  # used now, so that the second is the oldest
    cache.load("answer = 3\n", tmp_path)
    assert [p.exists() for p in paths] == [True, False, True]
    assert len(list(tmp_path.glob("*.py"))) == 3


def test_files_that_are_not_the_caches_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _looks_at_each_write(monkeypatch, most=1)
    own = [tmp_path / name for name in ("mine.py", "kernel_0123.py", ".hidden.tmp", f"x_{'0' * 20}.txt")]
    left = tmp_path / ".sparsetc-0123456789abcdef.tmp"
    writing = tmp_path / ".sparsetc-fedcba9876543210.tmp"
    for path in [*own, left, writing]:
        path.write_text("in use")
        if path != writing:
            os.utime(path, (1000, 1000))
    for n in range(3):
        cache.load(f"answer = {n}\n", tmp_path)
    assert all(path.exists() for path in own), "a folder that was named may be used for other things too"
    assert not left.exists(), "its writer was killed long ago"
    assert writing.exists()
    assert len(list(tmp_path.glob(f"kernel_{'?' * 20}.py"))) == 1


def test_a_new_file_does_not_cost_a_look_at_every_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(files, "evict", looks.append)
    for n in range(1000):
        cache.keep(f"answer = {n}\n", tmp_path, cache.path_of(f"answer = {n}\n", tmp_path, "x").name)
    expected = 1000 / files.WRITES_AN_EVICTION
    assert 0 < len(looks) < 4 * expected


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
    with pytest.warns(UserWarning, match=r"cannot write generated source to .*Set SPARSETC_CACHE_DIR") as told:
        kernel = stc.compile(problem.equation, *operands, cache_dir=tmp_path / name)
    own = [w.filename for w in told if "cannot write" in str(w.message)]  # not that there is no GPU, said once
    assert own == [__file__], "it points at the user's line"
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
    assert files.default_directory() == tmp_path / "chosen"
    monkeypatch.delenv("SPARSETC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.default_directory() == tmp_path / "xdg" / "sparsetc"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert files.default_directory() == tmp_path / ".cache" / "sparsetc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.default_directory() == tmp_path / ".cache" / "sparsetc"
    monkeypatch.setenv("SPARSETC_CACHE_DIR", str(tmp_path / "chosen"))
    assert cache.load(SOURCE)[1].parent == tmp_path / "chosen"


def test_without_a_home_the_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARSETC_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", str)  # as where there is no home: "~" stays
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    predictable = tmp_path / "sparsetc"
    predictable.mkdir(mode=0o777)
    with pytest.warns(UserWarning, match="no home directory"):
        module, path = cache.load(SOURCE)
    assert module.answer == 42
    assert not list(predictable.iterdir()), "anyone may have made it"
    assert path.parent.parent == tmp_path
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert cache.load(SOURCE, Path("~/cache"))[1] == path


def test_importing_the_package_touches_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "SPARSETC_CACHE_DIR": str(tmp_path / "never"), "HOME": str(tmp_path)}
    code = "import sparsetc, sys; sys.exit('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"triton was imported, or: {done.stderr}"
    assert not list(tmp_path.iterdir())


# -- what runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [False, True], ids=["before the file is", "beside an intact file"])
@pytest.mark.parametrize("checked", [False, True])
def test_planted_bytecode_does_not_run(tmp_path: Path, checked: bool, written: bool) -> None:
    path = cache.path_of(SOURCE, tmp_path, "kernel")
    if written:
        path.write_text(SOURCE, encoding="utf-8")
    planted = Path(importlib.util.cache_from_source(str(path)))
    planted.parent.mkdir()
    flags = (3 if checked else 1).to_bytes(4, "little")  # by the hash of the source, which is compared or is not
    code = marshal.dumps(compile("answer = 'planted'\n", str(path), "exec"))
    planted.write_bytes(importlib.util.MAGIC_NUMBER + flags + importlib.util.source_hash(SOURCE.encode()) + code)
    before = planted.read_bytes()
    module, found = cache.load(SOURCE, tmp_path)
    assert (module.answer, found) == (42, path)
    assert planted.read_bytes() == before


def test_no_bytecode_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    _, path = cache.load(SOURCE, tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_text_that_is_swapped_after_it_was_compared_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache.path_of(SOURCE, tmp_path, "kernel")
    path.write_text(SOURCE, encoding="utf-8")
    compare = cache._intact

    def swap(compared: Path, data: bytes) -> bool:
        same = compare(compared, data)
        compared.write_text("answer = 'swapped'\n", encoding="utf-8")
        return same

    monkeypatch.setattr(cache, "_intact", swap)
    module, _ = cache.load(SOURCE, tmp_path)
    assert module.answer == 42
    assert "swapped" in path.read_text(encoding="utf-8")


def test_flags_of_the_compiler_do_not_reach_generated_source(tmp_path: Path) -> None:
    module, _ = cache.load("def f(x: int): pass\n", tmp_path)
    assert module.f.__annotations__ == {"x": int}, "annotations are not postponed, as they are in the cache's own file"


FAILING = "def f():\n    raise ValueError('a line to show')\n"


@pytest.mark.parametrize("fate", ["removed", "changed"])
def test_a_traceback_shows_what_ran_whatever_became_of_the_file(tmp_path: Path, fate: str) -> None:
    module, path = cache.load(FAILING, tmp_path / "folder")
    if fate == "removed":
        shutil.rmtree(path.parent)
    else:
        path.write_text("something = 'else'\n\n", encoding="utf-8")
    with pytest.raises(ValueError, match="a line to show") as raised:
        module.f()
    shown = "".join(traceback.format_exception(raised.type, raised.value, raised.tb))
    assert f'File "{path}", line 2, in f\n    raise ValueError' in shown
    assert inspect.getsource(module.f) == FAILING
    if fate == "removed":
        linecache.clearcache()
        assert inspect.getsource(module.f) == FAILING


def test_lines_are_kept_no_longer_than_what_they_are_lines_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_MODULES", 1)
    module, path = cache.load(FAILING, tmp_path)
    function = module.f
    del module
    cache.load(SOURCE, tmp_path)
    assert str(path) in linecache.cache, "a kernel goes on using the function"
    assert function.__module__ not in sys.modules
    cache.load(FAILING, tmp_path)
    cache.load(SOURCE, tmp_path)
    del function
    gc.collect()
    assert str(path) not in linecache.cache


def test_a_module_that_fails_is_not_left_to_be_imported(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cache.load("1 / 0\n", tmp_path, "failing")
    assert not [name for name in sys.modules if name.startswith("sparsetc_generated.failing")]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_triton_compiles_kernels_whose_files_are_gone(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    problem = Problem("ij,jr->ir")
    operands = problem.operands()
    kernel = stc.compile(problem.equation, *operands, backend="triton", plan="coo", cache_dir=tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    assert ".visible .entry" in kernel.ptx(target="sm_90")


# -- other users ------------------------------------------------------------------------------------------------------

posix = pytest.mark.skipif(os.name != "posix", reason="no owners and modes")


@posix
@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_files_and_folders_are_the_users_alone_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        _, path = cache.load(SOURCE, tmp_path / "above" / "cache")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [f.stat().st_mode & 0o777 for f in path.parents[:2]] == [0o700, 0o700]


def _refused(folder: Path, why: str) -> None:
    """Loading from the folder warns once, says why, and serves from a private one."""
    before = sorted(folder.iterdir())
    with pytest.warns(UserWarning, match=f"cannot write generated source to .*{why}") as told:
        found = [cache.load(text, folder) for text in (SOURCE, "answer = 1\n")]
    assert len(told) == 1
    module, path = found[0]
    assert module.answer == 42
    assert path.parent != folder
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(folder.iterdir()) == before


@posix
@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o702])
def test_a_named_folder_that_others_may_write_to_is_refused_and_left_as_it_is(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    _refused(folder, f"has mode {mode:04o}, so others may write to it")
    assert folder.stat().st_mode & 0o7777 == mode


@posix
def test_the_standard_folder_is_tightened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSETC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "sparsetc"
    folder.mkdir()
    folder.chmod(0o775)  # as an earlier version made it where the umask is 0002
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load(SOURCE)[1].parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700


@posix
def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    uid = os.geteuid()
    # the temporary folder is made by whom the process runs as, so the stand-in is who owns the first folder
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **options: _owned(real(path, **options), path == folder, uid + 1))
    _refused(folder, f"belongs to another user, number {uid + 1}")


def _owned(found: os.stat_result, changed: bool, uid: int) -> os.stat_result:
    return os.stat_result((*found[:4], uid, *found[5:])) if changed else found


@posix
def test_a_link_of_the_users_own_is_followed_and_one_of_another_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir(mode=0o700)
    link.symlink_to(folder)
    assert cache.load(SOURCE, link)[1].parent == link
    assert len(list(folder.iterdir())) == 1
    cache._modules.clear()
    uid, real = os.geteuid(), os.lstat
    monkeypatch.setattr(os, "lstat", lambda path, **options: _owned(real(path, **options), path == link, uid + 1))
    _refused(link, f"is a link that belongs to another user, number {uid + 1}")


@posix
@pytest.mark.parametrize("intact", [False, True])
def test_a_link_in_a_files_place_is_replaced_and_its_target_left(tmp_path: Path, intact: bool) -> None:
    path, target = cache.path_of(SOURCE, tmp_path, "kernel"), tmp_path / "target"
    target.write_text(SOURCE if intact else "precious", encoding="utf-8")
    before = target.stat()
    path.symlink_to(target)
    assert cache.load(SOURCE, tmp_path)[1] == path
    assert not path.is_symlink()
    assert path.read_text(encoding="utf-8") == SOURCE
    assert target.read_text(encoding="utf-8") == (SOURCE if intact else "precious")
    assert target.stat().st_mtime_ns == before.st_mtime_ns


@posix
def test_a_pipe_in_a_files_place_is_replaced(tmp_path: Path) -> None:
    path = cache.path_of(SOURCE, tmp_path, "kernel")
    os.mkfifo(path)
    assert cache.load(SOURCE, tmp_path)[1] == path
    assert path.is_file()


@posix
def test_a_file_that_others_may_write_to_is_replaced(tmp_path: Path) -> None:
    path = cache.path_of(SOURCE, tmp_path, "kernel")
    path.write_text(SOURCE, encoding="utf-8")
    path.chmod(0o666)
    cache.load(SOURCE, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_any_folder_source_is_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(**_: object) -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr("tempfile.mkdtemp", nowhere)
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="kept in memory only"):
        module, path = cache.load(FAILING, tmp_path / "file")
    assert not path.exists()
    assert inspect.getsource(module.f) == FAILING
    monkeypatch.setattr(files, "default_directory", lambda: None)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="kept in memory only"):
        module, path = cache.load(SOURCE)
    assert module.answer == 42
    with pytest.warns(UserWarning, match="kept in memory only"):
        cache.load(SOURCE, path.parent)  # as ahead-of-time compilation does
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


# -- other threads and processes --------------------------------------------------------------------------------------


def _churn(folder: Path, name: str, rounds: int) -> None:
    """Load what evicts what others load; in memory, too."""
    for n in range(rounds):
        module, _ = cache.load(f"answer = {n % 7}\n", folder, name)
        assert module.answer == n % 7


def _churn_in_a_process(folder: str, rounds: int) -> None:
    cache.MAX_MODULES, files.MAX_FILES, files.WRITES_AN_EVICTION = 2, 2, 1
    cache._modules.clear()
    warnings.simplefilter("error")  # a file that goes is no reason for another folder
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(_churn, Path(folder), "shared", rounds) for _ in range(2)]:
            done.result()


def test_threads_and_processes_load_and_evict_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    workers = [context.Process(target=_churn_in_a_process, args=(str(tmp_path / "cache"), 150)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [w.exitcode for w in workers] == [0, 0]
    assert 1 <= len(list((tmp_path / "cache").iterdir())) <= 4


@pytest.mark.filterwarnings("ignore:sparsetc. cannot write")  # a removal may come between each of three attempts
def test_a_folder_that_is_removed_again_and_again_stops_nobody(tmp_path: Path) -> None:
    folder, done = tmp_path / "cache", threading.Event()

    def remove() -> None:
        while not done.is_set():
            shutil.rmtree(folder, ignore_errors=True)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        _churn(folder, "removed", 200)
    finally:
        done.set()
        thread.join()
    path = cache.load(SOURCE, folder)[1]
    assert path.parent == folder
    shutil.rmtree(folder)
    assert cache.load(SOURCE, folder)[1].exists(), "what is in memory is written again"


def test_modules_are_shared_by_threads(tmp_path: Path) -> None:
    slow = "import time\ntime.sleep(0.05)\nanswer = object()\n"
    with ThreadPoolExecutor(4) as pool:
        found = [f.result()[0].answer for f in [pool.submit(cache.load, slow, tmp_path) for _ in range(4)]]
    assert len(set(map(id, found))) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_is_not_held_up_by_its_parents_threads(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with cache._lock.own:  # as a thread of the parent might
        child = context.Process(target=_churn, args=(tmp_path, "child", 3))
        thread = threading.Thread(target=child.start)  # not the thread that holds the lock
        thread.start()
        thread.join()
        child.join(60)
    assert child.exitcode == 0


def test_the_temporary_folder_is_its_makers_to_remove(tmp_path: Path) -> None:
    cache._remove(tmp_path, os.getpid() + 1)
    assert tmp_path.exists()
    cache._remove(tmp_path, os.getpid())
    assert not tmp_path.exists()


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file is not a folder"):
        files.check(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="absent is not a folder"):
        files.check(tmp_path / "absent")
