"""The kernels that read entries and copy runs of them, ahead of time."""

from __future__ import annotations

import os

import pytest
from matrix_units import TARGETS
from test_decomposition_aot import compiled


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile(target: str) -> None:
    pytest.importorskip("triton")
    from sparsetc.codegen.kernels import copy_runs, read_entries

    compiled(copy_runs, dict.fromkeys(("kinds", "first", "ends", "coords", "taken", "entries"), "*i64"), {}, target, 4)
    entries = dict.fromkeys(("coords", "own"), "*i64") | {"outside": "*i32"}
    for word in ("fp16", "fp64"):
        compiled(read_entries, entries | dict.fromkeys(("values", "copy"), f"*{word}"), {}, target, 4)
