"""The documentation site: it builds, every public name is in the reference once, the code of pages runs."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean
from types import ModuleType
from typing import Any

import pytest
import torch

import sparsetc as stc

ROOT = Path(__file__).resolve().parent.parent
RUN = (
    "index.md",
    *(f"guides/{name}.md" for name in ("equations", "plans", "precision", "tensors", "like_a_tensor", "semi_sparse")),
    *(f"guides/{name}.md" for name in ("layers", "transforms", "decompositions", "tuning", "streaming")),
    *(f"guides/{name}.md" for name in ("maps", "packed_files", "deployment")),
)
"""Pages all of whose code is run, from top to bottom."""
MODULES = ("datasets", "decomposition", "distributed", "masks", "nn", "plans", "plot", "testing")


def test_the_reference_has_every_public_name_once() -> None:
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md"))]
    paths = [path.rpartition(".") for page in pages for path in re.findall(r"^::: (sparsetc\.[\w.]+)$", page, re.M)]
    described = [getattr(pkgutil.resolve_name(module), name) for module, _, name in paths]
    public = {name: getattr(stc, name) for name in stc.__all__ if name not in MODULES}
    for module in map(importlib.import_module, (f"sparsetc.{name}" for name in MODULES)):
        public |= {f"{module.__name__}.{name}": getattr(module, name) for name in getattr(module, "__all__", ())}
    for name, thing in public.items():  # some functions have two public names
        assert sum(thing is one for one in described) == sum(thing is one for one in public.values()), name
    assert not [name for (_, _, name), one in zip(paths, described, strict=True) if isinstance(one, ModuleType)]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """From another folder, as paths of the configuration are relative to its file."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml")]
    done = subprocess.run([*command, "--site-dir", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "reference" / "einsums" / "index.html").exists()


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        exec(compile(block, page, "exec"), space)


def test_the_links_of_pages_outside_the_site_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
        assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_readme_says_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "mttkrp.json").read_text(encoding="utf-8"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    calls, kernels = ([row["peer_us"] / row[time] for row in measured["rows"]] for time in ("call_us", "kernel_us"))
    assert f"a call of MTTKRP is {geometric_mean(calls):.1f} times as fast as the best" in readme
    assert f"the least of them {min(calls):.1f}; the kernels alone {geometric_mean(kernels):.1f}" in readme
