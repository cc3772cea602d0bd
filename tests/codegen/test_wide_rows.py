"""Addresses in outputs of 2**31 elements or more are of 64 bits, whatever says which row is written."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from cases import explicit_plan, random_sparse, random_values

import sparsetc as stc
from sparsetc.codegen.triton import module_source

F32 = torch.float32
KEYS = {
    "position of a nonzero": ("ijk,kr->ijkr", "coo", "0||12", "sparse"),
    "slot of a nonzero": ("ijk,kr->ijkr", "fiber", "0|1|2", "sparse"),
    "slot of a lane": ("ijk,kr->ijr", "fiber", "|01|2", "sparse"),
    "slot of an item": ("ijk,kr->ijr", "coo", "01||2", "sparse"),
    "row of a lane": ("ijk,kr->ir", "fiber", "|0|12", "dense"),
    "row of an item": ("ijk,kr->ir", "coo", "0||12", "dense"),
}


def written(key: str, rows: int, copies: int = 1) -> list[str]:
    """The addresses in the output that a program of so many rows of 8 writes."""
    equation, fmt, levels, output = KEYS[key]
    operands = random_sparse((4, 5, 6), "random", F32), random_values((6, 8), F32, 1)
    plan = explicit_plan(fmt, levels, {"r": 8}, lanes=4, max_item_nnz=3)
    (part,) = plan.parts
    plan = replace(plan, parts=(replace(part, schedule=replace(part.schedule, copies=copies)),))
    kernel = stc.compile(equation, *operands, plan=plan, backend="triton", output=output)
    (program,) = kernel.programs
    source = module_source((replace(program, rows=rows),), "tl.float32", False, "", False)
    found = re.findall(r"tl\.(?:store|atomic_add)\(A \+ (.*)", source)
    assert found
    return found


@pytest.mark.parametrize("key", KEYS)
def test_rows_are_numbered_in_64_bits_where_elements_need_it(key: str) -> None:
    assert all("int64" in address for address in written(key, 2**28))
    assert not any("int64" in address for address in written(key, 2**28 - 1))


def test_so_are_copies_of_an_output() -> None:
    for address in written("row of an item", 2**27, copies=2):
        assert address.startswith("(item % 2).to(tl.int64) * 1073741824")
    for address in written("row of an item", 2**26, copies=2):
        assert address.startswith("item % 2 * 536870912")
