"""What every test shares: a folder of generated source, time for hypothesis, and no collection of tests as garbage.

The folder is kept from run to run, as Triton's own is; each process has one of its own, and all share numba's machine
code, so that it is compiled once wherever tests are dealt to. A user's folder is not touched: what it holds must not
decide whether tests pass.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "sparsetc", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("sparsetc")
sys.path += folders.PATHS

_worker = f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}{os.environ.get('TRITON_INTERPRET', '')}"
_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsetc-tests" / _worker
_folder.mkdir(0o700, parents=True, exist_ok=True)
shutil.rmtree(_folder / "tuning", ignore_errors=True)  # what a run has measured decides none after it
os.environ["SPARSETC_CACHE_DIR"] = str(_folder)

import machine_code  # noqa: E402
from program_checks import verify  # noqa: E402

from sparsetc.contraction import passing  # noqa: E402
from sparsetc.ir.lower import default_tree  # noqa: E402
from sparsetc.ir.program.tile import TileProgram  # noqa: E402
from sparsetc.support import files  # noqa: E402

options = import_module("sparsetc.options")  # whose name in the package is the function's
files.MAX_FILES = 1 << 16  # a run makes more than a user's folder holds, and the next would compile its first again
passing.IN_A_ROW = 1 << 62  # or equations that come again, of other patterns, would have no kernels


def _checked(*arguments: Any) -> TileProgram:
    """Lower a program, and check it."""
    program = _lowered(*arguments)
    verify(program)
    return program


_lowered, default_tree.lowered = default_tree.lowered, _checked


machine_code.share()
collect_ignore = []
if not torch.cuda.is_available():
    collect_ignore.append("gpu")
    if os.environ.get("TRITON_INTERPRET") != "1":
        import assembler

        assembler.left_out()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first, so that none is left over when all others are done."""
    long = ("test_distributed.py", "test_pair.py::test_any", "test_examples.py", "test_packing.py", "test_notebooks.py")
    long += ("test_fuzz.py", "test_native_walk.py", "test_hybrid.py::test_any", "test_docs.py", "test_memory.py")
    items.sort(key=lambda item: not any(name in item.nodeid for name in long))


def pytest_collection_finish() -> None:
    """Thousands of collected tests stay to the end: no collection of garbage need look at them, again and again.

    What a compile makes is rarely garbage in cycles: collections a hundred times as far apart take a tenth off a run.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_sessionfinish() -> None:
    """A process ends at once: what is left is no garbage, and pytest would look at all of it five times."""
    gc.freeze()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """`torch.empty` gives NaN, so that what a kernel leaves unwritten is seen."""
    from cases import poisoned

    with poisoned():
        yield


@pytest.fixture
def blocks_kept() -> Iterator[None]:
    """Neither blocks nor dense modes may be expanded."""
    from block_cases import unexpanded

    with unexpanded():
        yield


@pytest.fixture(autouse=True)
def _settings_are_restored() -> Iterator[None]:
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    chosen = options._DEFAULT
    yield
    if options._DEFAULT is not chosen:  # by `set_options`
        options._DEFAULT = chosen
        options.latest.number = options._numbered(chosen)
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)  # which numba changes as it first runs in parallel, for pyttb from 100,000 values on


@pytest.fixture
def natively(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A function by which loops of the package are native from now on, however short they are, or not."""
    pytest.importorskip("numba")

    def choose(native: bool) -> None:
        monkeypatch.setattr(files, "ENOUGH", 0)
        monkeypatch.setattr(files, "MANY", 0)
        monkeypatch.setattr(files, "installed", lambda _: native)

    return choose
