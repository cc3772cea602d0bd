"""A case -> tensors, and the lines of Python that call the einsum.

In: a `Case`. Out: `Built`: the leaves that hold values, the variables of the operands, and coordinates, from which the
reference works; and the text of the call in its circumstance, which is run with those variables and can be printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from string import ascii_uppercase
from types import CodeType
from typing import Any

import torch

from sparsetc.testing.case import SPLIT, Case, DrawnOperand, DrawnValues, PlanCall
from sparsetc.testing.forms import ARRAYS, CIRCUMSTANCES, MEMORY, memory_text, sparse_text

SUBLIST = ascii_uppercase + ascii_uppercase.lower()
"""Letters by the number that stands for them in the form with lists."""


# -- values -----------------------------------------------------------------------------------------------------------


def _uniform(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    if dtype.is_complex:
        return torch.complex(*(torch.rand(shape, generator=g, dtype=torch.float64) * 2 - 1 for _ in range(2))).to(dtype)
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=g, dtype=torch.float64) * 2 - 1).to(dtype)
    return torch.randint(-3, 4, shape, generator=g).to(dtype)


def _counting(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return (torch.arange(math.prod(shape)) % 7 + 1).reshape(shape).to(dtype)


def _ones(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def _limits(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Integers over the whole range, its ends among them; for other types, zeros among random numbers."""
    if dtype.is_floating_point or dtype.is_complex:
        return _uniform(shape, dtype, g) * (torch.rand(shape, generator=g) < 0.6)
    info = torch.iinfo(dtype)
    found = torch.randint(info.min, info.max, shape, generator=g, dtype=torch.int64)
    found[torch.rand(shape, generator=g) < 0.2] = info.max
    found[torch.rand(shape, generator=g) < 0.1] = info.min
    return found.to(dtype)


KINDS: dict[str, Callable[[tuple[int, ...], torch.dtype, torch.Generator], torch.Tensor]] = {
    "uniform": _uniform,
    "counting": _counting,
    "ones": _ones,
    "limits": _limits,
}
"""Kinds of numbers: between -1 and 1 (integers: -3 to 3); 1, 2, 3, ...; 1; the ends of an integer's range."""
SPECIAL = (math.nan, math.inf, -math.inf)


