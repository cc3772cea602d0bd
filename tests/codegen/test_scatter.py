"""The kernels that read entries of new patterns, and add rows, ahead of time."""

from __future__ import annotations

import os

import pytest
from matrix_units import TARGETS
from test_decomposition_aot import compiled


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile(target: str) -> None:
    pytest.importorskip("triton")
    from sparsetc.codegen.kernels import add_rows, chain, read_entries, sum_rows

    for word in ("fp32", "fp64"):
        numbers = dict.fromkeys(("row", "column"), "*i64") | dict.fromkeys(("weights", "table", "out"), f"*{word}")
        compiled(add_rows, numbers, {}, target, 4)
    for word in ("fp16", "bf16"):
        chains = dict.fromkeys(("head", "after", "at"), "*i64")
        compiled(sum_rows, chains | dict.fromkeys(("weights", "table", "out"), f"*{word}"), {}, target, 4)
        entries = dict.fromkeys(("coords", "own"), "*i64") | {"outside": "*i32"}
        compiled(read_entries, entries | dict.fromkeys(("values", "copy"), f"*{word}"), {}, target, 4)
    compiled(chain, dict.fromkeys(("row", "head", "after"), "*i64"), {}, target, 4)
