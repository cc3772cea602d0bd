"""The source distribution and the wheel, built offline from a copy of the checkout: their files and their metadata.

Neither pip nor the network takes part: setuptools, which the `test` extra installs, is called as pip would call it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

import sparsetc as stc

ROOT = Path(__file__).parents[2]
FOLDERS = (".ci", "benchmarks", "docs", "examples", "sparsetc", "tests")
FILES = (
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "SECURITY.md"),
    *("constraints.txt", "pyproject.toml"),
)
GENERATED = ("PKG-INFO", "setup.cfg", "sparsetc.egg-info/")
EXTRAS = ("cpu", "files", "io", "plot", "progress")
LITTER = (
    *(".git/config", ".hypothesis/examples/0", ".pytest_cache/README.md", "build/lib/sparsetc/old.py", "data/nell.npz"),
    *("sparsetc/__pycache__/a.cpython-311.pyc", "sparsetc/ir/__pycache__/b.cpython-311.pyc"),
    *("tests/__pycache__/c.cpython-311.pyc", "benchmarks/results/mttkrp.tmp", "notes.txt"),
)
"""Files that a checkout collects and no distribution holds."""


def _setuptools() -> str | None:
    """Return why setuptools cannot build here; None where it can."""
    try:
        version = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        return 'building needs setuptools: pip install -e ".[test]"'
    return None if int(version.split(".")[0]) >= 77 else f"building needs setuptools 77 or newer, found {version}"


def _build(kind: str, source: Path, target: Path) -> Path:
    """Return the distribution that setuptools builds in ``source``; ``kind`` is "sdist" or "wheel"."""
    code = f"from setuptools.build_meta import build_{kind} as build; print(build({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "is absent from the `packages` configuration" not in done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return the unpacked source distribution, the wheel that is built from it, and that wheel unpacked."""
    if reason := _setuptools():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("release")
    checkout, target = folder / "checkout", folder / "dist"
    caches = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, checkout / name, ignore=caches)
    for name in FILES:
        shutil.copy(ROOT / name, checkout)
    for name in LITTER:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    with tarfile.open(_build("sdist", checkout, target)) as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"sparsetc-{stc.__version__}"
    shutil.copytree(source, folder / "source")  # building writes into the folder it builds from
    wheel = _build("wheel", folder / "source", target)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return source, wheel, folder / "unpacked"


def _files(folder: Path, *below: str) -> set[str]:
    """Return the paths of files, relative to ``folder``; those in the folders ``below`` where any are named."""
    paths = [p for name in below or (".",) for p in (folder / name).rglob("*") if p.is_file()]
    return {p.relative_to(folder).as_posix() for p in paths}


def _of_checkout(*below: str) -> set[str]:
    """Return the files of this checkout in some of its folders, without caches."""
    return {name for name in _files(ROOT, *below) if not re.search(r"__pycache__|_cache/|\.hypothesis|\.tmp$", name)}


def test_the_source_distribution_holds_the_checkout(built: tuple[Path, Path, Path]) -> None:
    found = {name for name in _files(built[0]) if not name.startswith(GENERATED)}
    expected = {*_of_checkout(*FOLDERS), *FILES}
    assert found - expected == set()
    assert expected - found == set()
    assert {"tests/golden/mttkrp_coo.py", "benchmarks/results/rates_h200.json", "sparsetc/py.typed"} <= found


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path, Path]) -> None:
    _, wheel, unpacked = built
    assert wheel.name == f"sparsetc-{stc.__version__}-py3-none-any.whl"
    found, package = _files(unpacked), _of_checkout("sparsetc")
    assert {"sparsetc/py.typed", "sparsetc/data/uber.tns.gz", "sparsetc/device/profiles/cpu.json"} <= package
    assert {name for name in found if name.startswith("sparsetc/")} == package
    beside = {name for name in found if not name.startswith("sparsetc/")}
    assert {name.partition("/")[0] for name in beside} == {f"sparsetc-{stc.__version__}.dist-info"}
    assert f"sparsetc-{stc.__version__}.dist-info/licenses/LICENSE" in beside
    assert wheel.stat().st_size < 2_500_000


def test_the_wheel_runs(built: tuple[Path, Path, Path], tmp_path: Path) -> None:
    code = (
        "import sparsetc as stc, torch\n"
        f"assert stc.__file__.startswith({str(built[2])!r}), stc.__file__\n"
        "x = stc.datasets.uber()\n"
        "b, c, d = (torch.rand(n, 4) for n in x.shape[1:])\n"
        "assert stc.einsum('ijkl,jr,kr,lr->ir', x, b, c, d).shape == (23, 4)\n"
    )
    settings = {"PYTHONPATH": str(built[2]), "OMP_NUM_THREADS": "1", "SPARSETC_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | settings, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_both_say_the_same_of_the_project(built: tuple[Path, Path, Path]) -> None:
    source, _, unpacked = built
    folder = unpacked / f"sparsetc-{stc.__version__}.dist-info"
    wheel, sdist = _metadata(folder / "METADATA"), _metadata(source / "PKG-INFO")
    for name in ("Name", "Version", "Classifier", "Requires-Dist", "Provides-Extra", "License-Expression", "Keywords"):
        assert wheel.get_all(name) == sdist.get_all(name), name
    assert (wheel["Name"], wheel["Version"]) == ("sparsetc", stc.__version__)
    assert (wheel["License-Expression"], wheel.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    assert (wheel["Requires-Python"], wheel["Description-Content-Type"]) == (">=3.10", "text/markdown")
    classifiers = wheel.get_all("Classifier") or []
    pythons = [c.rpartition(" ")[2] for c in classifiers if re.search(r":: Python :: 3\.\d", c)]
    assert pythons == [f"3.{minor}" for minor in range(10, 14)]
    assert "Typing :: Typed" in classifiers
    assert set(wheel.get_all("Provides-Extra") or []) == {*EXTRAS, "all", "docs", "test"}
    everything = next(r for r in wheel.get_all("Requires-Dist") or [] if r.endswith('extra == "all"'))
    assert sorted(re.findall(r"\w+", everything.partition("]")[0])[1:]) == list(EXTRAS)
    assert "sparsetc = sparsetc.__main__:main" in (folder / "entry_points.txt").read_text()


def _metadata(path: Path) -> Message:
    """Return the fields of a distribution's metadata."""
    return Parser().parsestr(path.read_text(encoding="utf-8"))


def test_the_version_is_that_of_the_change_log_and_the_citation() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[([^\]]+)\]", changes, re.MULTILINE)
    assert stc.__version__ in versions[:2], "the newest release, below what is unreleased"
    yaml = pytest.importorskip("yaml", reason='the citation is YAML: pip install -e ".[test]"')
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", stc.__version__)
    assert {"message", "title", "authors", "references"} <= set(citation)
    assert all({"type", "title", "authors"} <= set(reference) for reference in citation["references"])
