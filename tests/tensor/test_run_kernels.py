"""The kernel that copies runs of entries, ahead of time."""

from __future__ import annotations

import os

import pytest
from matrix_units import TARGETS
from test_decomposition_aot import compiled


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles(target: str) -> None:
    pytest.importorskip("triton")
    from sparsetc.tensor.run_kernels import runs

    arrays = dict.fromkeys(("kinds", "first", "ends", "coords", "taken"), "*i64")
    for bits in ("i8", "i16", "i32", "i64"):
        compiled(runs, arrays | dict.fromkeys(("values", "taken_values"), f"*{bits}"), {"WIDE": 8}, target, 4)
