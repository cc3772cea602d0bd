"""The generated source of contractions of sparse operands: a change of it must be meant."""

from __future__ import annotations

import ast
import difflib

import pytest
from golden_pairs import CASES, FOLDER, path, source


@pytest.mark.parametrize("name", CASES)
def test_generated_source_is_as_kept(name: str) -> None:
    kept, made = path(name).read_text(encoding="utf-8").splitlines(), source(name).splitlines()
    if kept != made:
        diff = "\n".join(difflib.unified_diff(kept, made, f"golden/pairs/{name}.py", "generated now", lineterm=""))
        pytest.fail(f"if this is meant, run python tests/regenerate_golden.py\n{diff}", pytrace=False)


def test_every_file_has_its_case() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_generated_source_can_be_read(name: str) -> None:
    text = source(name)
    assert ast.get_docstring(ast.parse(text))
    assert max(map(len, text.splitlines())) <= 200
    assert "  \n" not in text
    assert not text.endswith("\n\n")
