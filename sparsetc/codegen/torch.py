"""Tile programs -> the text of one torch module: the default without a GPU, and the reference for tests.

In: tile programs of whole axes (`ir.lower.whole`), of views with one lane, so that nothing is padded. Out: source in
which every statement is done for a whole chunk of items at once. Chunks keep what is made on the way inside the cache.
"""

from __future__ import annotations

import re
from functools import lru_cache

from sparsetc.codegen.torch_function import FunctionPrinter
from sparsetc.ir.program.tile import TileProgram

RUNTIME = {
    "sparsetc.runtime.bitmaps": ("expanded",),
    "sparsetc.runtime.integer_einsum": ("integer_einsum",),
    "sparsetc.runtime.products": ("matmul_precision", "multiply"),
    "sparsetc.runtime.segments": ("add_rows", "bag", "bags", "run_products", "run_sums"),
}
"""What generated programs may call."""


@lru_cache(maxsize=256)
def module_source(programs: tuple[TileProgram, ...], header: str, integers: bool = False) -> str:
    """The whole file: header and one function a part; `integers` says of what type the operands are."""
    functions = ["\n".join(p.lines(integers) if p.covers else FunctionPrinter(p, integers).lines()) for p in programs]
    body = "\n\n\n".join(functions)
    called = set(re.findall(r"(?<!\.)\b(\w+)\(", body))
    used = {module: [name for name in names if name in called] for module, names in RUNTIME.items()}
    imports = [f"from {module} import {', '.join(own)}" for module, own in used.items() if own]
    head = [f'"""{header}"""']
    head += ["import torch"] if "torch." in body else []
    head += ["\n".join(imports)] if imports else []
    return "\n\n".join(head) + f"\n\n\n{body}\n"
