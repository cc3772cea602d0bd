"""The kernel that adds rows of new patterns, ahead of time."""

from __future__ import annotations

import os

import pytest
from matrix_units import TARGETS
from test_decomposition_aot import compiled


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles(target: str) -> None:
    pytest.importorskip("triton")
    from sparsetc.codegen.scatter_kernels import add_rows

    for word in ("fp32", "fp64"):
        numbers = dict.fromkeys(("row", "column"), "*i64") | dict.fromkeys(("weights", "table", "out"), f"*{word}")
        compiled(add_rows, numbers, {}, target, 4)
