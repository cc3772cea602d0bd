"""The package as it is installed and imported: versions, modules on demand, its tensor, types for other projects."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import processes
import pytest
import torch

import sparsetc as stc

ROOT = Path(__file__).parents[1]
PACKAGE = Path(stc.__file__).parent  # that of the checkout, or a wheel's
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_version_stands_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", stc.__version__)
    assert 'dynamic = ["version"]' in PROJECT
    assert not re.search(r"^version *= *\"", PROJECT, re.MULTILINE)
    try:
        installed = metadata.version("sparsetc")
    except metadata.PackageNotFoundError:
        return  # a source tree
    assert installed == stc.__version__


def test_what_pip_can_resolve_is_required() -> None:
    """Torch 2.10, the first whose own Triton serves, loses forward-mode tangents in graphs."""
    assert '"torch>=2.11"' in PROJECT
    assert "\"triton>=3.6; platform_system == 'Linux'\"" in PROJECT
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "torch 2.11 or newer" in readme


def test_type_checkers_find_an_install_too(tmp_path: Path) -> None:
    """An editable install is a path, which type checkers follow, and not a hook of the import system."""
    code = "from importlib.machinery import PathFinder; raise SystemExit(PathFinder.find_spec('sparsetc') is None)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=300)
    assert done.returncode == 0, "install it again: pip install -e ."
    assert (Path(stc.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("name", ["datasets", "decomposition", "testing"])
def test_modules_are_imported_on_demand(name: str) -> None:
    code = (
        "import sys, sparsetc as stc\n"
        f"assert 'sparsetc.{name}' not in sys.modules\n"
        f"assert '{name}' in dir(stc) and '{name}' in stc.__all__\n"
        f"assert stc.{name} is sys.modules['sparsetc.{name}']\n"
        "assert 'triton' not in sys.modules\n"
        "assert not hasattr(stc, 'absent')\n"
    )
    done = processes.run(["-c", code])
    assert done.returncode == 0, done.stderr


def test_operators_of_graphs_are_registered_where_one_is_traced() -> None:
    code = (
        "import sys, torch, sparsetc as stc\n"
        "x, b = stc.SparseTensor([[0, 1], [1, 2]], torch.ones(2), (3, 3)), torch.rand(3, 2)\n"
        "kernel = stc.compile('ij,jr->ir', x, b)\n"
        "expected = kernel(b)\n"
        "assert 'sparsetc.contraction.library' not in sys.modules\n"
        "traced = torch.compile(kernel, fullgraph=True, backend='eager')\n"
        "assert torch.equal(traced(b), expected)\n"
    )
    done = processes.run(["-c", code])
    assert done.returncode == 0, done.stderr


def test_an_import_loads_what_every_call_needs() -> None:
    """None of what torch may have loaded before is asked for again: a name that is None in sys.modules is refused."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "others = ('sympy', 'mpmath', 'opt_einsum', 'triton', 'scipy', 'tqdm')\n"
        "held = {name: sys.modules[name] for name in others if name in before}\n"
        "sys.modules.update(dict.fromkeys(others))\n"
        "import sparsetc as stc\n"
        "assert all(sys.modules[name] is None for name in others)\n"
        "new = set(sys.modules) - before - set(others)\n"
        "assert {n.partition('.')[0] for n in new} <= {'sparsetc', *sys.stdlib_module_names}, new\n"
        "parts = 'pair', 'io', 'device.calibrate', 'codegen.triton', 'testing', 'foreign'\n"
        "parts = *parts, 'decomposition'\n"
        "assert not {f'sparsetc.{name}' for name in parts} & new\n"
        "for name in others: del sys.modules[name]\n"
        "sys.modules.update(held)\n"
        "assert set(stc.__all__) <= set(dir(stc))\n"
        "assert all(getattr(stc, name) is getattr(stc, name) for name in ('read', 'plans', 'attention'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_no_property_has_a_lock() -> None:
    locked = r"from functools import .*\bcached_property\b|functools\.cached_property"
    users = [path for path in PACKAGE.rglob("*.py") if re.search(locked, path.read_text(encoding="utf-8"))]
    assert users == [PACKAGE / "support" / "__init__.py"], "import it from sparsetc.support"


def test_the_tensor_that_comes_with_the_package() -> None:
    path = PACKAGE / "data" / "uber.tns.gz"
    assert path.stat().st_size < 1_000_000
    x = stc.datasets.uber()
    assert (x.shape, x.nnz, x.dtype) == ((23, 24, 887, 1410), 303_343, torch.float32)
    assert x.values.min() >= 1
    assert "303,343" in str(stc.datasets.uber.__doc__)
    exact = stc.datasets.uber(dtype=torch.int64)
    assert exact.dtype == torch.int64
    assert torch.equal(exact.values.float(), x.values)
    with stc.options(device="meta"):
        assert stc.datasets.uber().device.type == "meta"
