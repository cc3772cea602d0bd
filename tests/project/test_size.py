"""The package grows no larger than it is, and no level of it imports one above."""

import logging
import sys
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import size  # noqa: E402

MOST = {size.TOKENS: 397_288, size.COMPILER: 293_824, size.FILES: 230, size.CLASSES: 252, size.KNOT: 0, size.FOLDERS: 0}
"""What no figure may pass. Lower them as they fall."""


def test_no_figure_rises() -> None:
    figures = size.static(ROOT)
    assert {name: figures[name] for name, most in MOST.items() if figures[name] > most} == {}


def test_no_level_imports_one_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(logging.getLogger("sparsetc"), "disabled", False)  # as it is again after import-linter's set-up
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True) == 0
