"""Folders of tests on the path of imports: what several of them share lies beside the tests that it is about."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE), *sorted(str(f) for f in HERE.iterdir() if f.is_dir() and f.name not in ("fuzz", "golden"))]
