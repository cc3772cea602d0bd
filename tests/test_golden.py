"""Generated source is a product: a change of it must be meant. Regenerate by ``python tests/regenerate_golden.py``."""

from __future__ import annotations

import ast
import difflib

import pytest
from golden_cases import CASES, FOLDER, path, source


@pytest.mark.parametrize("name", CASES)
def test_generated_source_is_as_kept(name: str) -> None:
    file = path(name)
    if not file.exists():
        pytest.fail(f"{file} is missing; run python tests/regenerate_golden.py")
    kept, made = file.read_text(encoding="utf-8").splitlines(), source(name).splitlines()
    if kept != made:
        diff = "\n".join(difflib.unified_diff(kept, made, f"golden/{file.name}", "generated now", lineterm=""))
        pytest.fail(f"if this is meant, run python tests/regenerate_golden.py\n{diff}", pytrace=False)


def test_every_file_has_its_case() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_generated_source_can_be_read(name: str) -> None:
    text = source(name)
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    longest = max(text.splitlines(), key=len)
    assert len(longest) <= 200, longest
    assert "  \n" not in text
    assert not text.endswith("\n\n")
