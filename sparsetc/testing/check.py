"""One case, run and compared with the reference.

In: a `Case`. Out: whether it was checked or refused, or an error: `Wrong` where the result is not the reference's, and
whatever the call raised. While the call runs, memory that torch gives uninitialised is filled with NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparsetc.testing.around import poisoned, quiet, settings_kept, time_limit
from sparsetc.testing.build import Built, build, run_call
from sparsetc.testing.case import Case
from sparsetc.testing.compare import Expected, Wrong, check_result, check_values
from sparsetc.testing.equations import HUGE
from sparsetc.testing.expected import result_expected
from sparsetc.testing.forms import CIRCUMSTANCES
from sparsetc.testing.gradients import Gradients, gradient_expected, gradient_names

ALWAYS, ALWAYS_MANY = ("auto", "coo"), ("auto", "scalar", "dense")
"""Plans that apply to every einsum of one sparse operand, or of several."""


def check(case: Case, limit: float = 60.0) -> str:
    """Run a case and compare it with the reference; returns ``"checked"``, or ``"refused"`` by a plan.

    Args:
        case: what to run.
        limit: seconds after which `Hang` is raised, in a process's main thread.
    """
    from sparsetc import DtypeError, FormatError, OutOfMemoryError, PlanError

    with quiet(), time_limit(limit):
        built = build(case)
        expected = gradient_expected(built) if case.kind == "gradients" else [result_expected(built)]
        try:
            found, again = _found(built)
        except (PlanError, FormatError):
            made = "k" in built.space or ("plan" in built.space and not case.deterministic)
            applies = case.plan.name in (ALWAYS_MANY if case.several else ALWAYS) and not _no_product(case)
            if applies or made:  # what a kernel says its plan is can be given back
                raise
            return "refused"
        except DtypeError:
            if fits(expected[0]):
                raise
            return "checked"
        except OutOfMemoryError:
            if not case.memory_limit and max(case.sizes.values(), default=0) <= HUGE:
                raise
            return "refused"
        compare(built, found, expected)
        if again is not None:
            _same_bits(found, again)
    return "checked"


def fits(expected: Expected) -> bool:
    """Whether the result, and any part of its sums, can be held by its dtype; true of all that are no integers."""
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        return True
    return expected.fits and (not expected.magnitude.numel() or in_range(expected.magnitude, expected.dtype))


def in_range(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether absolute values of integers are in a dtype's range."""
    return bool((values <= torch.iinfo(dtype).max).all())


def _no_product(case: Case) -> bool:
    """Whether the plan needs a matrix product of integers on a GPU, where torch has none."""
    return case.plan.name == "dense" and case.device != "cpu" and case.dtype.startswith("int")


def _found(built: Built) -> tuple[Any, Any]:
    case = built.case
    before = [leaf.detach().clone() for leaf in built.leaves]
    space = built.space
    if case.kind == "gradients":
        space["gradients"] = Gradients(built)
    original = dict(space)
    with poisoned(), settings_kept():
        found = run_call(case, space)
        bits = case.deterministic and CIRCUMSTANCES[case.circumstance].bits
        again = run_call(case, original) if bits else None
    if not CIRCUMSTANCES[case.circumstance].changes:
        for leaf, kept, name in zip(built.leaves, before, case.names, strict=True):
            if not torch.equal(_bits(leaf.detach()), _bits(kept)):
                raise Wrong("operand", f"the values of {name} were changed by the call")
    return found, again


def compare(built: Built, found: Any, expected: Sequence[Expected]) -> None:
    """Raise `Wrong` unless what was found, a result or gradients, is what was expected."""
    case = built.case
    if case.kind != "gradients":
        coalesced = case.several or all(o.form != "uncoalesced" for o in case.operands)
        check_result(found, expected[0], case.form, coalesced)
        return
    for name, gradient, wanted in zip(gradient_names(case), found, expected, strict=True):
        what = f"gradient of {'a dense' if name in 'abcdefg' else 'a sparse'} operand"
        what = what if name != "upstream" else "gradient of a gradient"
        if gradient is None:
            gradient = torch.zeros(wanted.values.shape, dtype=wanted.dtype)
        if gradient.dtype != wanted.dtype or gradient.shape != wanted.values.shape:
            raise Wrong(what, f"{gradient.dtype} of shape {tuple(gradient.shape)}, expected {wanted.dtype}, {name}")
        check_values(gradient.detach().cpu(), wanted, what)


def _same_bits(found: Any, again: Any) -> None:
    pairs = zip(found, again, strict=True) if isinstance(found, tuple) else [(found, again)]
    for one, other in pairs:
        a, b = (getattr(r, "values", r) if not isinstance(r, torch.Tensor) else r for r in (one, other))
        if a is not None and not torch.equal(_bits(a.detach()), _bits(b.detach())):
            raise Wrong("determinism", "a second run gave other bits")


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Values with NaN replaced, so that equal ones compare equal."""
    values = values.resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(values).nan_to_num(nan=12345.0) if values.is_complex() else values.nan_to_num(nan=12345.0)
