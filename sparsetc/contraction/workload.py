"""Several einsums of one sparse operand, planned together, so that they may share one packed copy of it.

In: equations, the sparse operand, the dense operands of each. Out: a `Contraction` each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sparsetc.contraction.base import Contraction, Operand
from sparsetc.contraction.contraction import cache_key, contraction
from sparsetc.contraction.dense import repeated_dims
from sparsetc.contraction.facts import Facts, in_place
from sparsetc.ir.equation.parse import parse
from sparsetc.options import Options
from sparsetc.planner.candidate import Choice
from sparsetc.tensor.pattern import lasting
from sparsetc.tensor.sparse_tensor import SparseTensor

Workload = Sequence[tuple[str, Sequence[Operand]]]
"""Equations with their operands, the first of each being the sparse one."""


def compiled_together(
    workload: Workload, settings: Options, form: str, repeated: bool = False
) -> tuple[Contraction, ...]:
    """Compile einsums of one sparse operand.

    They are planned together where each is one step of a tensor without dense modes and blocks; otherwise each alone.

    Args:
        workload: equations with operands; values are only looked at for their dtypes.
        settings: the plan, the memory limit and all else that is common to them.
        form: of the results, ``auto``, ``dense`` or ``sparse``.
        repeated: as `canonicalise` takes it.
    """
    from sparsetc.planner.workload import choose_together  # which an import of the package does not need

    settings = replace(settings, precision=settings.effective_precision())
    bounds = [parse(text, [tuple(o.shape) for o in own], list(map(_is_sparse, own))) for text, own in workload]
    given = [own for _, own in workload]
    x = given[0][0]
    assert isinstance(x, SparseTensor)
    choices: Sequence[tuple[Choice | None, Any]] | None = None
    plain = not x.dense_order and not x.blocksize and all(sum(map(_is_sparse, own)) == 1 for own in given)
    if plain:
        with lasting():
            facts = [Facts.of(b, own, settings, form, repeated) for b, own in zip(bounds, given, strict=True)]
            with in_place(settings, x.device):
                limit = settings.memory_on(x.device)
                choices = choose_together(settings.plan, [f.problem for f in facts], limit)
    choices = choices or [(None, settings.plan)] * len(bounds)
    return tuple(
        contraction(bound, own, replace(settings, plan=again), form, repeated, choice)
        for bound, own, (choice, again) in zip(bounds, given, choices, strict=True)
    )


def kept_together(workload: Workload, settings: Options, form: str) -> tuple[Contraction, ...]:
    """The contractions that are kept with the sparse operand's pattern for this workload, or new ones."""
    x = workload[0][1][0]
    assert isinstance(x, SparseTensor)
    key = ("workload", *(_key(text, own, settings, form) for text, own in workload))
    try:
        found = x._pattern.cache.get(key)
    except TypeError:  # a plan that cannot be hashed
        return compiled_together(workload, settings, form, repeated=True)
    if found is None:
        found = x._pattern.cache.put(key, compiled_together(workload, settings, form, repeated=True))
    return found  # type: ignore[no-any-return]


def _key(text: str, operands: Sequence[Operand], settings: Options, form: str) -> object:
    dims = [repeated_dims(o) if isinstance(o, torch.Tensor) else None for o in operands]
    return cache_key(text, [(o.shape, o.dtype, o.device) for o in operands], dims, (), settings, form)


def _is_sparse(operand: Operand) -> bool:
    return isinstance(operand, SparseTensor)
