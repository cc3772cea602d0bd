"""A case -> the lines of Python that make its operands and call the einsum, and the tensors that they start from.

The lines are run, and of a failure printed below literals of the tensors: a program that anyone can paste.
"""

from __future__ import annotations

import math
from functools import lru_cache
from string import ascii_letters
from types import CodeType
from typing import Any

import torch
from cases import random_values
from fuzz.case import CIRCUMSTANCES, COMPLEX, MEMORY, SPARSE, Case, Operand

IMPORTS = (
    "import copy, io, pickle, scipy.sparse, torch, sparsetc as stc",
    "from concurrent.futures import ThreadPoolExecutor",
    "from math import inf, nan",
)
SPECIAL = (math.nan, math.inf, -math.inf)
SUBLIST = ascii_letters[26:] + ascii_letters[:26]
"""Letters by the number that stands for them in the form with lists."""


# -- tensors ----------------------------------------------------------------------------------------------------------


def numbers(values: tuple[str, int, int], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous tensor of ones, of random numbers, or of "limits": with zeros, or the ends of integers."""
    kind, seed, specials = values
    g, integer = torch.Generator().manual_seed(seed), not (dtype.is_floating_point or dtype.is_complex)
    made = torch.ones(shape, dtype=dtype) if kind == "ones" else random_values(shape, dtype, seed)
    if kind == "limits" and integer:
        info = torch.iinfo(dtype)
        made = torch.randint(info.min, info.max, shape, generator=g)
        made = torch.where(torch.rand(shape, generator=g) < 0.2, info.max, made).to(dtype)
        made = torch.where(torch.rand(shape, generator=g) < 0.1, info.min, made).to(dtype)
    elif kind == "limits":
        made = made * (torch.rand(shape, generator=g) < 0.6)
    for n in range(specials if made.numel() and not integer else 0):
        made.view(-1)[int(torch.randint(0, made.numel(), (1,), generator=g))] = SPECIAL[(seed + n) % 3]
    return made


def coordinates(operand: Operand) -> torch.Tensor | None:
    """(sparse modes, nnz) int64; None for a dense operand."""
    if operand.nonzeros is None:
        return None
    order = len(operand.shape) - operand.dense_modes
    return torch.tensor(operand.nonzeros, dtype=torch.int64).reshape(-1, order).T.contiguous()


def leaf_of(case: Case, operand: Operand) -> torch.Tensor:
    """The tensor that an operand's values are laid out from; gradients are those of these."""
    shape, dtype = operand.value_shape, case.dtype_of(operand)
    shape = (1, *shape[1:]) if operand.memory == "expanded" else shape
    dtype = COMPLEX[dtype] if operand.memory in ("negative", "real") else dtype
    leaf = numbers(operand.values, shape, dtype).to(case.device)
    return leaf.requires_grad_() if operand.learned else leaf


def laid_out(operand: Operand, leaf: torch.Tensor) -> torch.Tensor:
    """What the values of a leaf mean, where their layout says more than where they lie."""
    return eval(_compiled(_memory(operand, "t"), "eval"), {"torch": torch, "t": leaf})


def _memory(operand: Operand, t: str) -> str:
    shape = operand.value_shape
    reverse = ", ".join(map(str, reversed(range(len(shape)))))
    return MEMORY[operand.memory][1].format(t=t, reverse=reverse, shape=shape, last=shape[-1] if shape else 0)


@lru_cache(maxsize=1024)
def _compiled(text: str, mode: str) -> CodeType:
    return compile(text, "<case>", mode)


def tensors(case: Case) -> dict[str, torch.Tensor]:
    """What the lines start from: values and coordinates of the operands, and the gradient of the result."""
    found = {}
    for name, o in zip(case.names, case.operands, strict=True):
        found[f"{name}_values"] = leaf_of(case, o)
        if o.same_as is not None:
            found[f"{name}_values"] = found[f"{case.names[o.same_as]}_values"]
        if (coords := coordinates(o)) is not None:
            found[f"{name}_coords"] = coords.to(case.device)
    if case.kind == "gradients":
        above = numbers(("uniform", 1, 0), tuple(case.sizes[c] for c in case.output), case.promoted)
        found["above"] = above.to(case.device)
    return found


class Built:
    """What a case is run with, and what the reference reads.

    Attributes:
        leaves: of each operand.
        coords: of each sparse operand, on the CPU.
        space: the variables, operands among them.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.space = case, dict[str, Any](tensors(case))
        self.leaves = [self.space[f"{name}_values"] for name in case.names]
        self.coords = [coordinates(o) for o in case.operands]
        exec(_compiled("\n".join((*IMPORTS, *operand_lines(case))), "exec"), self.space)

    def call(self, space: dict[str, Any]) -> Any:
        """Run the lines of the call; returns what they found."""
        exec(_compiled(call_text(self.case), "exec"), space)
        return space["found"]


def program(case: Case) -> str:
    """The same as lines that anyone can paste."""
    lines = [*IMPORTS]
    for name, x in tensors(case).items():
        more = ", requires_grad=True" * x.requires_grad + (f", device={case.device!r}" if x.is_cuda else "")
        lines.append(f"{name} = torch.tensor({x.tolist()}, dtype={x.dtype}{more}).view({tuple(x.shape)})")
    if case.kind == "gradients":
        learned = ", ".join(f"{n}_values" for n, o in zip(case.names, case.operands, strict=True) if o.learned)
        dense = "z if isinstance(z, torch.Tensor) else z.to_dense()"
        lines.append(f"gradients = lambda z: torch.autograd.grad({dense}, [{learned}], above)")
    return "\n".join([*lines, *operand_lines(case), call_text(case), "print(found)"])


def operand_lines(case: Case) -> list[str]:
    """A line for each operand."""
    lines = []
    for name, o in zip(case.names, case.operands, strict=True):
        text = _memory(o, f"{name}_values")
        if o.same_as is not None:
            text = case.names[o.same_as]
        elif o.sparse:
            reverse = ", ".join(map(str, reversed(range(len(o.shape)))))
            text = SPARSE[o.form][1].format(c=f"{name}_coords", v=text, shape=o.shape, reverse=reverse)
        lines.append(f"{name} = {text}")
    return lines


# -- the call ---------------------------------------------------------------------------------------------------------


def _term(case: Case, letters: str) -> str:
    block = next((e for n in range(len(case.ellipsis)) if (e := case.ellipsis[n:]) in letters), "")
    return letters.replace(block, "...") if block else letters


def written(case: Case) -> str:
    """The equation in the case's notation."""
    terms = ",".join(_term(case, o.letters) for o in case.operands)
    text = terms if case.notation == "implicit" else f"{terms}->{_term(case, case.output)}"
    if case.notation == "spaced":
        text = " ".join(text.replace("->", "=").replace("...", "~")).replace("=", "->").replace("~", "...")
    return text


def implicit(case: Case) -> str:
    """The output that an equation without "->" has."""
    text = "".join(c for o in case.operands for c in o.letters if c not in case.ellipsis)
    return case.ellipsis + "".join(sorted(c for c in set(text) if text.count(c) == 1))


def settings(case: Case, plan: str) -> str:
    """Options of the call that are not the defaults, as keyword arguments."""
    given = {"plan": plan.replace("'auto'", ""), "precision": case.precision and repr(case.precision)}
    given |= {"deterministic": str(case.deterministic or ""), "memory_limit": str(case.memory_limit or "")}
    given["backend"] = repr(case.backend) if case.backend != ("torch" if case.device == "cpu" else "triton") else ""
    return ", ".join(f"{k}={v}" for k, v in given.items() if v)


def _arguments(case: Case, options: str) -> str:
    names = case.names
    if case.notation == "sublists":
        lists = [[SUBLIST.index(c) for c in letters] for letters in (*(o.letters for o in case.operands), case.output)]
        given = ", ".join(f"{name}, {at}" for name, at in zip(names, lists, strict=False)) + f", {lists[-1]}"
    else:
        operands = ", ".join(names)
        given = f'"{written(case)}", ' + (f"[{operands}]" if case.notation == "list" else operands)
    form = f'output="{case.form}"' if case.form != "auto" else ""
    return ", ".join(filter(None, (given, options, form)))


def call_text(case: Case) -> str:
    """The lines that call the einsum in the case's circumstance and bind ``found``."""
    made, graph = case.plan.startswith("stc."), "gradients({})" if case.kind == "gradients" else "{}"
    plain = settings(case, "plan" if made else repr(case.plan))
    pairs = [*zip(case.names, case.operands, strict=True)]
    (first, own), *others = ((name, o) for name, o in pairs if o.sparse)
    dense, given = ", ".join(name for name, o in pairs if not o.sparse), _arguments(case, plain)
    text = CIRCUMSTANCES[case.circumstance][1].format(
        **{"x": first, "dense": dense, "settings": plain, "device": case.device},
        call=graph.format(f"stc.einsum({given})"),
        bare=graph.format(f"stc.einsum({_arguments(case, '')})"),
        compile=f"stc.compile({given})",
        kept=graph.format(f"k({dense})"),
        doubled=", ".join((f"{first}.values * 2", *["None" for _ in others])),
        limited=graph.format(f"stc.einsum({given}, memory_limit=2**40 + n)"),
        planned=graph.format(f"stc.einsum({_arguments(case, settings(case, 'k.plan'))})"),
        identity="{0}->{0}".format("abcdefgh"[: len(own.letters)]),
    )
    return f"plan = {case.plan.format(plain=_arguments(case, settings(case, '')))}\n{text}" if made else text
