"""The kernels that add rows of new patterns, ahead of time."""

from __future__ import annotations

import os

import pytest
from matrix_units import TARGETS
from test_decomposition_aot import compiled


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile(target: str) -> None:
    pytest.importorskip("triton")
    from sparsetc.codegen.kernels import add_rows, chain, sum_rows

    for word, sum_of in (("fp32", "fp32"), ("fp64", "fp64"), ("fp16", "fp32"), ("bf16", "fp32")):
        numbers = dict.fromkeys(("row", "column"), "*i64") | dict.fromkeys(("weights", "table"), f"*{word}")
        compiled(add_rows, {**numbers, "out": f"*{sum_of}"}, {}, target, 4)
    for word in ("fp16", "bf16"):
        chains = dict.fromkeys(("head", "after", "at"), "*i64")
        compiled(sum_rows, chains | dict.fromkeys(("weights", "table", "out"), f"*{word}"), {}, target, 4)
    compiled(chain, dict.fromkeys(("row", "head", "after"), "*i64"), {}, target, 4)
