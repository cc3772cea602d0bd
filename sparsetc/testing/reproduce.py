"""A case as a few lines of plain Python that anyone can paste.

In: a `Case`. Out: text that makes the operands from literals, calls the einsum in its circumstance, and prints what was
found beside what was expected.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from sparsetc.testing.build import build, call_text, coordinates
from sparsetc.testing.case import Case
from sparsetc.testing.expected import result_expected
from sparsetc.testing.forms import memory_text, sparse_text
from sparsetc.testing.gradients import gradient_expected, gradient_names, upstream

SHOWN = 40
"""Elements of an expected result that are printed."""
IMPORTS = {
    "ThreadPoolExecutor": "from concurrent.futures import ThreadPoolExecutor",
    "scipy.": "import scipy.sparse",
    "pickle.": "import pickle",
    "copy.": "import copy",
    "io.": "import io",
    "inf": "from math import inf, nan",
    "nan": "from math import inf, nan",
}
"""What is imported where a text holds a word."""


def reproducer(case: Case) -> str:
    """The lines, without a newline at the end."""
    lines = operand_lines(case)
    if case.kind == "gradients":
        lines.append(_gradient_line(case))
    lines += call_text(case).split("\n")
    shown = "found"
    if case.kind != "gradients":
        shown = "found if isinstance(found, torch.Tensor) else found.to_dense()"
    expected = _expected(case)
    lines.append(f"print({shown})" + (f"  # expected {expected}" if expected else ""))
    text = "\n".join(lines)
    imports = dict.fromkeys(line for word, line in IMPORTS.items() if word in text)
    return "\n".join(["import torch, sparsetc as stc", *(["; ".join(imports)] if imports else []), text])


def operand_lines(case: Case) -> list[str]:
    """A line for each operand: its values, their layout, and the sparse tensor."""
    built = build(case)
    lines = []
    for operand, name, leaf in zip(case.operands, case.names, built.leaves, strict=True):
        if operand.same_as is not None:
            lines.append(f"{name} = {case.names[operand.same_as]}")
            continue
        laid = memory_text(operand.memory, "{}", operand.value_shape)
        literal = literal_of(leaf)
        where = coordinates(operand)
        inline = laid == "{}" and not operand.learned
        variable = f"{name}_values" if where is not None or operand.learned else name
        parts = [] if inline and where is not None else [f"{variable} = {literal}"]
        value = literal if inline else laid.replace("{}", variable)
        if where is not None:
            c = literal_of(where, case.device)
            if case.circumstance == "coordinates":
                parts.append(f"{name}_coords = {c}")
                c = f"{name}_coords"
            parts.append(f"{name} = {sparse_text(operand.form, c, value, operand.shape)}")
        elif value != literal and value != name:
            parts.append(f"{name} = {value}")
        lines.append("; ".join(parts))
    return lines


def literal_of(tensor: torch.Tensor, device: str = "") -> str:
    """An expression that makes the tensor."""
    values = tensor.detach().cpu()
    understood = (torch.float32, torch.int64) if values.numel() else (torch.float32,)
    settings = "" if values.dtype in understood else f", dtype={values.dtype}"
    where = device or tensor.device.type
    settings += f', device="{where}"' if where != "cpu" else ""
    settings += ", requires_grad=True" if tensor.requires_grad else ""
    if not values.numel():
        return f"torch.zeros({tuple(values.shape)}{settings})"
    return f"torch.tensor({_short(values.tolist())}{settings})"


def _short(found: Any) -> str:
    if isinstance(found, list):
        return f"[{', '.join(_short(f) for f in found)}]"
    if isinstance(found, float) and math.isfinite(found) and found == int(found):
        return f"{int(found)}."
    return str(found)


def _gradient_line(case: Case) -> str:
    leaves = ", ".join(f"{name}_values" for name in gradient_names(case) if name != "upstream")
    dense = "(z if isinstance(z, torch.Tensor) else z.to_dense())"
    above = literal_of(upstream(case), case.device)
    if not case.second:
        return f"gradients = lambda z: torch.autograd.grad({dense}, [{leaves}], {above})"
    return f"above = {above}.requires_grad_()\n" + (
        f"gradients = lambda z: torch.autograd.grad(sum(g.real.sum() for g in torch.autograd.grad({dense}, "
        f"[{leaves}], above, create_graph=True)), [{leaves}, above], allow_unused=True)"
    )


def _expected(case: Case) -> str:
    if case.second:
        return ""
    found = gradient_expected(build(case)) if case.kind == "gradients" else [result_expected(build(case))]
    if sum(f.values.numel() for f in found) > SHOWN:
        return ""
    digits = [f.values.tolist() for f in found]
    return str(_rounded(digits if case.kind == "gradients" else digits[0]))


def _rounded(found: Any) -> Any:
    if isinstance(found, list):
        return [_rounded(f) for f in found]
    return round(found, 6) if isinstance(found, float) and math.isfinite(found) else found
