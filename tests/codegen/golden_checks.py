"""What every file of generated source under ``tests/golden`` is held to."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def check_as_kept(file: Path, text: str) -> None:
    """The text is the file's, line by line; else the difference is shown."""
    if not file.exists():
        pytest.fail(f"{file} is missing; run python tests/regenerate_golden.py")
    kept, made = file.read_text(encoding="utf-8").splitlines(), text.splitlines()
    if kept != made:
        name = file.relative_to(ROOT).as_posix()
        diff = "\n".join(difflib.unified_diff(kept, made, name, "generated now", lineterm=""))
        pytest.fail(f"if this is meant, run python tests/regenerate_golden.py\n{diff}", pytrace=False)


def check_readable(text: str) -> None:
    """It parses, says what it is, and has neither long lines nor blanks at their ends."""
    assert ast.get_docstring(ast.parse(text))
    longest = max(text.splitlines(), key=len)
    assert len(longest) <= 200, longest
    assert "  \n" not in text
    assert not text.endswith("\n\n")
