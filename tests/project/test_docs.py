"""The documentation site: it builds, every public name is in the reference once, the code of pages runs."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from math import inf
from pathlib import Path
from statistics import geometric_mean
from types import ModuleType
from typing import Any

import pytest
import torch

import sparsetc as stc

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(stc.__file__).parent  # that of the checkout, or a wheel's
RUN = (
    "index.md",
    *(f"guides/{name}.md" for name in ("equations", "plans", "precision", "tensors", "like_a_tensor", "semi_sparse")),
    *(f"guides/{name}.md" for name in ("layers", "transforms", "decompositions", "tuning", "streaming")),
    *(f"guides/{name}.md" for name in ("maps", "packed_files", "deployment")),
)
"""Pages all of whose code is run, from top to bottom."""
RIDDLE = re.compile(r"(What|Whether|Which|Those|Of|The same|By|They|How|That|As|In|Where|Who|Whose|When|While)\b")
"""Words that no summary of a docstring begins with: it has a verb, or names a thing."""
PRONOUN = re.compile(r"\b(that|which|whose|whom|who|what)\b", re.IGNORECASE)
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


def test_docstrings_begin_with_a_plain_statement() -> None:
    riddles = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                sentence = re.split(r"\.(?:\s|$)", text)[0]
                if RIDDLE.match(text) or len(PRONOUN.findall(sentence)) > 1:
                    riddles.append(f"{path.relative_to(PACKAGE)}: {text}")
    assert riddles == []


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """From another folder, as paths of the configuration are relative to its file; --quiet would count no warnings."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml")]
    done = subprocess.run([*command, "--site-dir", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "reference" / "einsums" / "index.html").exists()


def test_guides_name_no_files_of_the_package() -> None:
    """How it runs belongs to *How it works*."""
    files = {path.name for path in PACKAGE.rglob("*.py")} - {"__init__.py"}
    named = {
        page.name: {
            *re.findall(r"(?<!examples/)(?<!benchmarks/)(?<!tests/)\b(\w+\.py)`", page.read_text(encoding="utf-8"))
        }
        for page in (ROOT / "docs" / "guides").glob("*.md")
    }
    assert {page: found & files for page, found in named.items() if found & files} == {}


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
        missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
        assert [link for link in missing if not (PACKAGE.parent / link).exists()] == []


GPU = "h200/instead"


def measured(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def ratios(name: str, *tasks: str, measure: str = "call_ratio") -> list[float]:
    return [row[measure] for row in measured(name)["rows"] if row["task"].startswith(tasks) and measure in row]


def test_the_readme_says_what_was_measured() -> None:
    """Each figure of the README, computed from the records."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    mttkrp, layers = ratios(GPU, "MTTKRP"), ratios(GPU, "graph layers")
    beside_pyg = [
        next(times["call_us"] for peer, times in row["peers"].items() if "geometric" in peer) / row["ours"]["call_us"]
        for row in measured(GPU)["rows"]
        if row["task"].startswith("graph layers")
    ]
    masks = measured("maps")["first"]
    forward, both = (masks["ours window+global 4096"][pass_] for pass_ in ("fwd", "both"))
    flex = [masks[f"flex {side} window+global 4096"] for side in (64, 128)]
    attention = (min(one["fwd"] for one in flex) / forward, min(one.get("both", inf) for one in flex) / both)
    spmm = ratios("instead_cpu", "sparse times dense: R-MAT", "sparse times dense: pruned")
    small = ratios("instead_cpu", "sparse times dense: 100 x 100")
    new = ratios(GPU, "a new graph each step")
    (cp,) = [row for row in measured("instead_cpu")["rows"] if row["task"].startswith("decomposition: CP-ALS, Uber")]
    first = [row["plan_pack_compile_s"] for row in measured("overhead")["rows"]]
    calls = ratios(GPU, "")
    assert f"| {min(mttkrp):.1f} to {max(mttkrp):.0f}, mean {geometric_mean(mttkrp):.1f} |" in readme
    assert f"| PyTorch Geometric | {min(beside_pyg):.1f} to {max(beside_pyg):.1f} |" in readme
    assert f"gather and scatter | {min(layers):.2f} to {max(layers):.1f} |" in readme
    assert f"| FlexAttention | {attention[0]:.1f} forward, {attention[1]:.1f} with gradients |" in readme
    assert f"torch's CSR | {min(spmm):.1f} to {max(spmm):.1f} |" in readme
    assert f"| pyttb | {cp['peers']['pyttb 1.8.6']['call_us'] / cp['ours']['call_us']:.0f} |" in readme
    assert f"| {min(new):.2f} to {max(new):.2f} |" in readme
    assert f"| {min(small):.2f} to {max(small):.2f} |" in readme
    for page in (readme, (ROOT / "docs" / "index.md").read_text(encoding="utf-8")):
        assert f"{min(first):.2f} to {max(first):.1f} s for 18 and 72 million nonzeros" in page
    assert f"{sum(ratio < 1 for ratio in calls)} of {len(calls)} tasks on the H200" in readme
