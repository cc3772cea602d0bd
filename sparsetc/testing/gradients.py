"""Gradients of a case, as they are found and as they are expected.

In: a built case. Out: a function that differentiates a result, and the reference's gradients, which torch's autograd
finds through the reference in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparsetc.testing.build import Built
from sparsetc.testing.case import Case
from sparsetc.testing.compare import SMALLEST, Expected, dense_of, tolerance
from sparsetc.testing.expected import magnitude_leaves, rounded_to, terms_of, wide_leaves
from sparsetc.testing.reference import evaluate


def gradient_names(case: Case) -> tuple[str, ...]:
    """Whose gradients are found: the learned operands, and the upstream gradient where it is differentiated again."""
    learned = tuple(n for n, o in zip(case.names, case.operands, strict=True) if o.learned)
    return (*learned, "upstream") if case.second else learned


class Gradients:
    """A function of a result that gives the gradients of the learned leaves, for a fixed upstream gradient."""

    def __init__(self, built: Built) -> None:
        case = built.case
        self.case, self.leaves = case, [leaf for leaf in built.leaves if leaf.requires_grad]
        self.upstream = upstream(case).to(case.device)
        self.seconds = [seconds(case, n, leaf) for n, leaf in enumerate(self.leaves)]

    def __call__(self, result: Any) -> tuple[torch.Tensor | None, ...]:
        dense, _ = dense_of(result)
        return differentiated(dense, self.leaves, self.upstream, self.seconds if self.case.second else None)


def upstream(case: Case) -> torch.Tensor:
    """The gradient of the result, dense, in the operands' dtype."""
    g = torch.Generator().manual_seed(case.seed + 1)
    shape = [case.sizes[c] for c in case.output]
    made = torch.rand(shape, generator=g, dtype=torch.float64) * 2 - 1
    if case.promoted.is_complex:
        made = torch.complex(made, torch.rand(shape, generator=g, dtype=torch.float64))
    return made.to(case.promoted)


def seconds(case: Case, n: int, leaf: torch.Tensor) -> torch.Tensor:
    """What the n-th gradient is multiplied with before it is differentiated again."""
    g = torch.Generator().manual_seed(case.seed + 2 + n)
    return (torch.rand(leaf.shape, generator=g, dtype=torch.float64) * 2 - 1).to(leaf.dtype).to(leaf.device)


def differentiated(
    dense: torch.Tensor, leaves: Sequence[torch.Tensor], upstream: torch.Tensor, seconds: Sequence[torch.Tensor] | None
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the leaves, or gradients of these and of the upstream gradient."""
    again = seconds is not None
    upstream = upstream.to(dense.dtype).clone().requires_grad_(again)
    first = torch.autograd.grad(dense, leaves, upstream, create_graph=again, retain_graph=True, allow_unused=True)
    if seconds is None:
        return first
    pairs = [(g, s) for g, s in zip(first, seconds, strict=True) if g is not None and g.requires_grad]
    if not pairs:
        return (*(None for _ in leaves), None)
    gradients, others = zip(*pairs, strict=True)
    return torch.autograd.grad(gradients, [*leaves, upstream], others, retain_graph=True, allow_unused=True)


def gradient_expected(built: Built) -> list[Expected]:
    """The reference's gradients of a case."""
    case = built.case
    exact = _reference_gradients(built, wide_leaves(built), False)
    sizes = _reference_gradients(built, magnitude_leaves(built), True)
    learned = [leaf.dtype for leaf in built.leaves if leaf.requires_grad]
    dtypes = [*learned, case.promoted] if case.second else learned
    found = []
    for values, magnitude, dtype in zip(exact, sizes, dtypes, strict=True):
        names = [*rounded_to(case), str(dtype).removeprefix("torch.")]
        limit = 2 * max(tolerance(name, case.precision) for name in names)
        found.append(Expected(values, magnitude, dtype, limit, max(SMALLEST.get(name, 0.0) for name in names)))
    return found


def _reference_gradients(built: Built, leaves: list[torch.Tensor], magnitude: bool) -> list[torch.Tensor]:
    case = built.case
    for leaf, original in zip(leaves, built.leaves, strict=True):
        leaf.requires_grad_(original.requires_grad)
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    result = evaluate(terms_of(built, leaves, magnitude), case.output, case.sizes)
    above = upstream(case).to(result.dtype) if not magnitude else upstream(case).abs().double()
    own = [leaf for leaf in built.leaves if leaf.requires_grad]
    others = [seconds(case, n, leaf).cpu() for n, leaf in enumerate(own)]
    others = [s.abs().double() if magnitude else s.to(leaf.dtype) for s, leaf in zip(others, learned, strict=True)]
    if not result.requires_grad:
        result = result + sum((leaf.sum() * 0 for leaf in learned), torch.zeros((), dtype=result.dtype))
    found = differentiated(result, learned, above, others if case.second else None)
    shapes = [*learned, above] if case.second else learned
    return [torch.zeros_like(s) if f is None else f.detach() for f, s in zip(found, shapes, strict=True)]