def numbers(values: DrawnValues, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous tensor of these values."""
    g = torch.Generator().manual_seed(values.seed)
    made = KINDS[values.kind](shape, dtype, g).contiguous()
    if values.specials and made.numel() and (dtype.is_floating_point or dtype.is_complex):
        flat = made.view(-1)
        for n in range(values.specials):
            at = int(torch.randint(0, flat.numel(), (1,), generator=g))
            flat[at] = SPECIAL[(values.seed + n) % 3]
    return made


# -- operands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """What a case is run with, and what the reference reads.

    Attributes:
        leaves: the tensor that each operand's values are laid out from; gradients are those of these.
        coords: (sparse modes, nnz) of each sparse operand, on the CPU.
        space: variables of the operands.
    """

    case: Case
    leaves: tuple[torch.Tensor, ...]
    coords: tuple[torch.Tensor | None, ...]
    space: dict[str, Any]


def build(case: Case) -> Built:
    """Make the operands of a case."""
    import sparsetc as stc

    leaves: list[torch.Tensor] = []
    coords: list[torch.Tensor | None] = []
    space = modules()
    space["stc"] = stc
    for operand, name in zip(case.operands, case.names, strict=True):
        if operand.same_as is not None:
            leaves.append(leaves[operand.same_as])
            coords.append(coords[operand.same_as])
            space[name] = space[case.names[operand.same_as]]
            continue
        leaf = leaf_of(operand, case)
        where = coordinates(operand)
        space[name] = laid_out(operand, leaf)
        if where is not None:
            space[f"{name}_coords"] = where.to(case.device, copy=True)
            parts = {"c": space[f"{name}_coords"], "v": space[name]}
            space[name] = _evaluate(sparse_text(operand.form, "c", "v", operand.shape), space | parts)
        leaves.append(leaf)
        coords.append(where)
    return Built(case, tuple(leaves), tuple(coords), space)


def leaf_of(operand: DrawnOperand, case: Case) -> torch.Tensor:
    """The tensor that an operand's values are laid out from."""
    shape, dtype = {**MEMORY, **ARRAYS}[operand.memory].base(operand.value_shape, case.dtype_of(operand))
    leaf = numbers(operand.values, shape, dtype).to(case.device)
    return leaf.requires_grad_() if operand.learned else leaf


def coordinates(operand: DrawnOperand) -> torch.Tensor | None:
    """(sparse modes, nnz) int64; None for a dense operand."""
    if operand.nonzeros is None:
        return None
    order = len(operand.shape) - operand.dense_modes
    return torch.tensor(operand.nonzeros, dtype=torch.int64).reshape(-1, order).T.contiguous()


def laid_out(operand: DrawnOperand, leaf: torch.Tensor, memory: str | None = None) -> Any:
    """An operand's values, or a dense operand itself, laid out in memory as the case has it."""
    text = memory_text(operand.memory if memory is None else memory, "t", operand.value_shape)
    return leaf if text == "t" else _evaluate(text, {"torch": torch, "t": leaf})


def _evaluate(text: str, space: dict[str, Any]) -> Any:
    return eval(_compiled(text, "eval"), space)


@lru_cache(maxsize=1024)
def _compiled(text: str, mode: str) -> CodeType:
    return compile(text, "<case>", mode)


def modules() -> dict[str, Any]:
    """What the texts of `sparsetc.testing.forms` use, but for the package itself."""
    found: dict[str, Any] = {name: import_module(name) for name in ("torch", "copy", "io", "pickle")}
    found["ThreadPoolExecutor"] = ThreadPoolExecutor
    if find_spec("scipy") is not None:  # asked for by the tests' requirements, not by the package's
        import_module("scipy.sparse")
        found["scipy"] = import_module("scipy")
    return found


# -- the call ---------------------------------------------------------------------------------------------------------


def written(case: Case) -> str:
    """The equation in the case's notation."""
    terms = [_term(case, o.letters) for o in case.operands]
    text = ",".join(terms)
    if case.notation != "implicit":
        text += "->" + _term(case, case.output)
    if case.notation == "spaced":
        text = " ".join(text.replace("->", "=").replace("...", "~")).replace("=", "->").replace("~", "...")
    return text


def _term(case: Case, letters: str) -> str:
    endings = (case.ellipsis[n:] for n in range(len(case.ellipsis)))
    block = next((e for e in endings if e in letters), "")
    return letters.replace(block, "...") if block else letters


def implicit(case: Case) -> str:
    """The output that an equation without "->" has."""
    text = "".join(o.letters for o in case.operands)
    shown = "".join(c for c in text if c not in case.ellipsis)
    return case.ellipsis + "".join(sorted(c for c in set(shown) if shown.count(c) == 1))


def settings(case: Case, plan: str = "") -> str:
    """Options of the call that are not the defaults, as keyword arguments; `plan` is a plan's text to take instead."""
    given = {
        "plan": plan or (None if case.plan.name == "auto" else str(case.plan)),
        "precision": repr(case.precision) if case.precision else None,
        "deterministic": "True" if case.deterministic else None,
        "backend": repr(case.backend) if _named_backend(case) else None,
        "memory_limit": str(case.memory_limit) if case.memory_limit else None,
    }
    return ", ".join(f"{k}={v}" for k, v in given.items() if v is not None)


def _named_backend(case: Case) -> bool:
    return case.backend != ("torch" if case.device == "cpu" else "triton")


def _arguments(case: Case, with_settings: bool, plan: str = "") -> str:
    names = case.names
    if case.notation == "sublists":
        lists = [[SUBLIST.index(c) for c in o.letters] for o in case.operands]
        given = ", ".join(f"{n}, {at}" for n, at in zip(names, lists, strict=True))
        given += f", {[SUBLIST.index(c) for c in case.output]}"
    elif case.notation == "list":
        given = f'"{written(case)}", [{", ".join(names)}]'
    else:
        given = ", ".join((f'"{written(case)}"', *names))
    options = settings(case, plan) if with_settings else ""
    form = f'output="{case.form}"' if case.form != "auto" else ""
    return ", ".join(filter(None, (given, options, form)))


def call_text(case: Case) -> str:
    """The lines that call the einsum in the case's circumstance and bind ``found``."""
    around = "gradients({})" if case.kind == "gradients" else "{}"
    dense = ", ".join(n for n, o in zip(case.names, case.operands, strict=True) if not o.sparse)
    first = next(n for n, o in zip(case.names, case.operands, strict=True) if o.sparse)
    order = len(next(o for o in case.operands if o.sparse).letters)
    others = sum(o.sparse for o in case.operands) - 1
    text = CIRCUMSTANCES[case.circumstance].text.format(
        call=around.format(f"stc.einsum({_arguments(case, True)})"),
        bare=around.format(f"stc.einsum({_arguments(case, False)})"),
        compile=f"stc.compile({_arguments(case, True)})",
        kept=around.format(f"k({dense})"),
        dense=dense,
        x=first,
        doubled=", ".join((f"{first}.values * 2", *["None"] * others)),
        limited=around.format(f"stc.einsum({_arguments(case, True)}, memory_limit=2**40 + n)"),
        planned=around.format(f"stc.einsum({_arguments(case, True, 'k.plan')})"),
        settings=settings(case),
        device=case.device,
        identity="{0}->{0}".format("abcdefgh"[:order]),
    )
    return "\n".join((*_split_lines(case), text))


def _split_lines(case: Case) -> tuple[str, ...]:
    """Lines that make a plan of two parts: long rows by one plan, the others by rows."""
    if case.plan.name != SPLIT:
        return ()
    long, threshold = (v for _, v in case.plan.arguments)
    plain = _arguments(replace(case, plan=PlanCall()), True)
    name = f"{long}+rows"
    return (
        f"parts = tuple(stc.compile({plain}, plan=p).plan.parts[0] for p in ({long!r}, 'rows'))",
        f"plan = stc.Plan({name!r}, parts, False, 'run_length', (('threshold', {threshold}),))",
    )


def run_call(case: Case, space: dict[str, Any]) -> Any:
    """Run the lines of the call; returns what they found."""
    exec(_compiled(call_text(case), "exec"), space)
    return space["found"]
