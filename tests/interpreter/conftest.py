"""These tests run the generated Triton source under Triton's interpreter, on CPU tensors.

The interpreter is chosen when triton is imported, so they need a process of their own::

    TRITON_INTERPRET=1 python -m pytest tests/interpreter

Without the variable they are not collected; `tests/project/test_interpreter.py` starts that process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    import interpreting
    import triton.language as tl

    interpreting.faster()

    if type(tl.sum).__name__ != "InterpretedFunction":
        raise RuntimeError(
            "triton was imported before TRITON_INTERPRET was set, so nothing here would run under the interpreter; "
            f"start a new process with TRITON_INTERPRET=1 (first on the path: {sys.path[0]})"
        )


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    import sparsetc as stc

    with stc.options(backend="triton"):
        yield
