"""Scripts in processes of their own, forked from one that has imported the package: a fraction of a second, not three.

A script sees what it would see if Python had been started for it: its arguments, environment, folder, path of imports
and standard streams. The package is imported, and nothing that it imports on demand: a script may set
`TRITON_INTERPRET`. What tests of importing must see, what an import does or that another package is found, needs a new
process.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import folders
import machine_code


@lru_cache(None)
def _context() -> Any:
    """Python's server of forks; started by the first script, with one thread for each of its children."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", "torch.fx.experimental.symbolic_shapes", "sparsetc"])
    root, others = str(folders.HERE.parent), os.environ.get("PYTHONPATH", "")
    with mock.patch.dict(os.environ, PYTHONPATH=f"{root}{os.pathsep}{others}"):  # where the package is that is tested
        forkserver.ensure_running()
    return context


class Script:
    """A script that runs.

    Args:
        arguments: as Python's command line has them: ``-c CODE``, ``-m MODULE`` or a file, and the script's own.
        env: the environment; that of this process unless given.
        cwd: the folder to run in; the current one unless given.
    """

    def __init__(
        self, arguments: Sequence[object], env: Mapping[str, str] | None = None, cwd: str | Path | None = None
    ) -> None:
        self.args = list(map(str, arguments))
        self._streams = [tempfile.NamedTemporaryFile(prefix="sparsetc-script-") for _ in range(2)]  # noqa: SIM115
        names = [s.name for s in self._streams]
        told = (self.args, dict(os.environ if env is None else env), str(cwd or Path.cwd()), names)
        self._process = _context().Process(target=_run, args=told)
        self._process.start()

    def result(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Status and output, once the script has ended; it is killed and TimeoutExpired raised after ``timeout`` s."""
        self._process.join(timeout)
        late = self._process.exitcode is None
        self.kill()
        out, err = (Path(s.name).read_text(encoding="utf-8", errors="replace") for s in self._streams)
        if late:
            raise subprocess.TimeoutExpired(self.args, timeout, out, err)
        return subprocess.CompletedProcess(self.args, self._process.exitcode, out, err)

    def runs(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def run(arguments: Sequence[object], timeout: float = 300, **settings: Any) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` of Python with these arguments gives, output captured as text."""
    return Script(arguments, **settings).result(timeout)


def _run(arguments: list[str], environment: dict[str, str], folder: str, streams: list[str]) -> None:
    """Become Python with these arguments."""
    for path, stream in zip(streams, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, encoding="utf-8", closefd=False) for n in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    machine_code.share()
    if environment.get("TRITON_INTERPRET") == "1":
        import interpreting

        interpreting.faster()
    first, *rest = arguments
    paths = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    others = [p for p in sys.path if p not in ("", *folders.PATHS, *paths)]
    if first == "-c":
        sys.path[:] = ["", *paths, *others]
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.path[:] = [folder, *paths, *others]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[:] = [str(Path(first).resolve().parent), *paths, *others]
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")
