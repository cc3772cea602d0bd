"""Tile programs -> the text of one Triton module.

In: the verified tile programs of a plan's parts, and the types they run in. Out: source that a reader can follow alone:
one function a part, named as its statements are, and one kernel that runs a part (or, fused, all of them: programs
below the first part's count take the first part, and so on).

Rules the text keeps: no inline assembly and no device library (the interpreter has neither); memory gathers only;
addresses in 64 bits only where a product of sizes can pass 2**31; padding is masked when loaded, so that it never
reaches memory or a sum.
"""

from __future__ import annotations

from functools import lru_cache

from sparsetc.codegen.triton_bitmaps import COUNT, POPC
from sparsetc.codegen.triton_function import FunctionPrinter, Types, counts_of, signature
from sparsetc.ir.program.operands import tables, tables_of
from sparsetc.ir.program.tile import TileProgram

__all__ = ["Types", "kernel_arguments", "module_source"]


@lru_cache(maxsize=256)
def module_source(programs: tuple[TileProgram, ...], types: Types, header: str, fused: bool) -> str:
    """The whole file: header, one function a part, and the kernels (`kernel`, or `kernel_0`, `kernel_1`, …)."""
    lines = [f'"""{header}"""', "", "import triton", "import triton.language as tl", ""]
    if any(tiles.bitmap for program in programs for tiles in (program.view.values, *program.view.pairs)):
        lines += ["", *(POPC if types.popcount else COUNT).splitlines(), ""]
    for program in programs:
        lines += ["", *FunctionPrinter(program, types).lines(), ""]
    groups = [programs] if fused else [(p,) for p in programs]
    for number, group in enumerate(groups):
        lines += ["", *_kernel(group, "kernel" if len(groups) == 1 else f"kernel_{number}"), ""]
    return "\n".join(lines).rstrip() + "\n"


def kernel_arguments(group: tuple[TileProgram, ...]) -> tuple[list[str], list[str]]:
    """(counts, pointers): the kernel's integer arguments and then its pointers, in order.

    Counts are, a part: the programs it takes, and its nonzeros where items are equal chunks.
    """
    counts, pointers = [], []
    for p in group:
        counts.append(f"programs_{p.number}")
        if p.view.chunk:
            counts.append(f"nonzeros_{p.number}")
        pointers += [f"{name}_{p.number}" for name in p.arrays]
    return counts, [*pointers, *(t.name for t in tables_of(group)), group[0].output]


def _kernel(group: tuple[TileProgram, ...], name: str) -> list[str]:
    counts, pointers = kernel_arguments(group)
    quoted = ", ".join(f'"{c}"' for c in counts)
    lines = [f"@triton.jit(do_not_specialize=[{quoted}])", *signature(f"def {name}", [*counts, *pointers], ":")]
    if len(group) == 1:
        return [*lines, *_call(group[0], "tl.program_id(0)", "    ")]
    lines.append("    pid = tl.program_id(0)")
    below: list[str] = []
    for n, p in enumerate(group):
        pid = " - ".join(["pid", *below])
        last = n == len(group) - 1
        test = "else:" if last else f"{'if' if n == 0 else 'elif'} {pid} < programs_{p.number}:"
        lines += [f"    {test}", *_call(p, pid, "        ")]
        below.append(f"programs_{p.number}")
    return lines


def _call(p: TileProgram, pid: str, indent: str) -> list[str]:
    own = [f"{name}_{p.number}" for name in (*counts_of(p), *p.arrays)]
    args = [pid, *own, *(t.name for o in p.operands for t in tables(o)), p.output]
    return [indent + line for line in signature(f"part_{p.number}", args, "")]
